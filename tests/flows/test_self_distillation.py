"""A comparison of GRPO with SDPO, whole, on the tiny model in the embedded shop."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from deploy.local_service.launch import LocalService
from evidence.execution import ExecutionFile
from evidence.run import Run
from flows.distillation import refuse_distillation
from flows.outcome import Outcome
from flows.plan import RunPlan
from flows.run import run_comparison
from losses.reference import sdpo
from tasks.stored_alignment import contradictions_of
from tasks.stored_rescoring import rescoring_contradictions
from tasks.stored_updates import stored_arm
from tests.conftest import LOCAL_API_KEY
from tests.flows import retail_spec
from tests.flows.conftest import make_plan

ROOT = Path(__file__).resolve().parents[2]
KEY = ("sdpo", "train", 0)
LATER = ("sdpo", "train", 1)
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def retail_run(
    tmp_path_factory: pytest.TempPathFactory, local_service: LocalService
) -> tuple[Run, Outcome]:
    """One undisturbed run of both arms."""
    folder = tmp_path_factory.mktemp("retail")
    document = retail_spec.spec(steps=1)
    execution = retail_spec.execution(document, rollout_steps=1)
    plan = make_plan(folder, local_service.url, document=document, execution=execution)
    outcome = run_comparison(plan)
    return Run.open(f"{folder}/run"), outcome


def _status(run: Run, gate: str) -> str | None:
    found = run.gate(gate)
    return None if found is None else found.status


def test_both_arms_go_through_every_gate_to_a_verdict(retail_run: tuple[Run, Outcome]) -> None:
    run, outcome = retail_run

    assert outcome.exit_kind == "inconclusive"
    assert {
        gate: _status(run, gate) for gate in ("forced_checks", "correctness", "activation")
    } == {
        "forced_checks": "passed",
        "correctness": "passed",
        "activation": "passed",
    }
    assert [key[:2] for key in run.keys("rescoring")] == [
        ("sdpo", "pilot"),
        ("sdpo", "train"),
    ]
    assert {row["criterion"] for row in run.read_table("decision")} == {"primary", "reward_guard"}


def test_advantages_are_the_clipped_gap_on_trained_tokens_alone(
    retail_run: tuple[Run, Outcome],
) -> None:
    run, _ = retail_run
    trained = [row for row in run.read_table("tokens", key=KEY) if row["loss_mask"]]
    rescored = run.read_table("rescoring", key=KEY)

    assert [_place(row) for row in rescored] == [_place(row) for row in trained]
    for token, row in zip(trained, rescored, strict=True):
        assert token["advantage"] is None
        assert row["sampling_logprob"] == token["sampling_logprob"]
        gap = row["teacher_logprob"] - row["sampling_logprob"]
        assert abs(row["advantage"] - max(-5.0, min(5.0, gap))) < ROUNDING


def test_updates_train_on_the_rescored_advantages(retail_run: tuple[Run, Outcome]) -> None:
    run, _ = retail_run
    rescored = {_place(row): row["advantage"] for row in run.read_table("rescoring", key=KEY)}

    used = {_place(row): row["advantage"] for row in run.read_table("update_tokens", key=KEY)}

    assert used == rescored
    assert any(value != 0.0 for value in used.values())


def test_teacher_is_shown_another_attempt_and_the_judges_words(
    retail_run: tuple[Run, Outcome],
) -> None:
    """All rewards are equal, so the lowest sample that is not the attempt itself is shown."""
    run, _ = retail_run
    rewards = {(row["group"], row["sample"]): row for row in run.read_table("rollouts", key=KEY)}
    teachers = run.read_table("teachers", key=KEY)

    assert [row["solution_sample"] for row in teachers] == [1, 0, 0, 1, 0, 0]
    for row in teachers:
        sibling = rewards[row["group"], row["solution_sample"]]
        assert row["solution_reward"] == sibling["reward"]
        assert row["solution_native_reward"] == sibling["native_reward"]
        assert (row["solution_shown"], row["feedback_shown"], row["over_length"]) == (
            True,
            True,
            False,
        )


def test_result_counts_what_the_teacher_was_shown(retail_run: tuple[Run, Outcome]) -> None:
    run, _ = retail_run
    metrics = (run.result() or {})["metrics"]["arms"]["sdpo"]
    gaps = [
        abs(row["teacher_logprob"] - row["sampling_logprob"])
        for row in run.read_table("rescoring", key=KEY)
    ]

    assert {name: value for name, value in metrics.items() if name.startswith("teacher_")} == {
        "teacher_trajectories": 6.0,
        "teacher_solutions_shown": 6.0,
        "teacher_solutions_dropped": 0.0,
        "teacher_over_length": 0.0,
        "teacher_missing_tokens": 0.0,
        "teacher_clipped_tokens": float(sum(gap > 5.0 for gap in gaps)),
        "teacher_mean_abs_gap": pytest.approx(np.mean(gaps), rel=1e-6),
    }


def test_stored_files_of_a_teachers_arm_agree(retail_run: tuple[Run, Outcome]) -> None:
    stored = stored_arm(retail_run[0], arm="sdpo", phase="train")
    assert stored is not None

    assert contradictions_of(stored) == []


def test_advantages_that_the_scores_do_not_give_are_named(retail_run: tuple[Run, Outcome]) -> None:
    """With half the clip, what was cut at 5 nats is too large."""
    stored = stored_arm(retail_run[0], arm="sdpo", phase="train")
    assert stored is not None
    settings = stored.execution.advantage_of("sdpo").config
    gaps = [
        abs(row["teacher_logprob"] - row["sampling_logprob"])
        for row in retail_run[0].read_table("rescoring", key=KEY)
    ]

    (problem,) = rescoring_contradictions(stored, settings | {"clip": 0.5})

    assert problem.startswith(f"step 0: advantages of {sum(gap > 0.5 + 1e-4 for gap in gaps)} tok")


def test_rescoring_equals_a_full_recomputation_from_the_tables(
    retail_run: tuple[Run, Outcome], local_service: LocalService
) -> None:
    """The teacher's text is written by hand here, and each turn is scored by itself."""
    run, _ = retail_run
    uri = run.events("initialization")[0]["uri"]
    client = tinker.ServiceClient(base_url=local_service.url, api_key=LOCAL_API_KEY)
    initial = client.create_training_client_from_state_with_optimizer(uri).result()
    scorer = initial.save_weights_and_get_sampling_client().result()
    rescored = {_place(row): row["teacher_logprob"] for row in run.read_table("rescoring", key=KEY)}
    worst, compared = 0.0, 0

    for teacher in run.read_table("teachers", key=KEY):
        place = (teacher["group"], teacher["sample"])
        tokens = [row for row in run.read_table("tokens", key=KEY) if _place(row)[:2] == place]
        ids = [row["token_id"] for row in tokens]
        prefix = [1, *_bytes(f"system\n{_teacher_text(run, teacher)}"), 2]
        assert teacher["teacher_prefix_tokens"] == len(prefix)
        for start, end in _turns(tokens):
            sequence = [*prefix, *ids[teacher["student_prefix_tokens"] : end]]
            answer = scorer.compute_logprobs(tinker.ModelInput.from_ints(sequence)).result()
            for position, value in zip(range(start, end), answer[start - end :], strict=True):
                worst = max(worst, abs(rescored[(*place, position)] - value))
                compared += 1

    assert compared == len(rescored)
    assert worst == 0.0


