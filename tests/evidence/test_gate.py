import pytest

from evidence.errors import InputError
from evidence.gate import CheckResult, GateResult, SourceRef


def test_gate_result_comes_back_from_its_record():
    gate = GateResult(
        gate="correctness",
        status="failed",
        reasons=("p1: outside",),
        checks=(CheckResult("baseline_loss", "failed", "p1", "outside", {"atol": 0.1}, {"x": 1}),),
        reads=(SourceRef("preflight.json", "0" * 64),),
        validation={"status": "failed"},
    )
    assert GateResult.from_record(gate.to_record()) == gate
    assert list(gate.to_record()) == ["gate", "status", "reasons", "checks", "reads", "validation"]


@pytest.mark.parametrize(
    ("status", "may"),
    [("passed", True), ("not_applicable", True), ("failed", False), ("unverified", False)],
)
def test_only_passed_and_not_applicable_gates_let_a_run_go_on(status, may):
    assert GateResult("g", status).may_proceed is may


def test_gate_result_has_no_truth_value():
    with pytest.raises(TypeError, match="no truth value"):
        bool(GateResult("g", "failed"))


def test_gate_result_refuses_another_status():
    with pytest.raises(InputError, match="status: expected one of passed"):
        GateResult("g", "ok")


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"gate": "g"},
        {
            "gate": "g",
            "status": "passed",
            "reasons": [],
            "checks": [{"no": 1}],
            "reads": [],
            "validation": None,
        },
    ],
)
def test_gate_result_refuses_a_record_of_another_form(record):
    with pytest.raises(InputError, match="gate record"):
        GateResult.from_record(record)
