import hashlib
import json

import pytest

from evidence.answers import (
    answer_agreement,
    evaluation_overlap,
    exact_number,
    normalize_prompt,
    select_sample,
)
from evidence.generation_audit import validate, validate_for_spec

RULES = {
    "required": True,
    "answer_comparison": "numeric_exact",
    "min_sample_size": 3,
    "max_label_errors": 0,
    "max_eval_overlaps": 0,
}


def task(number, disposition="accepted"):
    return {
        "item_id": f"t{number}",
        "prompt": f"What is {number} plus 0?",
        "answer": str(number),
        "disposition": disposition,
    }


TASKS = [*map(task, range(8)), task(8, "rejected"), task(9, "execution_error")]
HELD_OUT = [{"item_id": "h0", "prompt": "What is the capital of France?"}]


def sample(name):
    return {
        "item_id": name,
        "independent_answer": name[1:],
        "resolver_id": "solver-2",
        "method": "independent_resolve",
        "reasoning": "adding zero changes nothing",
        "blind_to_label": True,
    }


def by_hash(names, seed):
    return sorted(names, key=lambda name: hashlib.sha256(f'[{seed},"{name}"]'.encode()).hexdigest())


CHOSEN = by_hash([f"t{n}" for n in range(8)], 7)[:3]
REPORT = {
    "version": 1,
    "stage": "before_training",
    "dataset_file": "tasks.jsonl",
    "evaluation_file": "heldout.jsonl",
    "audit_file": "audit.json",
    "sample_seed": 7,
    "counts": {"generated": 10, "accepted": 8, "rejected": 1, "execution_errors": 1},
    "samples": [sample(name) for name in CHOSEN],
    "label_error_count": 0,
    "overlap_count": 0,
}


def judge(report=REPORT, rules=RULES, tasks=TASKS, evaluation=HELD_OUT, **options):
    return validate(report, rules, tasks=tasks, evaluation=evaluation, **options)


def test_a_blind_audit_without_disagreement_passes():
    result = judge()
    assert result.to_record() == {
        "status": "passed",
        "reasons": [],
        "sample_size": 3,
        "label_errors": 0,
        "overlaps": 0,
    }


