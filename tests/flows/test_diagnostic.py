"""Bounded diagnostics on the tiny model, through the real client and the embedded service."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local_service.launch import LocalService
from evidence.diagnostic_file import DiagnosticFile
from evidence.diagnostic_spec import next_comparison, revised_plan
from evidence.errors import ConflictError, InputError
from evidence.execution import ExecutionFile
from evidence.profile import unscaled
from evidence.run import Run
from evidence.spec import Spec
from flows.diagnose import run_diagnostic
from flows.diagnostic_plan import DiagnosticOutcome, DiagnosticPlan
from flows.plan import check_launchable
from flows.run import run_comparison
from tasks.diagnostic_budget import BudgetExhausted, remaining_budget
from tasks.investigation import investigate
from tasks.progress import ProgressEvent
from tasks.service_settings import ServiceSettings
from tests.flows import tiny_spec
from tests.flows.conftest import make_plan

_RETAIL = Path(__file__).parents[2] / "flows" / "specs" / "retail-sdpo.execution.json"

SETTINGS: dict[str, Any] = {
    "version": 1,
    "arm": "dppo",
    "reason": "the mask did not fire",
    "groups": 8,
    "group_size": 4,
    "minibatches": 8,
    "epochs": 2,
    "max_updates": 16,
    "wall_minutes": 5,
    "sentinels": {"sequences": 8, "after_updates": [1, 2, 4, 8, 16]},
}


def settings(**changes: Any) -> DiagnosticFile:
    return DiagnosticFile.parse(copy.deepcopy(SETTINGS) | changes)


def experiment(
    **rollout: Any,
) -> tuple[Spec, dict[str, Any]]:
    document = tiny_spec.spec()
    raw = tiny_spec.execution(document)
    raw["arms"]["dppo"]["loss"] |= {"delta_low": 0.02, "delta_high": 0.02}
    operand_max = rollout.pop("operand_max", None)
    if operand_max is not None:
        raw["environment"]["settings"]["operand_max"] = operand_max
    raw["rollout"] |= rollout
    return Spec.parse(document), raw


def make(folder: Path, url: str, **options: Any) -> DiagnosticPlan:
    """A plan of the small experiment."""
    spec, raw = options.pop("experiment", None) or experiment()
    execution = ExecutionFile.parse(raw)
    chosen = options.pop("settings", None) or settings()
    return DiagnosticPlan(
        original=unscaled(spec, execution),
        revised=revised_plan(spec, execution, chosen),
        settings=chosen,
        budget=remaining_budget(spec, execution, chosen, earlier=options.get("earlier")),
        service=ServiceSettings(url=url),
        run_id=options.pop("run_id", "diagnostic"),
        run_dir=str(folder),
        **options,
    )


@pytest.fixture(scope="module")
def diagnosed(
    tmp_path_factory: pytest.TempPathFactory, local_service: LocalService
) -> tuple[Run, DiagnosticOutcome]:
    """One undisturbed diagnostic, for every test that only looks at it."""
    folder = tmp_path_factory.mktemp("diagnosed")
    outcome = run_diagnostic(make(folder, local_service.url))
    return Run.open(f"{folder}/diagnostic"), outcome


Diagnosed = tuple[Run, DiagnosticOutcome]


def test_diagnostic_makes_sixteen_updates_over_one_batch(diagnosed: Diagnosed) -> None:
    run, outcome = diagnosed

    assert (outcome.exit_kind, outcome.verdict, outcome.updates) == (
        "completed",
        "inconclusive",
        16,
    )
    assert [key[2] for key in run.keys("updates")] == list(range(16))
    assert run.keys("tokens") == [("dppo", "diagnostic", 0)]
    assert [key[2] for key in run.keys("sentinels")] == [0, 1, 2, 4, 8, 16]
    assert run.keys("evaluations") == []
    assert outcome.wall_seconds < outcome.cap_seconds == 300.0


def test_diagnostic_fixes_everything_before_it_measures(diagnosed: Diagnosed) -> None:
    """Settings, specs and deviations are there before the service is asked to load anything."""
    run, _ = diagnosed
    events = [event["event"] for event in run.events()]
    posted = run.posted_results()[1]

    assert events.index("result") < events.index("initialization") < events.index("step_intent")
    assert [entry["field"] for entry in posted["deviations"]] == [
        "steps",
        "effective_batch",
        "objective",
        "evaluator",
        "endpoint",
    ]
    assert posted["original_hypothesis_tested"] is False
    assert json.loads(run.read_bytes("files/diagnostic-settings.json")) == SETTINGS
    original = json.loads(run.read_bytes("files/original-spec.json"))
    assert original == tiny_spec.spec()
    assert run.spec["original_activation_gate"] == original["activation_gate"]


def test_diagnostic_restores_an_immutable_full_state(diagnosed: Diagnosed) -> None:
    run, _ = diagnosed
    state = json.loads(run.read_bytes("files/initial-state.json"))

    assert state["immutable"] is True
    assert state["load_succeeded"] is True
    assert state["observed"]["adapter_sha256"] == state["report"]["adapter_sha256"]
    assert state["policy_version"] == 0


def test_diagnostic_persists_what_each_update_was_given(diagnosed: Diagnosed) -> None:
    """Tokens are on the disk before the step; the type is that of the client's tensors."""
    run, _ = diagnosed
    row = run.read_table("updates", key=("dppo", "diagnostic", 9))[0]
    tokens = run.read_table("update_tokens", key=("dppo", "diagnostic", 9))

    assert row["logprob_dtype"] == "float32"
    assert (row["epoch"], row["minibatch"]) == (1, 1)
    assert {token["group"] for token in tokens} == {1}
    assert len(tokens) == row["loss_tokens"]
    assert sum(token["removed"] for token in tokens) == row["masked_tokens"]


