"""No record, however malformed, makes a validator raise; what it answers is always JSON."""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evidence import (
    activation,
    capacity,
    correctness,
    deviations,
    evaluator,
    evidence_limits,
    feasibility,
    generation_audit,
    output,
    restoration,
    spec_preflight,
    verdict,
)
from evidence.applicability import COVERED_FEATURES, check_applicability
from evidence.audit import audit

SEEDS = Path(__file__).parent / "seeds"
CASES = Path(__file__).parent / "cases"


def _seed(name):
    return json.loads((SEEDS / f"{name}.json").read_text("utf8"))


SPECS = [_seed("dppo_spec"), _seed("sdpo_spec"), _seed("sdpo_triage")]
RECORDS = [_seed("dppo_run"), _seed("sdpo_run")]
EVALUATION = RECORDS[1]["fields"]["evaluation"]
OUTPUT = {
    "status": "failed",
    "summary": "No capacity.",
    "metrics": {"acc": 0.5, "arms": {"base": {"acc": 0.1}}},
    "completed_arms": ["grpo"],
    "verdict": "inconclusive",
    "outcome_reason": "incomplete_execution",
    "capacity_block": {"error": "503", "comparison_steps_completed": 0, "released_clients": True},
    "deviations": [{"field": "steps", "original": "20", "effective": "14", "reason": "clock"}],
    "original_hypothesis_tested": False,
    "tested_instead": "a shorter run",
    "activation_calibration": {"values": {"judge_parse_success_rate": 1.0}, "note": "pilot"},
    "generation_audit": json.loads((CASES / "generation_audit_01_passes.json").read_text())["report"],
    "evidence": {
        "version": 1,
        "files": [
            {"name": "tasks-v1.jsonl", "kind": "generated_tasks", "content": '{"item_id": "t0"}\n'},
            {"name": "heldout.jsonl", "kind": "generated_tasks", "content": "{\n"},
        ],
        "checkpoints": [{"arm": "grpo", "step": 1, "uri": "tinker://t/weights/1"}],
    },
    "decision": {"version": 1, "observations": [{"item_id": "i", "arm": "grpo", "seed": 0,
                 "metric": "m", "value": 1, "evaluator_id": "e"}]},
    "evaluation": EVALUATION,
    "updates": [{"status": "running", "deviations": []}],
}  # fmt: skip
GENERATED = {
    "experiment_features": {"generated_training_data": True},
    "generation_audit": {"answer_comparison": "numeric_exact", "min_sample_size": 5},
}


def _deep(levels):
    value = {}
    for number in range(levels):
        value = {"a": value} if number % 2 else [value]
    return value


DEEP = _deep(10_000)
HOSTILE = [
    None, True, False, 0, 1, -1, 2**63, 2**64, 10**400, 10**5000, -0.0, 1e308, 5e-324,
    float("nan"), float("inf"), float("-inf"), "", " ", "0", "NaN", "\ud800", "\x00", "a" * 10_000,
    "2026-11-04T17:21:00", "../../etc/passwd", [], {}, [[]], [None], [0, "0"], {"": None},
    {"version": 1}, {"a": {"b": [1]}}, DEEP, [DEEP], {"values": DEEP},
]  # fmt: skip


def one_of(values):
    """Draw one of the values without ever printing them: some cannot be printed."""
    return st.integers(0, len(values) - 1).map(lambda number: values[number])


hostile = one_of(HOSTILE)
keys = st.sampled_from(
    [
        "version",
        "arms",
        "arm",
        "id",
        "paths",
        "errors",
        "files",
        "spec",
        "fields",
        "metric",
        "seed",
        "x",
    ]
)
json_values = st.recursive(
    hostile, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def _copied(value):
    """Copy a value, so that a later mutation cannot reach into the originals."""
    if value is DEEP:
        return value
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner) for inner in value]
    return value


