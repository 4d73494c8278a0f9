"""A comparison goes through every gate to a verdict, and leaves what it should."""

from __future__ import annotations

from evidence.bundle import build_bundle
from evidence.run import Run
from flows.outcome import Outcome
from flows.run import run_comparison
from tests.flows.conftest import PlanMaker

GATES = (
    "spec_preflight",
    "service_probe",
    "conformance",
    "generation_audit",
    "correctness",
    "restoration",
    "evaluator",
    "activation",
    "feasibility",
)


def test_whole_run_reaches_a_verdict(whole_run: tuple[Run, Outcome]) -> None:
    """Ten items cannot settle anything: sqrt(2 * ln(40) / 10) is 0.859."""
    run, outcome = whole_run

    assert (outcome.exit_kind, outcome.verdict) == ("inconclusive", "inconclusive")
    assert outcome.outcome_reason == "insufficient_evidence"
    assert outcome.steps_completed == 8
    row = run.read_table("decision")[0]
    assert row["n_items"] == 10
    assert abs(row["half_width"] - 0.8589) < 1e-4


def test_whole_run_asks_every_gate_in_order(whole_run: tuple[Run, Outcome]) -> None:
    run, _ = whole_run

    asked = [event["gate"] for event in run.events("gate")]

    assert asked == list(GATES)
    statuses = {gate: run.gates()[gate].status for gate in GATES}
    assert statuses.pop("generation_audit") == "not_applicable"
    assert set(statuses.values()) == {"passed"}, statuses


def test_whole_run_trains_after_the_gates_only(whole_run: tuple[Run, Outcome]) -> None:
    run, _ = whole_run
    events = run.events()

    last_gate = max(event["n"] for event in events if event["event"] == "gate")
    first_step = min(
        event["n"]
        for event in events
        if event["event"] == "step_intent" and event["phase"] == "train"
    )

    assert last_gate < first_step


def test_whole_run_posts_in_the_contract_s_order(whole_run: tuple[Run, Outcome]) -> None:
    """Deviations first, the base before any arm, a verdict with the last post alone."""
    run, _ = whole_run
    posts = run.posted_results()

    assert "deviations" in posts[0]
    first_base = next(n for n, post in enumerate(posts) if "base" in _arms(post))
    first_arm = next(n for n, post in enumerate(posts) if post.get("completed_arms"))
    assert first_base < first_arm
    assert [n for n, post in enumerate(posts) if "verdict" in post] == [len(posts) - 1]
    assert sorted(posts[-1]["completed_arms"]) == ["dppo", "grpo"]


def _arms(post: dict[str, object]) -> object:
    metrics = post.get("metrics")
    return metrics.get("arms", {}) if isinstance(metrics, dict) else {}


def test_whole_run_takes_the_planned_steps(whole_run: tuple[Run, Outcome]) -> None:
    """Two rollout steps of two minibatches: versions 0 to 3, each arm, from weights 0, 0, 2, 2."""
    run, _ = whole_run
    for arm in ("grpo", "dppo"):
        keys = run.keys("updates", prefix=(arm, "train"))
        assert [key[2] for key in keys] == [0, 1, 2, 3]
        versions = run.read_all("rollouts", prefix=(arm, "train")).column("policy_version")
        assert versions.to_pylist() == [0] * 32 + [2] * 32


def test_whole_run_keeps_sampling_logprobs_of_the_second_minibatch(
    whole_run: tuple[Run, Outcome],
) -> None:
    """Minibatch 1 holds groups 2 and 3, and is trained with what was sampled, not refreshed."""
    run, _ = whole_run
    used = run.read_arrow("update_tokens", key=("dppo", "train", 1)).to_pylist()
    stored = {
        (row["group"], row["sample"], row["position"]): row["sampling_logprob"]
        for row in run.read_arrow("tokens", key=("dppo", "train", 0)).to_pylist()
    }

    assert {row["group"] for row in used} == {2, 3}
    assert all(
        row["sampling_logprob"] == stored[row["group"], row["sample"], row["position"]]
        for row in used
    )
    assert any(row["target_logprob"] != row["sampling_logprob"] for row in used)


def test_whole_run_starts_both_arms_from_one_checkpoint(whole_run: tuple[Run, Outcome]) -> None:
    run, _ = whole_run
    result = run.result()
    assert result is not None
    arms = result["initialization_provenance"]["arms"]

    assert [arm["arm"] for arm in arms] == ["grpo", "dppo"]
    assert len({arm["initialization"]["adapter_sha256"] for arm in arms}) == 1
    assert len({arm["initialization"]["checkpoint_uri"] for arm in arms}) == 1
    assert all(arm["initialization"]["checkpoint_immutable"] is True for arm in arms)
    assert all(arm["restore_count"] == 0 for arm in arms)
    assert all(arm["optimizer_checks"][0]["actual_config"]["learning_rate"] == 0.05 for arm in arms)
    assert len({arm["initial_output"]["output_sha256"] for arm in arms}) == 1


def test_whole_run_releases_what_it_opened(whole_run: tuple[Run, Outcome]) -> None:
    run, _ = whole_run

    probes = run.events("probe")

    assert [probe["released"] for probe in probes] == [True, True]
    assert run.events("pilot_released")


def test_whole_run_seals_a_bundle(whole_run: tuple[Run, Outcome]) -> None:
    run, _ = whole_run

    bundle = build_bundle(run)

    assert bundle.omitted == ()
    assert run.read_bytes(f"{bundle.folder}/manifest.json")


def test_finished_run_only_repeats_its_answer(
    whole_run: tuple[Run, Outcome], plan_of: PlanMaker
) -> None:
    """The same command on a finished run asks nobody and writes nothing."""
    run, outcome = whole_run
    events = len(run.events())
    folder = run.path.rpartition("/")[0]
    plan = plan_of()
    object.__setattr__(plan, "run_dir", folder)

    assert run_comparison(plan) == outcome
    assert len(Run.open(run.path).events()) == events