def test_sentinels_move_with_training_alone(diagnosed: Diagnosed) -> None:
    """In float32 sampler and trainer agree at the start; what is seen later is the optimizer."""
    _, outcome = diagnosed

    assert outcome.figures["sentinel_init_vs_sampler_absdp_max"] < 1e-6
    assert outcome.figures["sentinel_tokens"] > 0
    assert outcome.figures["sentinel_after_u16_vs_init_absdp_max"] > 1e-3


def test_mask_on_a_recomputed_anchor_is_diagnosed(
    tmp_path: Path, local_service: LocalService
) -> None:
    """The initial state scores the batch before it is frozen, and every replay reads these scores."""
    spec, raw = experiment()
    raw["arms"]["dppo"]["loss"]["anchor"] = "recompute"

    outcome = run_diagnostic(make(tmp_path, local_service.url, experiment=(spec, raw)))

    run = Run.open(f"{tmp_path}/diagnostic")
    frozen = json.loads(run.read_bytes("files/frozen-batch.json"))
    found = investigate(run)
    assert (outcome.exit_kind, outcome.updates) == ("completed", 16)
    assert "recomputed_logprobs" in frozen["arrays"]
    assert (found.findings.missing, found.findings.broken) == ([], [])
    assert found.findings.replay["updates"] == 16
    assert found.findings.replay["decisions_different"] == 0
    assert found.findings.replay["counts_different"] == []


def test_diagnostic_of_one_pass_freezes_no_next_spec(
    tmp_path: Path, local_service: LocalService
) -> None:
    """Eight updates that were all made say nothing about the second pass."""
    outcome = run_diagnostic(make(tmp_path, local_service.url, settings=settings(max_updates=8)))

    assert (outcome.exit_kind, outcome.updates) == ("completed", 8)
    assert outcome.conclusion["category"] == "missing_evidence"
    assert outcome.conclusion["figures"] == {
        "missing": ["0 of 8 updates of the second pass over the batch were made"]
    }
    assert outcome.next_spec is None