@pytest.mark.parametrize(
    ("label", "answer", "agrees"),
    [
        ("7", "7.0", True),
        ("7", " +7 ", True),
        ("2/4", "1/2", True),
        ("0.5", "1/2", True),
        ("-1/2", "-0.5", True),
        ("1e3", "1000", True),
        (".5", "0.5", True),
        ("5.", "5", True),
        ("-0", "0", True),
        (7, "7", True),
        (7, 7.0, True),
        (0.1, "0.1", True),
        ("007", "7", True),
        ("7", "-7", False),
        ("1/3", "0.333", False),
        ("0.1", "0.10000000000000001", False),
        ("12345678901234567890", "12345678901234567891", False),
        (0.1, "0.1000000000000000055511151231257827", False),
        ("1/0", "1/0", None),
        ("0/0", "0", None),
        ("nan", "nan", None),
        ("inf", "inf", None),
        ("", "", None),
        ("1,000", "1000", None),
        ("$7", "7", None),
        ("7%", "7", None),
        ("7 apples", "7", None),
        ("seven", "7", None),
        ("1_000", "1000", None),
        ("٧", "7", None),
        ("３", "3", None),
        ("0x7", "7", None),
        ("1/2/3", "1", None),
        ("1.5/2", "0.75", None),
        ("1 1/2", "1.5", None),
        ("--7", "7", None),
        ("1e99999", "1", None),
        ("9" * 400, "9" * 400, True),
        ("9" * 401, "9" * 401, None),
        (True, 1, None),
        (None, None, None),
        (float("nan"), float("nan"), None),
        (float("inf"), "inf", None),
        ([7], [7], None),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_numeric_answers_agree_exactly_or_not_at_all(label, answer, agrees):
    assert answer_agreement(label, answer, "numeric_exact") is agrees
    assert answer_agreement(answer, label, "numeric_exact") is agrees


@pytest.mark.parametrize(
    ("label", "answer", "agrees"),
    [
        ("yes", "yes", True),
        (" ", " ", True),
        ("yes ", "yes", False),
        ("Yes", "yes", False),
        ("NYC", "New York", False),
        ("1", "1.0", False),
        ("é", "e\u0301", False),
        ("", "", None),
        ("yes", "", None),
        (1, 1, None),
        (True, True, None),
        (None, None, None),
    ],
)
def test_categorical_answers_are_plain_text(label, answer, agrees):
    assert answer_agreement(label, answer, "categorical_exact") is agrees


@pytest.mark.parametrize(
    "strategy", [None, "", "fuzzy", "numeric", "NUMERIC_EXACT", 1, ["numeric_exact"]]
)
def test_without_a_known_strategy_nothing_agrees(strategy):
    assert answer_agreement("7", "7", strategy) is None


def test_exact_number_is_bounded_in_time():
    """A number of ten thousand digits by exponent is fine, one of a billion is not read."""
    assert exact_number("1e9999") == 10**9999
    assert exact_number("1e999999999") is None


def test_prompts_are_compared_in_one_form():
    assert normalize_prompt("  WHAT\tis \uff13 plus 0?\n") == "what is 3 plus 0?"
    assert normalize_prompt("Straße") == normalize_prompt("STRASSE")
    assert normalize_prompt("a\u00a0b") == "a b"
    assert normalize_prompt("ﬁne") == "fine"


def test_overlap_is_counted_over_accepted_tasks():
    held_out = [{"prompt": "what is 3 PLUS 0?"}, {"prompt": "what is 8 plus 0?"}, {"x": 1}, None]
    assert evaluation_overlap(TASKS, held_out) == ["t3"]
    assert evaluation_overlap([*TASKS, {**task(3), "item_id": "again"}], held_out) == [
        "t3",
        "again",
    ]
    assert evaluation_overlap([None, {"prompt": 3}, {}], held_out) == []


def test_select_sample_takes_the_smallest_hashes():
    """SHA-256 of the compact JSON [seed,item_id]."""
    names = [f"t{n}" for n in range(8)]
    for seed in (0, 7, -1, 2**63):
        chosen = [row["item_id"] for row in select_sample(TASKS, 4, seed)]
        assert chosen == by_hash(names, seed)[:4]
    assert len(select_sample(TASKS, 100, 0)) == 8
    assert select_sample(TASKS, 0, 0) == []
    assert select_sample(TASKS, -1, 0) == []
    assert select_sample([{"item_id": 3}, {}, "x"], 5, 0) == []


@pytest.mark.parametrize("name", ["ß", 'a"b', "a\\b", "\ud800", "\x00"])
def test_select_sample_escapes_ids_as_json_does(name):
    rows = [{"item_id": name}, {"item_id": "z"}]
    keys = {
        r["item_id"]: hashlib.sha256(
            json.dumps([1, r["item_id"]], separators=(",", ":")).encode()
        ).hexdigest()
        for r in rows
    }
    assert [row["item_id"] for row in select_sample(rows, 2, 1)] == sorted(keys, key=keys.get)


@pytest.mark.parametrize(
    ("path", "values"),
    [
        (("version",), [None, 2, "1", True]),
        (("stage",), [None, "after_training", 1]),
        (("dataset_file",), [None, "", 1, "audit.json"]),
        (("evaluation_file",), [None, "", "tasks.jsonl"]),
        (("audit_file",), [None, "", "audit.txt", "tasks.jsonl"]),
        (("sample_seed",), [None, "7", 7.0, True, 8]),
        (("counts",), [None, [], {}]),
        (("counts", "generated"), [9, 11, "10", 10.0, None]),
        (("counts", "accepted"), [7, 9, True]),
        (("counts", "rejected"), [0, 2, None]),
        (("counts", "execution_errors"), [0, 2, None]),
        (("samples",), [None, {}, [], "x", [1, 2, 3]]),
        (("samples", 0), [None, {}, {"item_id": 1}]),
        (("samples", 0, "item_id"), ["t8", "zz", None, []]),
        (("samples", 0, "independent_answer"), [None, "", "words", True, []]),
        (("samples", 0, "resolver_id"), [None, "", 1]),
        (("samples", 0, "method"), [None, "rerun_generator", ""]),
        (("samples", 0, "reasoning"), [None, "", "  "]),
        (("samples", 0, "blind_to_label"), [None, False, "true", 1]),
        (("label_error_count",), [None, 1, -1, "0", False]),
        (("overlap_count",), [None, 1, -1, "0", False]),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_a_report_that_does_not_hold_is_unverified(put, path, values):
    for value in values:
        result = judge(put(REPORT, path, value))
        assert result.status == "unverified", value
        assert result.reasons
    assert judge(put(REPORT, path)).status == "unverified"


def test_the_sample_is_exactly_the_selected_tasks(put):
    """One fewer, one more, one twice: none of them is the sample."""
    others = by_hash([f"t{n}" for n in range(8)], 7)[3:]
    few, twice = REPORT["samples"][:2], [*REPORT["samples"], REPORT["samples"][0]]
    more = [*REPORT["samples"], sample(others[0])]
    for samples in (few, twice, more):
        result = judge({**REPORT, "samples": samples})
        assert result.status == "unverified"
        assert result.reasons[0] == "samples must be the 3 tasks that the seed selects, once each."
    assert judge({**REPORT, "samples": REPORT["samples"][::-1]}).status == "passed"


def test_fewer_tasks_than_the_minimum_are_all_audited():
    tasks = TASKS[:2]
    report = {
        **REPORT,
        "counts": {"generated": 2, "accepted": 2, "rejected": 0, "execution_errors": 0},
        "samples": [sample("t0"), sample("t1")],
    }
    assert judge(report, tasks=tasks).status == "passed"
    assert judge({**report, "samples": [sample("t0")]}, tasks=tasks).status == "unverified"


def test_the_minimum_is_100_where_the_contract_states_none():
    tasks = [task(n) for n in range(150)]
    names = by_hash([f"t{n}" for n in range(150)], 7)
    rules = {key: value for key, value in RULES.items() if key != "min_sample_size"}
    report = {
        **REPORT,
        "counts": {"generated": 150, "accepted": 150, "rejected": 0, "execution_errors": 0},
        "samples": [sample(name) for name in names[:100]],
    }
    result = judge(report, rules=rules, tasks=tasks)
    assert (result.status, result.sample_size) == ("passed", 100)
    short = {**report, "samples": report["samples"][:99]}
    assert judge(short, rules=rules, tasks=tasks).status == "unverified"


@pytest.mark.parametrize("size", [0, -1, "3", True, 1.5, []])
def test_a_minimum_that_is_no_size_determines_no_sample(size):
    assert judge(rules={**RULES, "min_sample_size": size}).status == "unverified"


@pytest.mark.parametrize(
    ("errors", "allowed", "reported", "status"),
    [
        (0, 0, 0, "passed"),
        (1, 0, 1, "failed"),
        (1, 0, 0, "failed"),
        (1, 1, 1, "passed"),
        (1, 1, 0, "unverified"),
        (2, 1, 2, "failed"),
        (0, 1, 1, "unverified"),
        (1, None, 1, "failed"),
        (0, "0", 0, "unverified"),
        (0, True, 0, "unverified"),
        (0, -1, 0, "unverified"),
    ],
)
def test_label_errors_are_recomputed_and_bounded(errors, allowed, reported, status):
    samples = [dict(entry) for entry in REPORT["samples"]]
    for entry in samples[:errors]:
        entry["independent_answer"] = "999"
    rules = {**RULES, "max_label_errors": allowed}
    if allowed is None:
        del rules["max_label_errors"]
    result = judge({**REPORT, "samples": samples, "label_error_count": reported}, rules=rules)
    assert result.status == status
    assert result.label_errors == errors


@pytest.mark.parametrize(
    ("overlaps", "allowed", "reported", "status"),
    [
        (1, 0, 1, "failed"),
        (1, 0, 0, "failed"),
        (1, 1, 1, "passed"),
        (1, 1, 0, "unverified"),
        (2, 1, 2, "failed"),
        (1, "1", 1, "unverified"),
    ],
)
def test_overlaps_are_recomputed_and_bounded(overlaps, allowed, reported, status):
    held_out = [
        *HELD_OUT,
        *({"item_id": f"o{n}", "prompt": f"WHAT is {n}  plus 0?"} for n in range(overlaps)),
    ]
    rules = {**RULES, "max_eval_overlaps": allowed}
    result = judge({**REPORT, "overlap_count": reported}, rules=rules, evaluation=held_out)
    assert (result.status, result.overlaps) == (status, overlaps)


@pytest.mark.parametrize("strategy", [None, "fuzzy", "", 1, [], {}])
def test_a_contract_without_a_known_comparison_stays_unverified(strategy):
    result = judge(rules={**RULES, "answer_comparison": strategy})
    assert (result.status, result.label_errors) == ("unverified", None)


def test_a_legacy_contract_may_rely_on_the_reported_count():
    legacy = {key: value for key, value in RULES.items() if key != "answer_comparison"}
    assert judge(rules=legacy, require_comparison=False).status == "passed"
    assert judge(rules=legacy).status == "unverified"
    bad = {**REPORT, "label_error_count": 1}
    assert judge(bad, rules=legacy, require_comparison=False).status == "failed"
    none = {**REPORT, "label_error_count": None}
    assert judge(none, rules=legacy, require_comparison=False).status == "unverified"
    fuzzy = {**RULES, "answer_comparison": "fuzzy"}
    assert judge(rules=fuzzy, require_comparison=False).status == "unverified"


@pytest.mark.parametrize("report", [None, [], "x", {}, 1])
def test_nothing_reported_is_unverified(report):
    assert judge(report).reasons == ("The generation audit was not reported.",)


@pytest.mark.parametrize("rows", [None, [], "x", {}, [None], [[]]])
def test_the_frozen_files_must_be_at_hand(rows):
    assert judge(tasks=rows).status == "unverified"
    assert judge(evaluation=rows).status == "unverified"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("item_id", "t1"),
        ("item_id", ""),
        ("item_id", 0),
        ("prompt", ""),
        ("prompt", None),
        ("answer", None),
        ("answer", ""),
        ("disposition", "kept"),
        ("disposition", None),
        ("disposition", []),
    ],
)
def test_tasks_of_another_form_are_unverified(put, field, value):
    assert judge(tasks=put(TASKS, (0, field), value)).status == "unverified"


def test_a_rejected_task_needs_no_answer(put):
    assert judge(tasks=put(TASKS, (8, "answer"), None)).status == "passed"


@pytest.mark.parametrize(
    "row",
    [
        {"item_id": "h0", "prompt": "again"},
        {"item_id": "h1"},
        {"prompt": "x"},
        {"item_id": 1, "prompt": "x"},
    ],
)
def test_evaluation_rows_need_unique_ids_and_prompts(row):
    assert judge(evaluation=[*HELD_OUT, row]).status == "unverified"


def spec(generated, required):
    return {
        "experiment_features": {"generated_training_data": generated},
        "generation_audit": {**RULES, "required": required},
    }


def test_an_audit_that_does_not_apply_is_answered_as_in_the_records():
    applicability = {
        "check": "generation_audit",
        "status": "not_applicable",
        "enforce": False,
        "reasons": ["spec.generation_audit opts out and no feature it covers is true"],
        "features": {"generated_training_data": False},
    }
    record = validate_for_spec(spec(False, False), None).to_record()
    assert json.dumps(record) == json.dumps(
        {
            "status": "not_applicable",
            "reasons": applicability["reasons"],
            "applicability": applicability,
        }
    )


@pytest.mark.parametrize(
    ("generated", "required"),
    [(True, False), (True, True), (False, True), (None, False), ("no", False)],
)
def test_an_audit_that_applies_or_may_apply_is_enforced(generated, required):
    result = validate_for_spec(spec(generated, required), None)
    assert result.status == "unverified"
    complete = validate_for_spec(
        spec(generated, required), REPORT, tasks=TASKS, evaluation=HELD_OUT
    )
    assert complete.status == "passed"
    assert list(complete.to_record())[-1] == "applicability"
    assert complete.to_gate().gate == "generation_audit"


def test_reasons_name_what_is_wrong(put):
    """One fault each; some of them have consequences that are named as well."""
    assert "sample_seed must be a whole number." in judge(put(REPORT, ("sample_seed",))).reasons
    assert judge(tasks=None).reasons[0] == "The dataset file was not retained for this run."
    assert judge(tasks=None).overlaps is None
    assert judge(evaluation=None).overlaps is None
    kept = judge(tasks=put(TASKS, (9, "disposition"), "kept")).reasons
    assert kept[0] == "Task 10: disposition must be accepted, rejected, execution_error."
    assert len(kept) == 2
    bad_rows = judge(tasks=put(put(TASKS, (0, "prompt")), (1, "prompt"))).reasons
    assert bad_rows[0] == "Task 1: item_id, prompt and answer are required."
    nothing = {
        **REPORT,
        "counts": {"generated": 1, "accepted": 0, "rejected": 1, "execution_errors": 0},
    }
    result = judge(nothing, tasks=[task(8, "rejected")])
    assert (result.sample_size, result.status) == (0, "unverified")
    assert result.reasons == ("No task was accepted.",)


def test_answers_may_be_numbers_but_not_booleans(put):
    numbers = [{**row, "answer": int(row["answer"])} for row in TASKS]
    assert judge(tasks=numbers).status == "passed"
    assert judge(tasks=put(TASKS, (0, "answer"), True)).status == "unverified"


def test_an_audit_may_be_of_one_task():
    report = {**REPORT, "samples": REPORT["samples"][:1]}
    assert judge(report, rules={**RULES, "min_sample_size": 1}).sample_size == 1