@st.composite
def mutated(draw, document, mutations=4):
    """A real document with values replaced, dropped, doubled or moved to wrong places."""
    changed = _copied(document)
    for _ in range(draw(st.integers(1, mutations))):
        node, parent, key = changed, None, None
        while isinstance(node, dict | list) and node and draw(st.integers(0, 4)):
            places = list(node) if isinstance(node, dict) else list(range(len(node)))
            parent, key = node, draw(st.sampled_from(places))
            node = node[key]
            if node is DEEP:
                break
        if parent is None:
            return _copied(draw(json_values))
        action = draw(st.sampled_from(["replace", "replace", "drop", "double", "wrap"]))
        if action == "replace":
            parent[key] = _copied(draw(json_values))
        elif action == "drop":
            del parent[key]
        elif action == "wrap":
            parent[key] = [node]
        elif isinstance(parent, list):
            parent.append(node)
        else:
            parent[draw(keys)] = node
    return changed


def written(record):
    """The answer is JSON: no NaN, no depth that a writer cannot follow, no foreign type."""
    return json.loads(json.dumps(record, allow_nan=False))


fuzz = settings(  # GATED_RL_FUZZ=2000 looks longer
    max_examples=int(os.environ.get("GATED_RL_FUZZ", "60")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@fuzz
@given(st.data())
def test_no_record_makes_the_audit_raise(data):
    spec = data.draw(one_of(SPECS))
    record = data.draw(one_of([*RECORDS, OUTPUT]).flatmap(mutated))
    answers = written(audit(spec, record))
    assert {"correctness_validation", "restoration_validation"} <= set(answers)


@fuzz
@given(st.data())
def test_no_spec_makes_the_audit_raise(data):
    spec = data.draw(one_of(SPECS).flatmap(mutated))
    record = data.draw(one_of([*RECORDS, OUTPUT]))
    answers = written(audit(spec, record))
    assert answers["correctness_validation"]["status"] != "passed"
    assert answers["restoration_validation"]["status"] != "passed"


@fuzz
@given(json_values, json_values)
def test_no_value_at_all_makes_the_audit_raise(spec, record):
    written(audit(spec, record))


@pytest.mark.parametrize("value", HOSTILE, ids=[f"hostile{n}" for n in range(len(HOSTILE))])
def test_every_validator_answers_every_hostile_value(value):
    for check in COVERED_FEATURES:
        written(check_applicability(value, check).to_record())
    written(activation.validate(SPECS[0], value).to_record())
    written(activation.validate(value, value).to_record())
    written(capacity.validate(value, wall_left_minutes=value).to_record())
    written(correctness.validate(SPECS[0], value, reported_verdict=value).to_record())
    written(deviations.validate(value).to_record())
    written(deviations.validate([value, {"status": "failed", "deviations": [value]}]).to_record())
    written(evaluator.validate(value).to_record())
    written(evaluator.validate({"version": 1, "evaluators": {"e": value}}).to_record())
    written(evidence_limits.validate(value).to_record())
    written(feasibility.validate(SPECS[0], value, recorded_at=value).to_record())
    written(generation_audit.validate(value, value, tasks=value, evaluation=value).to_record())
    written(output.validate(value, spec=value, previous=value).to_record())
    written(output.validate_history(value).to_record())
    written(restoration.validate(SPECS[0], value).to_record())
    written(spec_preflight.validate(value).to_record())
    written(verdict.judge(value, gates={"decision": value}).to_record())
    capacity.patience(comparison_steps_completed=value, minutes_refused=value)


def _cases(prefix):
    cases = [json.loads(path.read_text("utf8")) for path in sorted(CASES.glob(f"{prefix}_*.json"))]
    return [case for case in cases if case.get("report")]


@fuzz
@given(st.data())
def test_no_provenance_makes_restoration_raise_or_pass_with_less(data):
    """What is changed may pass only if it still proves the same."""
    case = data.draw(one_of(_cases("restoration")))
    written(restoration.validate(case["spec"], data.draw(mutated(case["report"]))).to_record())
    written(restoration.validate(data.draw(mutated(case["spec"])), case["report"]).to_record())


@fuzz
@given(st.data())
def test_no_preflight_report_makes_correctness_raise(data):
    case = data.draw(one_of(_cases("correctness")))
    written(correctness.validate(case["spec"], data.draw(mutated(case["report"]))).to_record())
    written(correctness.validate(data.draw(mutated(case["spec"])), case["report"]).to_record())


@fuzz
@given(st.data())
def test_no_timing_makes_feasibility_raise(data):
    case = data.draw(one_of(_cases("feasibility")))
    report = data.draw(mutated(case["report"]))
    result = feasibility.validate(case["spec"], report)
    record = written(result.to_record())
    assert (record["wall_seconds"] is None) == (record["status"] == "unknown")


@fuzz
@given(st.data())
def test_no_evaluation_makes_the_evaluator_check_raise(data):
    case = data.draw(one_of(_cases("evaluator")))
    written(evaluator.validate(data.draw(mutated(case["report"]))).to_record())


@fuzz
@given(st.data())
def test_no_audit_file_makes_the_generation_audit_raise(data):
    case = data.draw(one_of(_cases("generation_audit")))
    context = data.draw(mutated(case["context"]))
    tasks = context.get("tasks") if isinstance(context, dict) else context
    held_out = context.get("evaluation") if isinstance(context, dict) else context
    report = data.draw(mutated(case["report"]))
    result = generation_audit.validate_for_spec(GENERATED, report, tasks=tasks, evaluation=held_out)
    written(result.to_record())


@fuzz
@given(st.data())
def test_no_output_makes_the_output_checks_raise(data):
    report = data.draw(mutated(OUTPUT))
    previous = data.draw(mutated(OUTPUT))
    written(output.validate(report, spec=SPECS[0], previous=previous).to_record())
    written(output.validate_history([previous, report], base_arm="base").to_record())
    written(deviations.validate([previous, report]).to_record())
    written(capacity.validate(report, wall_left_minutes=10).to_record())
    written(verdict.judge(report, gates={"decision": "supported"}).to_record())
    evidence = report.get("evidence") if isinstance(report, dict) else report
    written(evidence_limits.validate(evidence, kept=[previous]).to_record())


@fuzz
@given(st.data())
def test_no_spec_makes_the_spec_preflight_raise(data):
    spec = data.draw(one_of(SPECS).flatmap(lambda document: mutated(document, 8)))
    written(spec_preflight.validate(spec).to_record())


def test_long_lists_are_judged_in_linear_time():
    """Five thousand entries in every list take a second or two on a quiet machine."""
    many = range(5_000)
    names = [f"n{n}" for n in many]
    spec = {
        **SPECS[1],
        "correctness_preflight": {
            "required": True,
            "paths": [{"id": n, "kind": "loss"} for n in names],
        },
        "restoration_preflight": {
            "applicable": True,
            "groups": [{"arms": [{"name": n} for n in names]}],
        },
        "arms": [{"name": n} for n in names],
    }
    deviation = OUTPUT["deviations"][0]
    scores = [{"arm": n, "metric": "m", "value": 1, "evaluator_id": "e", "seed": 0} for n in names]
    record = {
        **OUTPUT,
        "correctness_preflight": {"paths": [{"id": n} for n in names]},
        "initialization_provenance": {
            "version": 1,
            "arms": [{"arm": n, "initialization": {"adapter_sha256": "a" * 64}} for n in names],
        },
        "deviations": [{**deviation, "effective": n} for n in names],
        "updates": [
            {"status": "running", "deviations": [{**deviation, "effective": n} for n in names]}
        ]
        * 2,
        "completed_arms": names,
        "evaluation": {
            "version": 1,
            "evaluators": {"e": {}},
            "scores": scores,
            "comparisons": [{"metric": "m", "arms": names}],
        },
    }
    start = time.process_time()
    audit(spec, record)
    output.validate(record, spec=spec, previous=record)
    spec_preflight.validate(spec)
    assert time.process_time() - start < 30