def test_active_mask_freezes_a_next_spec_and_launches_nothing(diagnosed: Diagnosed) -> None:
    run, outcome = diagnosed

    assert (outcome.conclusion["category"], outcome.conclusion["cause"]) == (
        "active",
        "mask_active",
    ), outcome.reason
    spec = Spec.parse(run.read_bytes(outcome.next_spec or ""))
    path = "files/next-comparison-spec.execution.json"
    execution = ExecutionFile.parse(run.read_bytes(path))
    check_launchable(spec, execution)
    assert spec.derived_from == Spec.parse(tiny_spec.spec()).digest
    assert execution.rollout.updates_per_step == 16
    event = run.events("next_comparison")[0]
    assert event["launched"] is False
    assert {event["phase"] for event in run.events("step_intent")} == {"diagnostic"}


def test_offline_investigation_repeats_the_diagnostic_s_analysis(diagnosed: Diagnosed) -> None:
    run, _ = diagnosed

    found = json.loads(json.dumps(investigate(run).to_record()))

    assert found == json.loads(run.read_bytes("files/diagnostic-analysis.json"))


class Stop(Exception):
    """Ends a diagnostic from outside."""


def stop_after(updates: int) -> Callable[[ProgressEvent], None]:
    def listen(event: ProgressEvent) -> None:
        if event.phase == "diagnostic" and event.done == updates:
            raise Stop

    return listen


def test_interrupted_diagnostic_goes_on_with_the_same_batch(
    diagnosed: Diagnosed, tmp_path: Path, local_service: LocalService
) -> None:
    with pytest.raises(Stop):
        run_diagnostic(make(tmp_path, local_service.url, progress=stop_after(5)))

    outcome = run_diagnostic(make(tmp_path, local_service.url))

    run = Run.open(f"{tmp_path}/diagnostic")
    assert outcome.updates == 16
    assert run.content_digests() == diagnosed[0].content_digests()


def test_changed_frozen_batch_stops_and_loses_nothing(
    tmp_path: Path, local_service: LocalService
) -> None:
    with pytest.raises(Stop):
        run_diagnostic(make(tmp_path, local_service.url, progress=stop_after(2)))
    run = Run.open(f"{tmp_path}/diagnostic")
    record = Path(run.path) / "files/frozen-batch.json"
    document = json.loads(record.read_text())
    document["arrays"]["masks"] = "0" * 64
    record.chmod(0o644)
    record.write_text(json.dumps(document))

    with pytest.raises(ConflictError, match="frozen batch masks"):
        run_diagnostic(make(tmp_path, local_service.url))

    assert [key[2] for key in run.keys("updates")] == [0, 1]
    assert run.events("stopped")[0]["field"] == "frozen batch masks"


def test_cap_that_setup_exhausts_keeps_the_evidence(
    tmp_path: Path, local_service: LocalService
) -> None:
    plan = make(tmp_path, local_service.url, settings=settings(wall_minutes=1e-4))

    outcome = run_diagnostic(plan)

    run = Run.open(f"{tmp_path}/diagnostic")
    assert (outcome.exit_kind, outcome.updates) == ("cap_reached", 0)
    assert outcome.conclusion["category"] == "missing_evidence"
    assert run.store.exists("files/deviations.json")
    assert run.events("step_intent") == []
    assert (run.result() or {})["verdict"] == "inconclusive"
    assert run_diagnostic(plan) == outcome


def test_setup_before_the_run_counts_on_the_cap(
    tmp_path: Path, local_service: LocalService
) -> None:
    plan = make(tmp_path, local_service.url)
    object.__setattr__(plan, "started", plan.started - 400.0)

    outcome = run_diagnostic(plan)

    assert outcome.exit_kind == "cap_reached"
    assert outcome.wall_seconds > 400.0


