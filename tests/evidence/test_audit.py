"""Two real records, judged again: every answer of the exchange, byte for byte."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

from evidence.audit import audit

SEEDS = Path(__file__).parent / "seeds"
ANSWERS = (
    "correctness_validation",
    "decision_validation",
    "evaluator_validation",
    "feasibility",
    "feasibility_reported_verdict",
    "generation_audit_validation",
    "restoration_validation",
)


def seed(name):
    return json.loads((SEEDS / f"{name}.json").read_text("utf8"))


def agent_side(record):
    """The record without any answer: what the agent reported, and the clock."""
    fields = {key: value for key, value in record["fields"].items() if key not in ANSWERS}
    answer = record["fields"]["feasibility"]
    fields["feasibility"] = {"record": answer["record"], "recorded_at": answer["recorded_at"]}
    return {**record, "fields": fields}


@pytest.mark.parametrize("name", ["dppo", "sdpo"])
def test_audit_reproduces_every_answer_of_a_real_record(name):
    """Values, list order and key order: the JSON texts are equal."""
    record = seed(f"{name}_run")
    answers = audit(seed(f"{name}_spec"), agent_side(record))
    expected = {key: record["fields"][key] for key in ANSWERS if key in record["fields"]}
    own = {
        k: v
        for k, v in seed(f"{name}_spec").items()
        if k in ("feasibility_check", "spec_preflight")
    }
    assert json.dumps(answers) == json.dumps(dict(sorted({**expected, **own}.items())))


def test_audit_answers_nothing_that_the_records_do_not_answer():
    """DPPO reported no evaluation and no definitive verdict, so two fields are not there."""
    answers = audit(seed("dppo_spec"), agent_side(seed("dppo_run")))
    assert set(ANSWERS) - set(answers) == {"evaluator_validation", "feasibility_reported_verdict"}


def test_audit_accepts_fields_at_the_top_of_a_record():
    record = agent_side(seed("sdpo_run"))
    spec = seed("sdpo_spec")
    assert audit(spec, record["fields"]) == audit(spec, record)


def test_audit_accepts_a_triage_document_as_the_spec():
    record = agent_side(seed("sdpo_run"))
    assert json.dumps(audit(seed("sdpo_triage"), record)) == json.dumps(
        audit(seed("sdpo_spec"), record)
    )


@pytest.mark.parametrize("name", ["dppo_spec", "dppo_launch_spec", "sdpo_spec", "sdpo_triage"])
def test_audit_reproduces_what_each_spec_says_about_itself(name):
    """The order of the keys follows the document: one of the four is not sorted."""
    document = seed(name)
    spec = document.get("spec", document)
    answers = audit(document, {})
    for field in ("feasibility_check", "spec_preflight"):
        assert json.dumps(answers.get(field)) == json.dumps(spec.get(field))


def test_audit_changes_nothing_it_is_given():
    spec, record = seed("sdpo_spec"), seed("sdpo_run")
    before = copy.deepcopy((spec, record))
    audit(spec, record)
    assert (spec, record) == before


def test_audit_of_an_empty_record_says_what_is_missing():
    answers = audit(seed("sdpo_spec"), {})
    assert answers["correctness_validation"]["status"] == "unverified"
    assert answers["restoration_validation"]["reason"] == (
        "grpo: missing or duplicate arm evidence."
    )
    assert answers["decision_validation"]["issues"] == ["Decision evidence was not recorded."]
    assert answers["feasibility"]["problems"] == ["Measured feasibility not recorded"]
    assert "evaluator_validation" not in answers


def test_audit_reads_a_feasibility_report_without_the_exchanges_answer_around_it():
    """An executor's own output holds the report itself."""
    record = seed("sdpo_run")
    report = record["fields"]["feasibility"]["record"]
    answer = audit(seed("sdpo_spec"), {"feasibility": report})["feasibility"]
    expected = {k: v for k, v in record["fields"]["feasibility"].items() if k != "recorded_at"}
    assert json.dumps(answer) == json.dumps(expected)


@pytest.mark.parametrize("verdict", ["supported", "refuted"])
def test_audit_keeps_a_definitive_verdict_that_feasibility_withholds(verdict):
    record = agent_side(seed("sdpo_run"))
    record["fields"]["reported_verdict"] = verdict
    assert audit(seed("sdpo_spec"), record)["feasibility_reported_verdict"] == verdict


def test_audit_withholds_nothing_where_feasibility_is_not_required():
    record = agent_side(seed("sdpo_run"))
    spec = {**seed("sdpo_spec"), "feasibility_required": False}
    record["fields"]["feasibility_required"] = False
    assert "feasibility_reported_verdict" not in audit(spec, record)


def test_audit_takes_the_verdict_of_a_structured_output():
    record = {"status": "succeeded", "verdict": "supported", "completed_arms": []}
    answers = audit(seed("sdpo_spec"), record)
    assert answers["correctness_validation"]["reported_verdict"] == "supported"
    assert answers["decision_validation"]["reported_verdict"] == "supported"
    assert answers["output_validation"]["status"] == "inconsistent"


def test_audit_reads_generated_tasks_from_the_runs_files():
    spec = seed("sdpo_spec")
    spec["experiment_features"]["generated_training_data"] = True
    spec["generation_audit"]["answer_comparison"] = "numeric_exact"
    report = {
        "version": 1,
        "stage": "before_training",
        "dataset_file": "tasks.jsonl",
        "evaluation_file": "heldout.jsonl",
        "audit_file": "audit.json",
        "sample_seed": 0,
        "counts": {"generated": 1, "accepted": 1, "rejected": 0, "execution_errors": 0},
        "samples": [
            {
                "item_id": "t0",
                "independent_answer": "2",
                "resolver_id": "s",
                "method": "independent_resolve",
                "reasoning": "1 + 1",
                "blind_to_label": True,
            }
        ],
        "label_error_count": 0,
        "overlap_count": 0,
    }
    task = {"item_id": "t0", "prompt": "1 + 1?", "answer": "2", "disposition": "accepted"}
    held_out = {"item_id": "h0", "prompt": "2 + 2?"}
    files = {
        "tasks.jsonl": json.dumps(task).encode(),
        "heldout.jsonl": json.dumps(held_out).encode() + b"\n",
    }
    record = {"generation_audit": report}
    assert audit(spec, record, files=files)["generation_audit_validation"]["status"] == "passed"
    assert audit(spec, record)["generation_audit_validation"]["status"] == "unverified"
    inline = [
        {"name": name, "kind": "generated_tasks", "content": data.decode()}
        for name, data in files.items()
    ]
    record["evidence"] = {"version": 1, "files": inline}
    assert audit(spec, record)["generation_audit_validation"]["status"] == "passed"


def test_importing_audit_is_fast_and_needs_nothing_heavy():
    """No torch, Prefect, Tinker, pandas or pyarrow; well under a second even on a busy machine."""
    heavy = ("torch", "prefect", "tinker", "pyarrow", "pandas", "transformers", "detect_secrets")
    code = f"import sys, evidence.audit; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