def test_forced_checks_measure_alignment_and_where_the_gradient_lies(
    retail_run: tuple[Run, Outcome],
) -> None:
    gate = retail_run[0].gate("forced_checks")
    assert gate is not None
    measured = {check.check: check.measured for check in gate.checks}

    assert measured["rescored_tokens_aligned"]["max_abs"] == 0.0
    assert measured["unchanged_prompt_scores_as_sampled"] == 0.0
    assert measured["advantages_change_with_solution"] > 0.1
    gradient = measured["gradient_on_sampled_tokens_alone"]
    assert gradient["off_mask"] == 0
    assert gradient["on_mask"] == gradient["nonzero_advantages"] > 0


def test_gate_metrics_of_both_arms_come_from_the_pilots_tables(
    retail_run: tuple[Run, Outcome],
) -> None:
    run, _ = retail_run
    gate = run.gate("activation")
    assert gate is not None
    measured = {check.check: check.measured for check in gate.checks}
    gaps = [
        abs(row["teacher_logprob"] - row["sampling_logprob"])
        for row in run.read_table("rescoring", key=("sdpo", "pilot", 0))
    ]

    assert measured["sdpo_frac_tokens_abs_adv_gt_0.1"] == sum(g > 0.1 for g in gaps) / len(gaps)
    assert math.isclose(measured["sdpo_mean_abs_token_adv"], sum(gaps) / len(gaps), rel_tol=1e-9)
    assert measured["sdpo_frac_trajectories_with_feedback"] == 1.0
    assert measured["grpo_frac_groups_nonzero_adv"] == 0.0
    assert measured["judge_parse_success_rate"] == 1.0
    assert measured["executed_base_model"] == "tiny"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"environment": {"name": "arithmetic", "settings": {}}}, "environment.name"),
        ({"sdpo": {"prompt_template": "other"}}, "arms.sdpo.advantage.prompt_template"),
        ({"sdpo": {"feedback": "environment"}}, "arms.sdpo.advantage.feedback"),
        ({"rollout": {"temperature": 0.7}}, "rollout.temperature"),
    ],
)
def test_teacher_that_cannot_be_asked_as_registered_is_refused(
    changes: dict[str, Any], named: str
) -> None:
    document = retail_spec.spec()
    made = retail_spec.execution(document, sdpo=changes.pop("sdpo", None))
    for name, value in changes.items():
        made[name] = made[name] | value

    with pytest.raises(ValueError, match=f"^{named}: expected "):
        refuse_distillation(ExecutionFile.parse(made))