def test_checkpoint_that_can_be_overwritten_is_refused(
    diagnosed: Diagnosed, tmp_path: Path, local_service: LocalService
) -> None:
    trained = diagnosed[0].events("checkpoint")[0]["uri"]
    chosen = settings(initial_state={"checkpoint": trained})

    with pytest.raises(InputError, match="an immutable checkpoint"):
        run_diagnostic(make(tmp_path, local_service.url, settings=chosen))


def test_checkpoint_that_is_not_there_is_refused(
    tmp_path: Path, local_service: LocalService
) -> None:
    chosen = settings(initial_state={"checkpoint": "tinker://nobody:train:0/weights/nothing"})

    with pytest.raises(InputError, match="a checkpoint that the service has"):
        run_diagnostic(make(tmp_path, local_service.url, settings=chosen))


def planted(folder: Path, service: LocalService, *faults: str, **rollout: Any) -> DiagnosticOutcome:
    """A diagnostic while the service misbehaves."""
    with httpx.Client(trust_env=False, base_url=f"{service.url}/api/v1/local") as control:
        control.post("/faults", json={"faults": list(faults)}).raise_for_status()
    return run_diagnostic(make(folder, service.url, experiment=experiment(**rollout)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rollout", "cause"),
    [
        ("logprobs_off_by_one", {}, "logprobs_off_by_one"),
        ("temperature_scaled_logprobs", {"temperature": 0.5}, "temperature_scaled_logprobs"),
        ("", {"max_tokens": 1, "operand_max": 60}, "every_answer_truncated"),
    ],
)
def test_fault_of_the_service_is_found(
    fault: str,
    rollout: dict[str, Any],
    cause: str,
    tmp_path: Path,
    faulty_service: LocalService,
) -> None:
    outcome = planted(tmp_path, faulty_service, *filter(None, [fault]), **rollout)

    assert outcome.conclusion["cause"] == cause, outcome.reason


@pytest.mark.slow
def test_stale_sampler_of_a_comparison_is_found(
    tmp_path: Path, faulty_service: LocalService
) -> None:
    """Published weights are those of the publication before: only the pilot's second step shows."""
    gate = copy.deepcopy(tiny_spec.SPEC["activation_gate"])
    gate["checks"][1]["min"] = 0.99
    document = tiny_spec.spec(activation_gate=gate)
    with httpx.Client(trust_env=False, base_url=f"{faulty_service.url}/api/v1/local") as control:
        control.post("/faults", json={"faults": ["stale_sampler"]}).raise_for_status()

    run_comparison(make_plan(tmp_path, faulty_service.url, document=document))

    found = investigate(Run.open(f"{tmp_path}/run"))
    assert (found.phase, found.conclusion.cause) == ("pilot", "stale_sampler_weights")
    assert found.findings.first_gap["nats_q90"] < 1e-4  # type: ignore[index]


@pytest.mark.slow
def test_both_arms_of_a_comparison_with_a_recomputed_anchor_are_counted(
    tmp_path: Path, local_service: LocalService
) -> None:
    """Only the arm that recomputes has what the mask compares with; the other's columns are null."""
    document = tiny_spec.spec()
    raw = tiny_spec.execution(document)
    raw["arms"]["dppo"]["loss"]["anchor"] = "recompute"

    run_comparison(make_plan(tmp_path, local_service.url, document=document, execution=raw))

    run = Run.open(f"{tmp_path}/run")
    rows = {arm: run.read_table("updates", key=(arm, "train", 1))[0] for arm in ("dppo", "grpo")}
    assert rows["dppo"]["exceed"] is not None
    assert rows["grpo"]["exceed"] is None
    assert rows["grpo"]["loss_tokens"] > 0
    for arm in rows:
        found = investigate(run, arm=arm, phase="train").findings
        assert (found.missing, found.broken) == ([], [])
        assert found.replay["counts_different"] == []


def test_diagnostic_of_an_earlier_run_leaves_it_as_it_was(
    whole_run: tuple[Run, object], tmp_path: Path, local_service: LocalService
) -> None:
    """Its initial checkpoint is restored, its minutes count, and its gates are named by digest."""
    earlier = whole_run[0]
    before = {path: earlier.read_bytes(path) for path in earlier.files() if path != ".lock"}
    plan = make(tmp_path, local_service.url, earlier=earlier, settings=settings(max_updates=1))

    outcome = run_diagnostic(plan)

    run = Run.open(f"{tmp_path}/diagnostic")
    after = {path: earlier.read_bytes(path) for path in earlier.files() if path != ".lock"}
    assert after == before
    assert (
        run.events("client_opened")[0]["loaded_uri"] == earlier.events("initialization")[0]["uri"]
    )
    assert plan.budget.used_minutes > 0
    record = json.loads(run.read_bytes("files/earlier-evidence.json"))
    assert "gates/activation.json" in record["files"]
    assert outcome.updates == 1


# ---- without a service --------------------------------------------------------------------------


def test_mask_under_advantages_of_a_teacher_is_refused() -> None:
    spec, raw = experiment()
    teacher = next(
        arm["advantage"]
        for arm in json.loads(_RETAIL.read_text(encoding="utf-8"))["arms"].values()
        if arm["advantage"]["kind"] == "sdpo_token"
    )
    raw["arms"]["dppo"]["advantage"] = teacher | {"feedback": "environment"}

    with pytest.raises(InputError, match=r"advantage of arm dppo.*'sdpo_token'"):
        revised_plan(spec, ExecutionFile.parse(raw), settings())


def test_budget_that_is_used_up_is_refused() -> None:
    spec, raw = experiment()
    chosen = settings(budget_used={"wall_minutes": 30.0})

    with pytest.raises(BudgetExhausted, match=r"30 of 30\.0 wall minutes"):
        remaining_budget(spec, ExecutionFile.parse(raw), chosen, earlier=None)


def test_cap_is_what_is_left_of_the_budget() -> None:
    """30 minutes less 28 leave 2, although the settings would allow 5."""
    spec, raw = experiment()
    chosen = settings(budget_used={"wall_minutes": 28.0})

    left = remaining_budget(spec, ExecutionFile.parse(raw), chosen, earlier=None)

    assert left.cap_minutes == 2.0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"groups": 12}, "groups"),
        ({"minibatches": 4}, "minibatches"),
        ({"epochs": 3}, "epochs"),
        ({"max_updates": 17}, "max_updates"),
        ({"wall_minutes": 12.5}, "wall_minutes"),
        ({"delta_low": 0.1}, "delta_low"),
        ({"sentinels": {"sequences": 8, "after_updates": [3]}}, "sentinels.after_updates"),
        ({"sentinels": {"sequences": 33}}, "sentinels.sequences"),
    ],
)
def test_form_of_the_record_is_no_setting(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        settings(**changes)

    assert caught.value.field.startswith(field)


def test_only_an_arm_that_masks_is_diagnosed() -> None:
    spec, raw = experiment()

    with pytest.raises(InputError, match="masks by divergence"):
        revised_plan(spec, ExecutionFile.parse(raw), settings(arm="grpo"))


def test_next_comparison_measures_the_second_pass() -> None:
    spec, raw = experiment()

    following, _ = next_comparison(spec, ExecutionFile.parse(raw), settings())

    checks = {check["metric"]: check for check in following["activation_gate"]["checks"]}
    assert checks["epoch2_dppo_masked_token_fraction"]["min"] == 0.001
    assert checks["epoch2_dppo_masked_token_fraction"]["max"] == 0.3
    assert checks["epoch2_ppo_counterfactual_clip_fraction"]["min"] == 0.0005
    assert checks["epoch2_policy_drift_abs_p_q90"]["min"] == 0.005
    assert checks["executed_updates_per_batch"] == {
        "metric": "executed_updates_per_batch",
        "min": 16,
        "max": 16,
    }
    assert following["budget"] == spec.raw["budget"]
    assert following["decision_rule"] == spec.raw["decision_rule"]
