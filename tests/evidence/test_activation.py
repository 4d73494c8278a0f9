import json

import pytest

from evidence.activation import validate

SPEC = {
    "activation_gate": {
        "applicable": True,
        "checks": [
            {"metric": "masked", "min": 0.001, "max": 0.3},
            {"metric": "drift", "min": 0.005},
            {"metric": "loss", "max": 3},
            {"metric": "updates", "min": 2, "max": 2},
            {"metric": "model", "one_of": ["Qwen/Qwen3.5-2B", 4]},
        ],
    }
}
VALUES = {"masked": 0.01, "drift": 0.02, "loss": 1.5, "updates": 2, "model": "Qwen/Qwen3.5-2B"}


def judge(**changed):
    return validate(SPEC, {"values": {**VALUES, **changed}, "note": "5-step pilot"})


def test_values_inside_every_range_pass():
    assert judge().to_record() == {
        "status": "passed",
        "required": True,
        "checks": [
            {
                "check": "masked",
                "status": "passed",
                "accepted": {"min": 0.001, "max": 0.3},
                "measured": 0.01,
            },
            {"check": "drift", "status": "passed", "accepted": {"min": 0.005}, "measured": 0.02},
            {"check": "loss", "status": "passed", "accepted": {"max": 3}, "measured": 1.5},
            {
                "check": "updates",
                "status": "passed",
                "accepted": {"min": 2, "max": 2},
                "measured": 2,
            },
            {
                "check": "model",
                "status": "passed",
                "accepted": {"one_of": ["Qwen/Qwen3.5-2B", 4]},
                "measured": "Qwen/Qwen3.5-2B",
            },
        ],
        "reason": None,
        "evidence_source": "executor report; remote execution is not attested",
        "applicability": "required",
    }


@pytest.mark.parametrize(
    ("metric", "value", "status"),
    [
        ("masked", 0.001, "passed"),
        ("masked", 0.0009999, "failed"),
        ("masked", 0.3, "passed"),
        ("masked", 0.30000001, "failed"),
        ("drift", 0.005, "passed"),
        ("drift", 0.0049999, "failed"),
        ("drift", 1e300, "passed"),
        ("loss", 3, "passed"),
        ("loss", 3.0000001, "failed"),
        ("loss", -5, "passed"),
        ("updates", 2.0, "passed"),
        ("updates", 1, "failed"),
        ("updates", 3, "failed"),
        ("updates", 16, "failed"),
        ("model", "Qwen/Qwen3.5-4B", "failed"),
        ("model", "qwen/qwen3.5-2b", "failed"),
        ("model", " Qwen/Qwen3.5-2B", "failed"),
        ("model", 4.0, "passed"),
        ("model", "4", "failed"),
        ("model", 5, "failed"),
    ],
)
def test_bounds_are_inclusive_and_names_exact(metric, value, status):
    result = judge(**{metric: value})
    assert result.status == status
    expected = None if status == "passed" else f"{metric}: outside its accepted range"
    assert result.reason == expected


@pytest.mark.parametrize("metric", ["masked", "drift", "loss", "updates"])
def test_what_is_no_number_was_not_measured(metric, no_number):
    result = judge(**{metric: no_number})
    assert (result.status, result.reason) == ("unverified", f"{metric}: measured value")
    assert {row.check: row.status for row in result.checks}[metric] == "unverified"
    json.dumps(result.to_record(), allow_nan=False)


@pytest.mark.parametrize("value", [None, "", [], {}, float("nan")])
def test_a_name_that_was_not_reported_is_missing(value):
    assert judge(model=value).reason == "model: measured value"


def test_true_is_not_one(put):
    """True equals 1 in Python, not here."""
    spec = {"activation_gate": {"applicable": True, "checks": [{"metric": "m", "one_of": [1]}]}}
    assert validate(spec, {"values": {"m": True}}).status == "failed"
    assert validate(spec, {"values": {"m": 1}}).status == "passed"


def test_a_missing_diagnostic_is_unverified_and_others_are_still_judged(put):
    result = validate(SPEC, put({"values": {**VALUES, "drift": 0.0}}, ("values", "masked")))
    assert result.status == "failed"
    assert result.reason == "masked: measured value; drift: outside its accepted range"


@pytest.mark.parametrize("report", [None, {}, [], "x", {"values": None}, {"values": [1]}])
def test_nothing_reported_is_unverified(report):
    result = validate(SPEC, report)
    assert result.status == "unverified"
    assert len(result.reasons) == 5


@pytest.mark.parametrize(
    "check",
    [
        {"metric": "m"},
        {"metric": "m", "min": None},
        {"metric": "m", "min": "0"},
        {"metric": "m", "min": True},
        {"metric": "m", "max": float("inf")},
        {"metric": "m", "max": float("nan")},
        {"metric": "m", "one_of": []},
        {"metric": "m", "one_of": "m"},
        {"min": 0},
        {"metric": "", "min": 0},
        {"metric": 3, "min": 0},
        "m",
        None,
    ],
)
def test_a_check_without_a_usable_range_verifies_nothing(check):
    spec = {"activation_gate": {"applicable": True, "checks": [check]}}
    result = validate(spec, {"values": {"m": 1, "": 1, "(unnamed diagnostic)": 1}})
    assert result.status == "unverified"


def test_a_range_and_a_list_must_both_hold():
    spec = {
        "activation_gate": {
            "applicable": True,
            "checks": [{"metric": "m", "min": 2, "one_of": [1, 3]}],
        }
    }
    statuses = [validate(spec, {"values": {"m": m}}).status for m in (1, 2, 3)]
    assert statuses == ["failed", "failed", "passed"]


@pytest.mark.parametrize("checks", [[], None, "x"])
def test_a_gate_without_diagnostics_is_unverified(checks):
    spec = {"activation_gate": {"applicable": True, "checks": checks}}
    assert validate(spec, {"values": VALUES}).status == "unverified"


@pytest.mark.parametrize("flags", [{}, {"required": None}, {"applicable": "no"}, {"required": 0}])
def test_a_registered_gate_is_judged_unless_it_opts_out(flags):
    """No covered feature asks for this gate: its own diagnostics do."""
    gate = {**flags, "checks": [{"metric": "m", "min": 2, "max": 2}]}
    results = [validate({"activation_gate": gate}, {"values": {"m": m}}) for m in (5, 2)]
    assert [result.status for result in results] == ["failed", "passed"]
    assert results[0].to_record()["applicability"] == "required"


@pytest.mark.parametrize("flag", ["required", "applicable"])
def test_a_registered_gate_can_opt_out(flag):
    gate = {flag: False, "checks": [{"metric": "m", "min": 2, "max": 2}]}
    result = validate({"activation_gate": gate}, {"values": {"m": 5}})
    assert (result.status, result.checks) == ("not_applicable", ())
    assert result.reasons == ("spec.activation_gate opts out and no feature it covers is true",)


@pytest.mark.parametrize("gate", [{"applicable": False}, None, {}])
def test_a_spec_without_the_gate_needs_none(gate):
    result = validate({"activation_gate": gate}, None)
    assert (result.status, result.required, result.checks) == ("not_applicable", False, ())


def test_the_gate_has_the_same_status():
    gate = judge(updates=16).to_gate()
    assert (gate.gate, gate.status) == ("activation", "failed")
    assert gate.reasons == ("updates: outside its accepted range",)