def _place(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["group"], row["sample"], row["position"]


def _bytes(text: str) -> list[int]:
    """Tokens of the tiny model's byte tokenizer."""
    return [3 + byte for byte in text.encode()]


def _teacher_text(run: Run, teacher: dict[str, Any]) -> str:
    group = teacher["group"]
    solution = "\n".join(
        f"{row['role']}: {row['content']}"
        for row in run.read_table("turns", key=KEY)
        if (row["group"], row["sample"]) == (group, teacher["solution_sample"])
    )
    (own,) = (
        row
        for row in run.read_table("rollouts", key=KEY)
        if (row["group"], row["sample"]) == (group, teacher["sample"])
    )
    rationale = json.loads(own["info_json"])["info"]["rationale"]
    text = (
        f"Correct solution:\n{solution}\n\n"
        f"The following is feedback from your unsuccessful earlier attempt:\n{rationale}\n\n"
        "Correctly solve the original question.\n\nHelp."
    )
    for special in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):  # sampled, and shown as text
        text = text.replace(special, f"< {special[1:]}")
    return text


def _turns(tokens: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Bounds of the agent's turns, from the columns of `tokens`."""
    bounds: dict[int, list[int]] = {}
    for row in tokens:
        if row["loss_mask"]:
            bounds.setdefault(row["turn"], []).append(row["position"])
    return [(positions[0], positions[-1] + 1) for positions in bounds.values()]


@pytest.mark.slow
def test_killed_self_distillation_goes_on_and_ends_the_same(
    tmp_path: Path, local_service: LocalService
) -> None:
    """Killed with one group rescored, again in an update, and again with an episode kept.

    The arm mixes GRPO's advantage with that of the frozen initial teacher.
    """
    document = retail_spec.spec()
    made = retail_spec.hybrid_execution(document)

    def plan(folder: Path) -> RunPlan:
        return make_plan(folder, local_service.url, document=document, execution=made)

    run_comparison(plan(tmp_path / "whole"))
    undisturbed = Run.open(f"{tmp_path}/whole/run")
    for moment in ("part:rescored:1", "event:step_outcome:train:2", "part:episodes/sdpo/train:2"):
        folder = tmp_path / moment.replace(":", "-").replace("/", "-")
        command = [sys.executable, "-m", "tests.flows.victim", local_service.url]
        died = subprocess.run([*command, str(folder), moment, "retail"], cwd=ROOT, check=False)
        assert died.returncode == -9, moment
        outcome = run_comparison(plan(folder))
        run = Run.open(f"{folder}/run")
        assert run.content_digests() == undisturbed.content_digests(), moment
        assert (run.result() or {})["metrics"] == (undisturbed.result() or {})["metrics"]
        assert outcome.verdict == "inconclusive"
    versions = {row["policy_version"] for row in undisturbed.read_table("teachers", key=LATER)}
    assert versions == {0}
    for row in undisturbed.read_table("rescoring", key=LATER):
        gap = max(-5.0, min(5.0, row["teacher_logprob"] - row["sampling_logprob"]))
        assert abs(row["advantage"] - 0.75 * gap) < ROUNDING


@pytest.mark.slow
def test_logit_level_arm_trains_on_what_its_tables_hold(
    tmp_path: Path, local_service: LocalService
) -> None:
    """On the first update both sides' scores are in `supports`; the loss follows from them alone."""
    document = retail_spec.spec(steps=1)
    made = retail_spec.execution(document, rollout_steps=1)
    made["arms"]["sdpo"]["loss"] = {
        "kind": "sdpo_logit",
        "alpha": 0.5,
        "top_k": 4,
        "add_tail": True,
        "is_clip": 2.0,
    }

    run_comparison(make_plan(tmp_path, local_service.url, document=document, execution=made))

    run = Run.open(f"{tmp_path}/run")
    rows = run.read_table("supports", key=KEY)
    (update,) = run.read_table("updates", key=KEY)
    scored = run.read_table("rescoring", key=KEY)
    student, teacher = (
        np.array([row[name] for row in rows], dtype=np.float64).reshape(1, -1, 4)
        for name in ("sampling_logprob", "teacher_logprob")
    )
    mask = np.ones((1, len(scored)))
    terms, _ = sdpo.logit_level(
        student, teacher, mask, alpha=0.5, support="topk_tail", weights=mask
    )
    assert _status(run, "correctness") == "passed"
    assert len(rows) == 4 * len(scored) == 4 * update["loss_tokens"]
    assert math.isclose(update["loss"], terms.sum(), rel_tol=1e-5)
    shown = {(_place(row), row["token_id"]): row["teacher_logprob"] for row in rows}
    sampled = {_place(row): row["token_id"] for row in run.read_table("tokens", key=KEY)}
    both = [row for row in scored if (_place(row), sampled[_place(row)]) in shown]
    assert both
    for row in both:
        assert row["teacher_logprob"] == shown[_place(row), sampled[_place(row)]]
