"""A verdict needs every gate that its spec requires, and the evidence that each gate rests on."""

import json
from pathlib import Path

import pytest

from evidence.bundle import build_bundle
from evidence.verdict_inputs import final_verdict, gate_conflicts, held_gates, judge_decision
from evidence.verify import verify_bundle
from tests.evidence.finished_run import execution, spec

PASSED = dict.fromkeys(
    ("spec_preflight", "correctness", "restoration", "activation", "feasibility"), "passed"
)
LOSS_PATH = {"id": "loss", "kind": "loss", "baseline_revision": "a", "reference_revision": "b"}


def _features(**over):
    return spec()["experiment_features"] | over


@pytest.fixture
def folder(make_finished_run):
    run = make_finished_run()
    bundle = build_bundle(run, environment={})
    return run.path, bundle.folder


def _json_of(folder, name):
    return json.loads(Path(*folder, name).read_text())


@pytest.mark.parametrize(
    ("over", "gate"),
    [
        ({"experiment_features": _features(custom_loss=True)}, "correctness"),
        ({"correctness_preflight": {"required": True, "paths": [LOSS_PATH]}}, "correctness"),
        ({"experiment_features": _features(generated_training_data=True)}, "generation_audit"),
        ({"activation_gate": {"applicable": True, "checks": []}}, "activation"),
        ({"feasibility_required": True}, "feasibility"),
    ],
)
def test_gate_without_its_evidence_grants_nothing(over, gate):
    """The gate says passed, but nothing that it could rest on was posted."""
    held = held_gates(spec(**over), {}, PASSED | {gate: "passed"}, {})

    assert held[gate] == "unverified"
    assert {name: status for name, status in held.items() if status != "passed"} == {
        gate: "unverified"
    }


@pytest.mark.parametrize(
    ("gate", "over"),
    [
        ("correctness", {"experiment_features": _features(custom_loss=True)}),
        ("restoration", {}),
        ("generation_audit", {"experiment_features": _features(generated_training_data=True)}),
        ("activation", {"activation_gate": {"applicable": True}}),
        ("feasibility", {"feasibility_required": True}),
    ],
)
def test_required_gate_that_is_absent_is_unverified(gate, over):
    gates = {name: status for name, status in PASSED.items() if name != gate}

    assert held_gates(spec(**over), {}, gates, {})[gate] == "unverified"


def test_gate_that_nothing_requires_may_be_absent():
    """Without a custom loss, generated data, activation gate and required feasibility."""
    assert held_gates(spec(), {}, {"restoration": "passed"}, {}) == {"restoration": "passed"}


@pytest.mark.parametrize(("low", "status"), [(1, "passed"), (3, "failed")])
def test_posted_evidence_is_judged_again(low, status):
    """A pilot that measured 2 does not pass a gate of at least 3, whatever its record says."""
    planned = {"applicable": True, "checks": [{"metric": "updates_per_step", "min": low}]}
    posted = {"activation_calibration": {"values": {"updates_per_step": 2}}}

    held = held_gates(spec(activation_gate=planned), posted, PASSED, {})

    assert held["activation"] == status


@pytest.mark.parametrize("status", ["failed", "unverified", "skipped"])
def test_gate_that_refused_is_not_outvoted_by_its_evidence(status):
    planned = {"applicable": True, "checks": [{"metric": "updates_per_step", "min": 1}]}
    posted = {"activation_calibration": {"values": {"updates_per_step": 2}}}

    held = held_gates(spec(activation_gate=planned), posted, PASSED | {"activation": status}, {})

    assert held["activation"] == status


def test_generated_tasks_are_audited_again_where_the_bundle_has_them():
    """With the tasks an audit of no sample proves nothing; without them the gate alone speaks."""
    planned = spec(
        experiment_features=_features(generated_training_data=True),
        generation_audit={"required": True, "answer_comparison": "numeric_exact"},
    )
    report = {"dataset_file": "tasks.jsonl", "evaluation_file": "held-out.jsonl"}
    files = {
        "tasks.jsonl": b'{"item_id":"a","prompt":"1+1","answer":"2","disposition":"accepted"}\n',
        "held-out.jsonl": b'{"item_id":"b","prompt":"2+2"}\n',
    }
    gates = PASSED | {"generation_audit": "passed"}

    def held(kept):
        return held_gates(planned, {"generation_audit": report}, gates, kept)["generation_audit"]

    assert held(files) == "unverified"
    assert held({}) == "passed"


def test_bundle_whose_gates_were_left_out_is_not_supported(folder):
    """All rows say supported; correctness and feasibility are required and nothing shows them."""
    result = _json_of(folder, "result.json")
    observed = _json_of(folder, "decision.json")["decision_validation"]
    demanding = spec(
        experiment_features=_features(custom_loss=True),
        correctness_preflight={"required": True, "paths": [LOSS_PATH]},
        feasibility_required=True,
    )
    data = {path.name: path.read_bytes() for path in Path(*folder).iterdir()}
    judged, _ = judge_decision(demanding, result, execution(), data)
    final = final_verdict(
        judged, spec=demanding, result=result, gates={"spec_preflight": "passed"}, files={}
    )

    assert (observed["status"], judged.status) == ("supported", "supported")
    assert final.verdict == "inconclusive"
    assert final.withheld == (
        "correctness is unverified.",
        "feasibility is unverified.",
        "restoration is unverified.",
    )


def test_gate_that_contradicts_its_own_validation_is_found(folder, reseal):
    record = _json_of(folder, "gate-feasibility.json")
    record["validation"] = {"status": "unknown", "problems": ["Measured feasibility not recorded"]}
    reseal(Path(*folder), "gate-feasibility.json", json.dumps(record).encode())

    problems = verify_bundle(Path(*folder)).problems

    assert "gate-feasibility.json: status is passed, its validation is unknown" in problems


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"gate": "g", "status": "passed", "validation": None}, []),
        ({"gate": "g", "status": "passed", "validation": {"status": "feasible"}}, []),
        ({"gate": "g", "status": "failed", "validation": {"status": "invalid"}}, []),
        (
            {"gate": "h", "status": "passed"},
            ["gate-g.2.json: holds the gate h"],
        ),
        (
            {"gate": "g", "status": "passed", "validation": {"status": ["passed"]}},
            ["gate-g.2.json: status is passed, its validation is list of 1"],
        ),
    ],
)
def test_gate_file_and_its_validation_say_the_same(record, problem):
    assert gate_conflicts({"gate-g.2.json": json.dumps(record).encode()}) == problem


@pytest.mark.parametrize("arms", [[[]], [{}], "dppo", [None], ["grpo"]])
def test_completed_arms_of_another_form_complete_nothing(folder, arms):
    result = _json_of(folder, "result.json") | {"completed_arms": arms}
    judged, _ = judge_decision(spec(), result, execution(), {})

    final = final_verdict(judged, spec=spec(), result=result, gates=PASSED, files={})

    assert final.outcome_reason == "incomplete_execution"


@pytest.mark.parametrize("name", [[], {}, None, " "])
def test_planned_arm_without_a_name_is_never_completed(folder, name):
    planned = spec(arms=[{"name": "grpo"}, {"name": "dppo"}, {"name": name}])
    result = _json_of(folder, "result.json")
    result["completed_arms"] = [*result["completed_arms"], name]
    judged, _ = judge_decision(planned, result, execution(), {})

    final = final_verdict(judged, spec=planned, result=result, gates=PASSED, files={})

    assert final.outcome_reason == "incomplete_execution"
