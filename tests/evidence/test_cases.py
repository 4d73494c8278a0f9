"""Run made cases through the validators. ``GATED_RL_CASES`` names another folder of such cases."""

import importlib.util
import math
import os
from pathlib import Path

import pytest

from evidence import (
    activation,
    answers,
    capacity,
    correctness,
    decision,
    deviations,
    evaluator,
    evidence_limits,
    feasibility,
    generation_audit,
    output,
    restoration,
    spec_preflight,
    statistics,
    verdict,
)
from evidence.applicability import check_applicability

HERE = Path(__file__).parent / "cases"
FOLDER = Path(os.environ.get("GATED_RL_CASES") or HERE)


def _loader():
    own = FOLDER / "load_case.py"
    path = own if own.exists() else HERE / "load_case.py"
    spec = importlib.util.spec_from_file_location("load_case", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load


LOAD = _loader()
CASES = sorted(path.stem for path in FOLDER.glob("*.json"))


def _record(result):
    """Status, reasons and numbers of a result that writes its reasons as a list."""
    record = result.to_record()
    reasons = next((record[k] for k in ("reasons", "problems", "issues") if k in record), [])
    return record.get("status"), reasons, record


def _activation(case, context):
    result = activation.validate(case.get("spec"), case["report"])
    return result.status, list(result.reasons), result.to_record()


def _answer_agreement(case, context):
    part = case["part"]
    agrees = answers.answer_agreement(part["label"], part["answer"], part["strategy"])
    return None, [], agrees


def _applicability(case, context):
    return _record(check_applicability(case["spec"], case["part"]))


def _capacity(case, context):
    if case.get("part") is not None:
        return capacity.patience(**case["part"]), [], None
    left = context.get("wall_left_minutes")
    return _record(capacity.validate(case["report"], wall_left_minutes=left))


def _correctness(case, context):
    result = correctness.validate(
        case["spec"], case["report"], reported_verdict=context.get("reported_verdict")
    )
    return result.status, list(result.reasons), result.to_record()


def _decision(case, context):
    files = {name: text.encode() for name, text in context.get("files", {}).items()}
    for name, text in context.get("pad", {}).items():
        files[name] += text.encode()
    record = decision.validate(
        case["spec"],
        case["report"],
        evaluation=context.get("evaluation"),
        files=files,
        roles=context.get("roles"),
        reported_verdict=context.get("reported_verdict"),
    ).to_record()
    claim = context.get("reported_verdict") or record["status"]
    claimed = {"status": "succeeded", "verdict": claim}
    final = verdict.judge(claimed, gates={"decision": record["status"]})
    numbers = {**record, "final_verdict": final.verdict}
    numbers.update({row["id"]: row for row in record["criteria"]})
    return record["status"], record["issues"], numbers


def _deviations(case, context):
    return _record(deviations.validate(case["report"]))


def _evaluator(case, context):
    result = evaluator.validate(case["report"])
    numbers = result.to_record()
    rows = numbers["comparisons"]
    numbers["comparison_is_comparable"] = all(row["status"] == "comparable" for row in rows)
    numbers["missing_arms"] = [arm for row in rows for arm in row["missing_arms"]]
    return result.status, list(result.issues), numbers


def _evaluator_id(case, context):
    return None, [], evaluator.evaluator_id(case["part"])


def _evidence(case, context):
    result = evidence_limits.validate(case["report"], kept=context.get("kept", []))
    numbers = {**result.to_record(), "accepted": [file.accepted for file in result.files]}
    return None, list(result.issues), numbers


def _feasibility(case, context):
    status, reasons, record = _record(feasibility.validate(case["spec"], case["report"]))
    numbers = {**record, "phases": list(record["phases"])}
    for name, phase in record["phases"].items():
        numbers.update({f"{name}_{key}": value for key, value in phase.items()})
    return status, reasons, numbers


def _generation_audit(case, context):
    return _record(
        generation_audit.validate_for_spec(
            case["spec"],
            case["report"],
            tasks=context.get("tasks"),
            evaluation=context.get("evaluation"),
        )
    )


def _generation_counts(case, context):
    counts = feasibility.generation_counts(case["part"])
    return counts.status, [], counts.to_record()


def _half_width(case, context):
    part = case["part"]
    width = statistics.hoeffding_half_width(
        part["range"], n=part["n"], k=part["k"], alpha=part["alpha"]
    )
    return None, [], width


def _lr_scaling_error(case, context):
    error = correctness.lr_scaling_error(case["part"])
    return "unverified" if error is None else None, [], error


def _output(case, context):
    report, earlier = case["report"], []
    for value in (case.get("part"), *context.values()):
        earlier += value if isinstance(value, list) else [value]
    earlier = [update for update in earlier if isinstance(update, dict) and "status" in update]
    updates = [*earlier, *(report if isinstance(report, list) else [report])]
    if len(updates) > 1:
        return _record(output.validate_history(updates, spec=case.get("spec")))
    return _record(output.validate(updates[0], spec=case.get("spec")))


def _parity_errors(case, context):
    part = case["part"]
    return None, [], correctness.parity_errors(part["actual"], part["reference"])


def _restoration(case, context):
    result = restoration.validate(case["spec"], case["report"])
    return result.status, [] if result.reason is None else [result.reason], result.to_record()


def _select_sample(case, context):
    part = case["part"]
    chosen = answers.select_sample(part["tasks"], part["size"], part["seed"])
    return None, [], sorted(task["item_id"] for task in chosen)


def _spec_preflight(case, context):
    result = spec_preflight.validate(case["spec"])
    status = "finding" if result.findings else "passed"
    return status, list(result.findings), result.to_record()


def _verdict(case, context):
    result = verdict.judge(case["report"], gates=context.get("gates"))
    return result.verdict, list(result.reasons), result.to_record()


ADAPTERS = {
    name.removeprefix("_"): adapter
    for name, adapter in list(globals().items())
    if callable(adapter) and name.startswith("_") and name not in ("_loader", "_record")
}


def _agrees(expected, actual):
    """Whether a recomputed value is the expected one; objects may say more than is expected."""
    if expected == "not_true":
        return actual is not True
    if isinstance(expected, dict):
        return isinstance(actual, dict) and all(
            key in actual and _agrees(value, actual[key]) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return (
            isinstance(actual, list)
            and len(expected) == len(actual)
            and all(map(_agrees, expected, actual))
        )
    if isinstance(expected, bool) or expected is None or isinstance(expected, str):
        return type(actual) is type(expected) and actual == expected
    if not math.isfinite(expected):
        return actual is None or not math.isfinite(actual)
    number = isinstance(actual, int | float) and not isinstance(actual, bool)
    return number and math.isclose(actual, expected, rel_tol=1e-12, abs_tol=1e-12)


def test_cases_are_there():
    """An empty folder would agree with everything."""
    assert CASES


@pytest.mark.parametrize("name", CASES)
def test_case_agrees(name):
    """Status, reasons and numbers are those that the case expects."""
    case = LOAD(FOLDER / f"{name}.json")
    status, reasons, numbers = ADAPTERS[case["validator"]](case, case.get("context") or {})
    expected = case.get("expected_status")
    if expected is not None:
        assert status in (expected if isinstance(expected, list) else [expected]), reasons
    if case.get("expected_reasons") is not None:
        assert reasons == case["expected_reasons"]
    only_numbers = expected is None and case.get("expected_reasons") is None
    if only_numbers or case.get("expected_numbers") is not None:
        assert _agrees(case["expected_numbers"], numbers), numbers
