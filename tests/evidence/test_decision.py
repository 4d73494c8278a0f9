"""The frozen rule: what settles a criterion, and everything that must leave it open."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evidence.criteria import positions_in
from evidence.decision import (
    Observations,
    advisories,
    decide,
    final_verdict,
    scope_statement,
    validate,
)
from evidence.errors import InputError
from evidence.evaluator import evaluator_id
from evidence.parsing import build
from evidence.spec import DecisionRule

SEEDS = Path(__file__).parent / "seeds"
MIB = 1024 * 1024
HALF_60 = 0.35066030352816463  # 2 sqrt(ln(2 / 0.05) / 120)


def criterion(**changes):
    base = {
        "id": "primary",
        "metric": "accuracy",
        "weights": {"treatment": 1, "baseline": -1},
        "margin": 0.0,
        "bounds": [0, 1],
    }
    return base | changes


def spec_of(*criteria, features=None, **rule):
    return {
        "experiment_features": {"paired_comparison": True, "adaptive_selection": False}
        | (features or {}),
        "decision_rule": {
            "version": 1,
            "unit": "fixed_checkpoint_items",
            "seeds": [0],
            "alpha": 0.05,
            "method": "paired_hoeffding",
            "criteria": list(criteria) or [criterion()],
        }
        | rule,
    }


def provenance(items):
    return {
        "code_sha256": "c" * 64,
        "prompt_template": "t",
        "decoding": {"temperature": 0},
        "parser": "p",
        "items": {"ids": items},
    }


class Record:
    """A decision and the evaluation that goes with it, complete unless a test breaks it."""

    def __init__(self, values, *, n=60, seeds=(0,), metric="accuracy", items=None):
        self.items = items or [f"i{i}" for i in range(n)]
        self.provenance = provenance(self.items)
        self.evaluator = evaluator_id(self.provenance)
        self.rows, self.scores = [], []
        for arm, pattern in values.items():
            for seed in seeds:
                self.add(arm, pattern, seed=seed, metric=metric)

    def add(self, arm, pattern, *, seed=0, metric="accuracy"):
        pattern = pattern if isinstance(pattern, list) else [pattern]
        values = [pattern[i % len(pattern)] for i in range(len(self.items))]
        self.rows += [
            {
                "item_id": item,
                "arm": arm,
                "seed": seed,
                "metric": metric,
                "value": value,
                "evaluator_id": self.evaluator,
            }
            for item, value in zip(self.items, values, strict=True)
        ]
        mean = sum(values) / len(values)
        self.scores.append(
            {"arm": arm, "metric": metric, "value": mean, "seed": seed}
            | {"evaluator_id": self.evaluator}
        )

    @property
    def evaluation(self):
        return {
            "version": 1,
            "evaluators": {self.evaluator: self.provenance},
            "scores": self.scores,
            "comparisons": [],
        }

    def judged(self, spec=None, **changes):
        report = {"version": 1, "observations": self.rows} | changes.pop("report", {})
        return validate(spec or spec_of(), report, evaluation=self.evaluation, **changes)


@pytest.fixture
def clear():
    """Treatment right on all 60 items, baseline on none: effect 1."""
    return Record({"treatment": 1, "baseline": 0})


def refused(result, *parts):
    """The record is not settled, and its one issue says why."""
    assert result.status == "uncertain"
    assert result.outcome_reason == "insufficient_evidence"
    assert result.criteria == ()
    (issue,) = result.issues
    for part in parts:
        assert part in issue, issue
    return issue


def test_interval_entirely_above_the_margin_supports(clear):
    result = clear.judged()
    (found,) = result.criteria
    assert (result.status, result.outcome_reason, found.status) == (
        "supported",
        "supported",
        "passed",
    )
    assert found.effect == 1.0
    assert found.half_width == HALF_60
    assert found.lower == pytest.approx(0.6493396964718354, abs=1e-15)
    assert found.n_items == 60


def test_record_has_the_contracts_keys_in_order(clear):
    record = clear.judged(reported_verdict="refuted").to_record()
    assert list(record) == [
        "status",
        "issues",
        "criteria",
        "outcome_reason",
        "unit",
        "n_seeds",
        "alpha",
        "method",
        "applicability",
        "reported_verdict",
    ]
    assert list(record["criteria"][0])[:3] == ["id", "metric", "effect"]
    json.dumps(record, allow_nan=False)


def test_interval_entirely_below_a_positive_margin_refutes():
    """Effect 0.25, upper end 0.6007: a gain of more than 0.65 is refuted although there is one."""
    record = Record({"treatment": [1, 1, 1, 0], "baseline": [1, 1, 0, 0]})
    result = record.judged(spec_of(criterion(margin=0.65)))
    assert (result.status, result.outcome_reason) == ("refuted", "refuted")


@pytest.mark.parametrize(
    ("margin", "status"),
    [
        (1 - HALF_60 - 1e-12, "supported"),
        (1 - HALF_60, "uncertain"),
        (1 - HALF_60 + 1e-12, "uncertain"),
    ],
)
def test_an_end_exactly_at_the_margin_settles_nothing(clear, margin, status):
    assert clear.judged(spec_of(criterion(margin=margin))).status == status


@pytest.mark.parametrize(
    ("margin", "status"), [(-1 + HALF_60, "uncertain"), (-1 + HALF_60 + 1e-12, "refuted")]
)
def test_an_upper_end_exactly_at_the_margin_refutes_nothing(margin, status):
    record = Record({"treatment": 0, "baseline": 1})
    assert record.judged(spec_of(criterion(margin=margin))).status == status


@pytest.mark.parametrize("verdict", ["supported", "refuted"])
def test_definitive_claim_that_is_not_borne_out_is_kept(verdict):
    record = Record({"treatment": [1, 1, 1, 0], "baseline": [1, 1, 0, 0]})
    assert record.judged(reported_verdict=verdict).reported_verdict == verdict


@pytest.mark.parametrize("verdict", ["inconclusive", None, 3, "supported"])
def test_other_claims_are_not_kept(clear, verdict):
    """Among them the claim that the computed status bears out."""
    assert clear.judged(reported_verdict=verdict).reported_verdict is None


def two_criteria(primary, guard):
    spec = spec_of(criterion(margin=0.03), criterion(id="guard", metric="reward", margin=-0.1))
    record = Record(dict(zip(("treatment", "baseline"), primary, strict=True)))
    for arm, pattern in zip(("treatment", "baseline"), guard, strict=True):
        record.add(arm, pattern, metric="reward")
    return record.judged(spec)


@pytest.mark.parametrize(
    ("primary", "guard", "status", "reason"),
    [
        ((1, 0), (1, 0), "supported", "supported"),
        ((0, 1), (0, 1), "refuted", "refuted"),
        ((1, 0), (0, 1), "uncertain", "mixed_criteria"),
        ((1, 0), (1, 1), "uncertain", "insufficient_evidence"),
        ((0, 1), (1, 1), "uncertain", "insufficient_evidence"),
    ],
)
def test_every_criterion_must_settle(primary, guard, status, reason):
    result = two_criteria(primary, guard)
    assert (result.status, result.outcome_reason) == (status, reason)


def test_two_criteria_share_alpha():
    """k = 2: 2 sqrt(ln(80) / 120)."""
    widths = {found.half_width for found in two_criteria((1, 0), (1, 0)).criteria}
    assert widths == {0.3821878523568343}


@pytest.mark.parametrize(
    ("band", "n", "reason"),
    [
        (0.4, 60, "tie"),
        ([-0.36, 0.36], 60, "tie"),
        ([-0.3, 0.4], 60, "insufficient_evidence"),
        (0.3, 60, "insufficient_evidence"),
        (None, 60, "insufficient_evidence"),
    ],
)
def test_tie_needs_a_tie_band_that_holds_the_whole_interval(band, n, reason):
    """Equal arms: the interval is 0 +- 0.3507."""
    spec = spec_of(criterion(**({} if band is None else {"tie_band": band})))
    result = Record({"treatment": [1, 0], "baseline": [1, 0]}, n=n).judged(spec)
    assert (result.status, result.outcome_reason) == ("uncertain", reason)


def test_weights_of_three_arms_and_other_bounds():
    """Weights 1, -1/2, -1/2 on [0, 100]: range 200. 100 - 0 - 0 = 100 from 1000 items."""
    spec = spec_of(criterion(weights={"a": 1, "b": -0.5, "c": -0.5}, bounds=[0, 100], margin=90))
    result = Record({"a": 100, "b": 0, "c": 0}, n=1000).judged(spec)
    (found,) = result.criteria
    assert found.half_width == pytest.approx(8.589388166934752, rel=1e-14)
    assert (found.effect, result.status) == (100.0, "supported")


def test_seeds_are_averaged_within_an_item():
    """Treatment is right at seed 0 alone: 1/2 an item. Items stay the units, also with two seeds."""
    record = Record({"baseline": 0}, seeds=(0, 1))
    record.add("treatment", 1, seed=0)
    record.add("treatment", 0, seed=1)
    (found,) = record.judged(spec_of(seeds=[0, 1])).criteria
    assert (found.effect, found.n_items, found.half_width) == (0.5, 60, HALF_60)


def test_identical_seeds_give_the_interval_of_one():
    """Repeated evaluations are no further evidence."""
    values = {"treatment": [1, 1, 0], "baseline": [1, 0, 0]}
    one = Record(values).judged().criteria
    four = Record(values, seeds=(0, 1, 2, 3)).judged(spec_of(seeds=[0, 1, 2, 3])).criteria
    assert four == one


def test_training_seeds_as_units_rest_on_the_seeds():
    """Nine seeds of two items each: n = 9, half width 2 sqrt(ln(40) / 18) = 0.9054."""
    seeds = tuple(range(9))
    record = Record({"treatment": 1, "baseline": 0}, n=2, seeds=seeds)
    result = record.judged(spec_of(unit="training_seeds", seeds=list(seeds)))
    (found,) = result.criteria
    assert found.n_items == 9
    assert found.half_width == pytest.approx(0.905401, abs=1e-6)
    assert result.status == "supported"


def test_rows_of_other_arms_and_metrics_do_not_count(clear):
    """The base model and secondary metrics may be in the file, even with other items missing."""
    clear.add("base", 0)
    clear.add("treatment", 5, metric="length")
    clear.rows.pop()
    assert clear.judged().status == "supported"


def change(row, **fields):
    return lambda record: record.rows[row].update(fields)


def drop(row):
    return lambda record: record.rows.pop(row)


def twin(row, **fields):
    return lambda record: record.rows.append(record.rows[row] | fields)


BROKEN = [
    (drop(7), "no observation in 1 places", "item i7, arm treatment, seed 0"),
    (lambda r: r.rows.__delitem__(slice(60, None)), "no observation in 60 places", "arm baseline"),
    (twin(3, value=0), "more than one observation", "item i3"),
    (twin(3), "more than one observation", "item i3"),
    (change(3, item_id="i4"), "more than one observation", "item i4"),
    (twin(3, seed=1), "a scheduled seed", "found 1"),
    (change(3, seed=1), "a scheduled seed", "found 1"),
    (change(3, seed=True), "observations[3].seed", "a whole number"),
    (change(3, seed="0"), "observations[3].seed", "a whole number"),
    (change(3, seed=None), "observations[3].seed", "a whole number"),
    (
        change(3, value=1.2),
        "item i3, arm treatment, seed 0: expected a value from 0 to 1 (never clipped)",
        "found 1.2",
    ),
    (change(3, value=-0.2), "a value from 0 to 1 (never clipped)", "found -0.2"),
    (change(3, value=float("nan")), "observations[3].value", "a finite number"),
    (change(3, value=float("inf")), "observations[3].value", "a finite number"),
    (change(3, value=10**400), "observations[3].value", "a finite number"),
    (change(3, value=True), "observations[3].value", "a number"),
    (change(3, value="1"), "observations[3].value", "a number"),
    (change(3, value=None), "observations[3].value", "a number"),
    (change(3, item_id="x99"), "an item of the evaluator", "found 'x99'"),
    (change(3, item_id=7), "observations[3].item_id", "text"),
    (change(3, arm=""), "observations[3].arm", "not empty"),
    (change(3, metric=None), "observations[3].metric", "text"),
    (change(3, evaluator_id="0" * 64), "exactly one evaluator", "2 evaluators"),
    (lambda r: r.rows[3].pop("value"), "observations[3].value", "a value"),
    (lambda r: r.rows.__setitem__(3, [1]), "observations[3]", "an object"),
    (lambda r: r.rows.clear(), "exactly one evaluator", "0 evaluators"),
]


def numbered(cases):
    """Ids that say what is expected; several faults have the same answer."""
    return [f"{n}: {case[1]}" for n, case in enumerate(cases)]


@pytest.mark.parametrize(("fault", "what", "where"), BROKEN, ids=numbered(BROKEN))
def test_one_faulty_row_leaves_the_decision_open(clear, fault, what, where):
    fault(clear)
    refused(clear.judged(), what, where)


def test_mean_that_fits_only_one_of_two_values_does_not_choose_it(clear):
    """The first value of i0 is 0, a later one 1, and the reported mean fits the later one."""
    clear.rows.append(clear.rows[0] | {"value": 1})
    clear.rows[0] = clear.rows[0] | {"value": 0}
    refused(clear.judged(), "more than one observation")


def rename_evaluator(record, name):
    record.evaluator = name
    for row in [*record.rows, *record.scores]:
        row["evaluator_id"] = name


EVALUATIONS = [
    (lambda r: r.provenance.update(parser="another"), "hash of the evaluator's provenance"),
    (lambda r: rename_evaluator(r, "0" * 64), "hash of the evaluator's provenance"),
    (lambda r: r.provenance.update(items={"manifest_ref": "items.jsonl"}), "provenance"),
    (lambda r: r.scores.clear(), "the unrounded mean"),
    (lambda r: r.scores.pop(), "arm baseline, metric accuracy, seed 0"),
    (lambda r: r.scores[0].update(value=0.99), "1.0, the unrounded mean"),
    (lambda r: r.scores[0].update(value=1 + 2e-9), "1.0, the unrounded mean"),
    (lambda r: r.scores[0].update(value=True), "1.0, the unrounded mean"),
    (lambda r: r.scores[0].update(value=float("nan")), "1.0, the unrounded mean"),
    (lambda r: r.scores[0].update(seed=1), "arm treatment, metric accuracy, seed 0"),
    (lambda r: r.scores[0].update(evaluator_id="0" * 64), "arm treatment"),
    (lambda r: r.scores.append(r.scores[0] | {"value": 0.5}), "1.0, the unrounded mean"),
]


@pytest.mark.parametrize(("fault", "what"), EVALUATIONS, ids=numbered(EVALUATIONS))
def test_evaluation_that_does_not_carry_the_rows_leaves_the_decision_open(clear, fault, what):
    fault(clear)
    refused(clear.judged(), what)


@pytest.mark.parametrize("evaluation", [None, {}, [], {"evaluators": []}, {"evaluators": {}}])
def test_rows_of_an_unreported_evaluator_are_not_judged(clear, evaluation):
    report = {"version": 1, "observations": clear.rows}
    refused(validate(spec_of(), report, evaluation=evaluation), "provenance is reported")


@pytest.mark.parametrize(
    ("items", "what"),
    [
        ({"manifest_ref": "items.jsonl", "manifest_sha256": "a" * 64}, "a manifest alone"),
        ({"ids": []}, "a manifest alone"),
        ({"ids": "retail_test_0 .. 59"}, "a manifest alone"),
        ({"ids": ["i0", 1]}, "items.ids[1]"),
        ({"ids": ["i0", "i0"]}, "each item once"),
    ],
)
def test_items_must_be_a_list_of_names(clear, items, what):
    clear.provenance["items"] = items
    rename_evaluator(clear, evaluator_id(clear.provenance))
    refused(clear.judged(), what)


def test_item_that_nobody_scored_leaves_the_decision_open(clear):
    """The frozen list has 61 items, both arms were scored on the same 60."""
    clear.provenance["items"]["ids"] = [*clear.items, "i60"]
    rename_evaluator(clear, evaluator_id(clear.provenance))
    refused(clear.judged(), "no observation in 2 places", "item i60")


def test_scores_of_an_earlier_evaluator_may_stay_beside_the_new_ones(clear):
    old = [score | {"evaluator_id": "0" * 64, "value": 0.2} for score in clear.scores]
    clear.scores[:0] = old
    assert clear.judged().status == "supported"


def test_mean_may_differ_by_rounding_in_the_tenth_digit(clear):
    clear.scores[0]["value"] = 1 - 5e-10
    assert clear.judged().status == "supported"


def test_score_without_a_seed_counts_where_one_seed_is_scheduled(clear):
    clear.scores[0].pop("seed")
    assert clear.judged().status == "supported"


def test_rounded_mean_is_not_the_observations_mean():
    record = Record({"treatment": 1, "baseline": [0, 0, 1]})
    assert record.judged().status == "supported"
    record.scores[1]["value"] = 0.33
    refused(record.judged(), "arm baseline", "found 0.33")


@pytest.mark.parametrize(
    ("report", "what"),
    [
        ({"version": 1}, "found 'neither'"),
        ({"version": 1, "observations": None}, "found 'neither'"),
        ({"version": 1, "observations": [], "observations_file": {}}, "exactly one of"),
        ({"version": 2, "observations": []}, "decision.version"),
        ({"observations": []}, "decision.version"),
        ({"version": True, "observations": []}, "decision.version"),
        ({"version": 1, "observations": {"rows": []}}, "a list of rows"),
        ([], "an object"),
        ("supported", "an object"),
    ],
)
def test_report_of_another_form_is_not_judged(clear, report, what):
    refused(validate(spec_of(), report, evaluation=clear.evaluation), what)


def test_nothing_recorded_is_the_contracts_sentence():
    result = validate(spec_of(), None, evaluation=None, reported_verdict="inconclusive")
    assert result.issues == ("Decision evidence was not recorded.",)
    assert result.to_record()["n_seeds"] == 1


def test_spec_that_compares_nothing_needs_no_decision():
    spec = {"experiment_features": {"paired_comparison": False, "adaptive_selection": False}}
    result = validate(spec, None, evaluation=None, reported_verdict="supported")
    assert result.status == "not_applicable"
    assert result.reported_verdict is None


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        (None, "spec.decision_rule"),
        ({"method": "student_t"}, "method"),
        ({"alpha": float("nan")}, "alpha"),
        ({"alpha": 0}, "alpha"),
        ({"seeds": []}, "seeds"),
        ({"seeds": ["0"]}, "seeds[0]"),
        ({"criteria": []}, "criteria"),
        ({"criteria": [criterion(bounds=[1, 0])]}, "bounds"),
        ({"criteria": [criterion(margin=float("inf"))]}, "margin"),
        ({"criteria": [criterion(), criterion()]}, "criteria[1].id"),
        ({"unit": "tokens"}, "unit"),
        ({"criteria": [criterion(bounds=[-1.7e308, 1.7e308])]}, "value_range"),
    ],
)
def test_rule_that_cannot_be_applied_is_named(clear, rule, what):
    spec = spec_of(**(rule or {}))
    if rule is None:
        spec["decision_rule"] = None
    result = clear.judged(spec)
    refused(result, what)
    json.dumps(result.to_record(), allow_nan=False)


def lines(record):
    return "\n".join(json.dumps(row) for row in record.rows).encode()


def from_file(record, data, *, name="scored.jsonl", sha256=None, kept="scored.jsonl"):
    reference = {"name": name, "sha256": sha256 or hashlib.sha256(data).hexdigest()}
    report = {"version": 1, "observations_file": reference}
    return validate(spec_of(), report, evaluation=record.evaluation, files={kept: data})


FORMS = {
    "json lines": lines,
    "json lines with a last line break": lambda r: lines(r) + b"\n",
    "json lines with windows line breaks": lambda r: lines(r).replace(b"\n", b"\r\n"),
    "json lines with empty lines": lambda r: lines(r).replace(b"\n", b"\n\n"),
    "json lines with nested fields": lambda r: b"\n".join(
        json.dumps(row | {"info": {"turns": [1]}}).encode() for row in r.rows
    ),
    "json lines with braces in text": lambda r: b"\n".join(
        json.dumps(row | {"text": '} {"value": 0}'}).encode() for row in r.rows
    ),
    "json lines with space before colons": lambda r: lines(r).replace(b'":', b'" :'),
    "a json list": lambda r: json.dumps(r.rows).encode(),
    "an indented json list": lambda r: json.dumps(r.rows, indent=1).encode(),
    "an object": lambda r: json.dumps({"observations": r.rows}).encode(),
    "an indented object": lambda r: json.dumps({"observations": r.rows}, indent=1).encode(),
    "padded to exactly 10 MiB": lambda r: lines(r) + b"\n" * (10 * MIB - len(lines(r))),
}


@pytest.mark.parametrize("form", FORMS)
def test_file_is_read_in_each_form(clear, form):
    result = from_file(clear, FORMS[form](clear))
    assert result.status == "supported", result.issues


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other.jsonl"},
        {"name": "../scored.jsonl"},
        {"name": 7},
        {"sha256": "0" * 64},
        {"sha256": "see the manifest"},
        {"kept": "another.jsonl"},
    ],
)
def test_file_that_is_not_retained_gets_the_contracts_answer(clear, changes):
    result = from_file(clear, lines(clear), **changes)
    assert result.status == "unverified"
    assert result.issues == ("Observation file name/hash is not retained for this run.",)
    assert list(result.to_record()) == [
        "status",
        "issues",
        "criteria",
        "outcome_reason",
        "applicability",
    ]


@pytest.mark.parametrize("reference", [None, [], "scored.jsonl", {}, {"name": ["a"]}])
def test_reference_of_another_form_is_not_retained(clear, reference):
    report = {"version": 1, "observations_file": reference or {"x": 1}}
    result = validate(spec_of(), report, evaluation=clear.evaluation, files={})
    assert result.status == "unverified"


UNREADABLE = {
    "one byte more than 10 MiB": lambda r: lines(r) + b"\n" * (10 * MIB + 1 - len(lines(r))),
    "not utf-8": lambda r: lines(r) + b"\n\xff",
    "cut short": lambda r: lines(r)[:-5],
    "nothing": lambda r: b"",
    "white space": lambda r: b" \n ",
    "a key twice in a row": lambda r: lines(r).replace(
        b'{"item_id": "i0"', b'{"arm": "x", "item_id": "i0"'
    ),
    "a value twice, hidden by a space": lambda r: lines(r).replace(
        b'"value": 1, ', b'"value" :0, "value": 1, ', 1
    ),
    "NaN": lambda r: lines(r).replace(b'"value": 1', b'"value": NaN', 1),
    "two rows on a line": lambda r: lines(r).replace(b"\n", b", ", 1),
    "a row on two lines": lambda r: lines(r).replace(b', "arm"', b',\n "arm"', 1),
    "too deep": lambda r: lines(r) + b"\n" + b"[" * 5000,
    "an object without rows": lambda r: b'{"observations": 3}',
}


@pytest.mark.parametrize("form", UNREADABLE)
def test_file_that_cannot_be_read_stays_unverified(clear, form):
    result = from_file(clear, UNREADABLE[form](clear))
    assert result.status == "unverified"
    assert result.issues[0].startswith("Observations were not read: ")


def many(n_rows):
    return Record({"treatment": 1, "baseline": 0}, n=n_rows // 2)


def test_hundred_thousand_rows_are_judged_and_two_more_are_not():
    full, over = many(100_000), many(100_002)
    assert full.judged().status == "supported"
    result = over.judged()
    assert result.status == "unverified"
    assert "at most 100000 rows" in result.issues[0]


SELECTED = {"adaptive_selection": True}
BUDGETS = {arm: {"values_touched": 5, "proposals": 9} for arm in ("selected", "random_control")}


@pytest.mark.parametrize(
    ("selection", "what"),
    [
        (None, "decision.selection"),
        ([], "decision.selection"),
        ({}, "frozen_before_confirmation"),
        ({"frozen_before_confirmation": "true"}, "frozen_before_confirmation"),
        ({"frozen_before_confirmation": 1}, "frozen_before_confirmation"),
        ({"frozen_before_confirmation": True, "kind": "weight_edit"}, "budgets"),
        (
            {
                "frozen_before_confirmation": True,
                "kind": "weight_edit",
                "budgets": {"selected": {}},
            },
            "budgets",
        ),
        (
            {
                "frozen_before_confirmation": True,
                "kind": "weight_edit",
                "budgets": BUDGETS | {"selected": {"values_touched": 5}},
            },
            "budgets.selected.proposals",
        ),
        (
            {"frozen_before_confirmation": True, "confirmation_items": ["i0"]},
            "a confirmation item",
        ),
    ],
)
def test_adaptive_selection_must_be_frozen_and_budgeted(clear, selection, what):
    report = {} if selection is None else {"selection": selection}
    refused(clear.judged(spec_of(features=SELECTED), report=report), what)


@pytest.mark.parametrize(
    "selection",
    [
        {"frozen_before_confirmation": True},
        {"frozen_before_confirmation": True, "kind": "weight_edit", "budgets": BUDGETS},
        {"frozen_before_confirmation": True, "confirmation_items": [f"i{i}" for i in range(60)]},
    ],
)
def test_frozen_selection_is_judged(clear, selection):
    result = clear.judged(spec_of(features=SELECTED), report={"selection": selection})
    assert result.status == "supported", result.issues


def test_weight_edit_that_the_spec_plans_needs_budgets(clear):
    spec = spec_of(features=SELECTED, selection={"kind": "weight_edit"})
    selection = {"frozen_before_confirmation": True}
    refused(clear.judged(spec, report={"selection": selection}), "budgets")


def named_arms():
    spec = spec_of() | {"arms": [{"name": "grpo"}, {"name": "sdpo_token"}]}
    return spec, Record({"grpo": 0, "sdpo_token": 1})


def test_roles_of_an_execution_file_map_weights_to_arms():
    spec, record = named_arms()
    roles = {"baseline": "grpo", "treatment": "sdpo_token"}
    assert record.judged(spec, roles=roles).status == "supported"
    swapped = {"baseline": "sdpo_token", "treatment": "grpo"}
    assert record.judged(spec, roles=swapped).status == "refuted"


def test_foreign_record_is_mapped_by_the_order_of_arms_and_says_so():
    """The rule stands last in the record, after the contract's keys."""
    spec, record = named_arms()
    result = record.judged(spec)
    assert result.status == "supported"
    assert list(result.to_record().items())[-1] == (
        "notes",
        [
            "The record does not say which arm has which role. By the order of the spec's arms, "
            "baseline is grpo and treatment is sdpo_token.",
        ],
    )


@pytest.mark.parametrize("turn", [1, -1])
def test_roles_that_the_arms_state_count_in_either_order(turn):
    """Treatment right on all items, baseline on none; no rule is needed, so none is noted."""
    spec, record = named_arms()
    arms = [{"name": "sdpo_token", "role": "treatment"}, {"name": "grpo", "role": "baseline"}]
    result = record.judged(spec | {"arms": arms[::turn]})
    assert (result.status, result.notes) == ("supported", ())
    assert "notes" not in result.to_record()


def test_an_execution_file_goes_before_the_roles_of_the_arms():
    spec, record = named_arms()
    spec["arms"] = [
        {"name": "sdpo_token", "role": "treatment"},
        {"name": "grpo", "role": "baseline"},
    ]
    swapped = {"baseline": "sdpo_token", "treatment": "grpo"}
    assert record.judged(spec, roles=swapped).status == "refuted"


@pytest.mark.parametrize(
    "roles", [("treatment", None), ("treatment", "treatment"), ("a", "b"), (1, 2)]
)
def test_stated_roles_that_leave_one_open_are_not_guessed(roles):
    """Arms that say something else than the order would are not mapped by the order."""
    spec, record = named_arms()
    names = ("grpo", "sdpo_token")
    spec["arms"] = [{"name": name, "role": role} for name, role in zip(names, roles, strict=True)]
    refused(record.judged(spec))


def test_arms_that_are_called_as_the_weights_need_no_rule(clear):
    spec = spec_of() | {"arms": [{"name": "treatment"}, {"name": "baseline"}]}
    result = clear.judged(spec)
    assert (result.status, result.notes) == ("supported", ())


def test_three_arms_without_roles_are_not_guessed():
    spec, record = named_arms()
    spec["arms"].append({"name": "base"})
    refused(record.judged(spec), "0 evaluators")


def test_two_roles_of_one_arm_are_refused(clear):
    roles = {"treatment": "baseline", "baseline": "baseline"}
    refused(clear.judged(roles=roles), "another arm for each weight")


def test_betting_rule_settles_what_hoeffding_leaves_open():
    """25 of 60 items gained, none lost: 0.4167 - 0.3507 is below a margin of 0.15."""
    record = Record({"treatment": [1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0], "baseline": 0})
    margin = criterion(margin=0.15)
    assert record.judged(spec_of(margin)).status == "uncertain"
    betting = record.judged(spec_of(margin, method="paired_betting"))
    assert betting.status == "supported"
    (found,) = betting.criteria
    assert found.effect == pytest.approx(25 / 60)
    assert found.half_width == pytest.approx((found.upper - found.lower) / 2)


def test_two_betting_criteria_share_alpha():
    """Each of two intervals at 0.1 together is the one of a single criterion at 0.05."""
    record = Record({"treatment": [1, 0, 1], "baseline": [0, 0, 1]})
    one = record.judged(spec_of(method="paired_betting", alpha=0.05)).criteria[0]
    both = [criterion(), criterion(id="again", margin=0.5)]
    two = record.judged(spec_of(*both, method="paired_betting", alpha=0.1)).criteria
    assert {(found.lower, found.upper) for found in two} == {(one.lower, one.upper)}


def test_betting_rule_does_not_depend_on_the_order_of_rows():
    record = Record({"treatment": [1, 0, 1], "baseline": [0, 0, 1]})
    spec = spec_of(method="paired_betting")
    before = record.judged(spec)
    random.Random(5).shuffle(record.rows)
    assert record.judged(spec) == before


def test_advisories_describe_and_change_nothing():
    """20 of 60 gained, none lost: McNemar 2 / 2^20; would settle margin 0, as Hoeffding cannot."""
    record = Record({"treatment": [1, 0, 0], "baseline": 0})
    spec = spec_of()
    result = record.judged(spec)
    rule = build(DecisionRule, spec["decision_rule"], where=None)
    rows = {row["method"]: row for row in advisories(rule, result)}
    assert result.status == "uncertain"
    assert list(rows) == [
        "betting",
        "empirical_bernstein",
        "clopper_pearson_discordant",
        "mcnemar_exact",
    ]
    assert rows["mcnemar_exact"]["p_value"] == pytest.approx(2 / 2**20)
    assert rows["betting"]["would_settle"] is True
    assert rows["betting"]["half_width"] < result.criteria[0].half_width
    assert "20 items better, 0 worse, 40 equal" in rows["mcnemar_exact"]["note"]
    json.dumps(list(rows.values()), allow_nan=False)


def test_advisories_of_graded_values_leave_the_discordant_pairs_out():
    record = Record({"treatment": [0.7, 0.4], "baseline": 0.5})
    rule = build(DecisionRule, spec_of(method="paired_betting")["decision_rule"], where=None)
    rows = advisories(rule, record.judged(spec_of(method="paired_betting")))
    assert [row["method"] for row in rows] == ["empirical_bernstein"]


def test_scope_is_said_in_one_sentence():
    rule = build(DecisionRule, spec_of()["decision_rule"], where=None)
    assert scope_statement(rule, 60) == (
        "The interval rests on 60 items and speaks about the one trained checkpoint of each arm "
        "on further items like these, not about training again with other seeds."
    )
    seeds = build(
        DecisionRule, spec_of(unit="training_seeds", seeds=[0, 1])["decision_rule"], where=None
    )
    assert scope_statement(seeds, 2).startswith("The interval rests on 2 training seeds")


def test_final_verdict_is_the_computed_one_when_every_gate_passed(clear):
    gates = {"correctness": "passed", "generation_audit": "not_applicable"}
    final = final_verdict(clear.judged(), gates=gates)
    assert (final.verdict, final.outcome_reason, final.withheld) == ("supported", "supported", ())


def test_unverified_gate_withholds_and_the_computed_verdict_stays(clear):
    final = final_verdict(clear.judged(), gates={"restoration": "unverified"})
    assert (final.verdict, final.computed) == ("inconclusive", "supported")
    assert final.outcome_reason == "insufficient_evidence"
    assert final.withheld == ("restoration is unverified.",)


def test_changed_experiment_keeps_its_verdict_beside_the_hypothesis(clear):
    final = final_verdict(
        clear.judged(),
        gates={},
        original_hypothesis_tested=False,
        tested_instead="a shorter run",
        deviations=[{"field": "steps"}],
    )
    assert (final.verdict, final.changed_experiment_verdict) == ("inconclusive", "supported")
    assert "a shorter run" in final.withheld[0]


@pytest.mark.parametrize("field", ["objective", "endpoint"])
def test_changed_objective_or_endpoint_never_tests_the_hypothesis(clear, field):
    final = final_verdict(clear.judged(), gates={}, deviations=[{"field": field}])
    assert (final.verdict, final.changed_experiment_verdict) == ("inconclusive", "supported")


def test_missing_arm_is_incomplete_execution(clear):
    final = final_verdict(clear.judged(), gates={}, every_arm_completed=False)
    assert (final.verdict, final.outcome_reason) == ("inconclusive", "incomplete_execution")
    assert final.to_record()["computed"] == "supported"


def test_uncertain_decision_keeps_its_reason():
    final = final_verdict(two_criteria((1, 0), (0, 1)), gates={"activation": "failed"})
    assert (final.verdict, final.outcome_reason) == ("inconclusive", "mixed_criteria")
    assert final.withheld == ()


@pytest.mark.parametrize("name", ["dppo", "sdpo"])
def test_real_records_are_answered_byte_for_byte(name):
    spec = json.loads((SEEDS / f"{name}_spec.json").read_text())
    fields = json.loads((SEEDS / f"{name}_run.json").read_text())["fields"]
    expected = fields["decision_validation"]
    result = validate(
        spec,
        fields.get("decision"),
        evaluation=fields.get("evaluation"),
        files={},
        reported_verdict=expected.get("reported_verdict", "inconclusive"),
    )
    assert json.dumps(result.to_record()) == json.dumps(expected)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_order_of_rows_never_matters(seed):
    record = Record({"treatment": [1, 0.5, 1], "baseline": [0, 0.25, 1, 1]}, n=20)
    before = record.judged()
    random.Random(seed).shuffle(record.rows)
    assert record.judged() == before


@given(row=st.integers(0, 39))
@settings(max_examples=15, deadline=None)
def test_any_doubled_row_is_refused(row):
    record = Record({"treatment": 1, "baseline": 0}, n=20)
    record.rows.append(dict(record.rows[row]))
    refused(record.judged(), "more than one observation")


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=40),
    st.floats(-1, 1),
)
@settings(max_examples=60, deadline=None)
def test_status_follows_from_the_definition(pairs, margin):
    """Recomputed by hand from the definition, with plain sums."""
    rule = build(DecisionRule, spec_of(criterion(margin=margin))["decision_rule"], where=None)
    rows = [
        {"item_id": f"i{i}", "arm": arm, "seed": 0, "metric": "accuracy", "value": value}
        | {"evaluator_id": "e"}
        for i, pair in enumerate(pairs)
        for arm, value in zip(("treatment", "baseline"), pair, strict=True)
    ]
    (found,) = decide(rule, Observations.from_rows(rows)).criteria
    effect = sum(t - b for t, b in pairs) / len(pairs)
    half = 2 * np.sqrt(np.log(2 / 0.05) / (2 * len(pairs)))
    assert found.effect == pytest.approx(effect, abs=1e-12)
    if abs(abs(effect - margin) - half) > 1e-9:
        below = "failed" if effect + half < margin else "uncertain"
        assert found.status == ("passed" if effect - half > margin else below)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.text(max_size=5)
    | st.sampled_from(["accuracy", "treatment", "observations", "paired_hoeffding", "i0"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    *(
                        "version",
                        "observations",
                        "observations_file",
                        "selection",
                        "kind",
                        "budgets",
                    ),
                    *("decision_rule", "criteria", "seeds", "alpha", "bounds", "weights", "arms"),
                    *(
                        "name",
                        "sha256",
                        "item_id",
                        "arm",
                        "seed",
                        "metric",
                        "value",
                        "evaluator_id",
                    ),
                    *("evaluators", "scores", "items", "ids"),
                    *("experiment_features", "paired_comparison"),
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=25,
)


@given(spec=JSON, report=JSON, evaluation=JSON, roles=JSON)
@settings(max_examples=60, deadline=None)
def test_nothing_that_is_reported_raises(spec, report, evaluation, roles):
    """Whatever is handed in, the answer is a record that strict JSON can hold."""
    result = validate(spec, report, evaluation=evaluation, files={}, reported_verdict=report)
    json.dumps(result.to_record(), allow_nan=False)


@given(
    where=st.sampled_from(
        ["report", "row", "evaluation", "provenance", "score", "rule", "criterion"]
    ),
    key=st.integers(0, 5),
    value=JSON,
)
@settings(max_examples=150, deadline=None)
def test_no_value_in_a_good_record_can_raise(where, key, value):
    record, spec = Record({"treatment": 1, "baseline": 0}, n=4), spec_of()
    report = {"version": 1, "observations": record.rows}
    evaluation = record.evaluation
    target = {
        "report": report,
        "row": record.rows[0],
        "evaluation": evaluation,
        "provenance": record.provenance,
        "score": record.scores[0],
        "rule": spec["decision_rule"],
        "criterion": spec["decision_rule"]["criteria"][0],
    }[where]
    target[sorted(target)[key % len(target)]] = value
    result = validate(spec, report, evaluation=evaluation, files={})
    json.dumps(result.to_record(), allow_nan=False)


def test_decide_refuses_incomplete_observations_by_name():
    rule = build(DecisionRule, spec_of()["decision_rule"], where=None)
    rows = Record({"treatment": 1}).rows
    with pytest.raises(InputError, match=r"criterion primary: .*no observation in 60 places"):
        decide(rule, Observations.from_rows(rows))


def test_columns_may_be_arrays():
    rule = build(DecisionRule, spec_of()["decision_rule"], where=None)
    n = 60
    columns = {
        "item_id": np.array([f"i{i}" for i in range(n)] * 2),
        "arm": np.repeat(["treatment", "baseline"], n),
        "seed": np.zeros(2 * n, dtype=np.int64),
        "metric": ["accuracy"] * (2 * n),
        "value": np.repeat([1.0, 0.0], n),
        "evaluator_id": ["e"] * (2 * n),
    }
    assert decide(rule, Observations.from_columns(columns)).status == "supported"
    with pytest.raises(InputError, match="one length"):
        Observations.from_columns(columns | {"seed": [0]})


def test_missing_cells_of_a_huge_plan_are_found_without_laying_it_out(clear):
    """100,000 scheduled seeds times 60 items would be 12 million cells; two arms have 60 each."""
    refused(clear.judged(spec_of(seeds=list(range(100_000)))), "arms times seeds times items")


def rule_of(spec):
    return build(DecisionRule, spec["decision_rule"], where=None)


def test_observations_of_no_weighed_arm_are_named():
    rows = Record({"base": 1}).rows
    with pytest.raises(InputError, match="observations of accuracy for arms treatment, baseline"):
        decide(rule_of(spec_of()), Observations.from_rows(rows))


def test_items_are_those_of_the_weighed_arms_where_none_are_given():
    """The base model was scored on an item more, which is none of the comparison."""
    record = Record({"treatment": 1, "baseline": 0})
    record.rows.append(record.rows[0] | {"arm": "base", "item_id": "extra"})
    observations = Observations.from_rows(record.rows)
    assert len(observations) == 121
    assert decide(rule_of(spec_of()), observations).criteria[0].n_items == 60


def test_effect_too_large_for_a_float_is_refused():
    """Each value is finite, the difference of the two arms is not."""
    spec = spec_of(criterion(bounds=[-1.7e308, 1.7e308]))
    rows = Record({"treatment": 1.6e308, "baseline": -1.6e308}, n=2).rows
    with pytest.raises(InputError, match="a finite effect"):
        decide(rule_of(spec), Observations.from_rows(rows))


def test_columns_must_all_be_there():
    with pytest.raises(InputError, match=r"observations\.item_id"):
        Observations.from_columns({"arm": ["a"]})


def test_row_that_answers_for_no_field_is_not_read():
    """A row type that claims a key and then refuses it is a defect of the caller, not of a record."""

    class Broken(dict):
        def __getitem__(self, key):
            raise KeyError(key)

    with pytest.raises(KeyError):
        Observations.from_rows([Broken(Record({"treatment": 1}).rows[0])])


@pytest.mark.parametrize("form", ["lines", "list"])
def test_file_of_too_many_rows_is_not_read(clear, form):
    """100,001 empty rows in 300 kB."""
    rows = ["{}"] * 100_001
    text = "\n".join(rows) if form == "lines" else "[" + ",".join(rows) + "]"
    result = from_file(clear, text.encode())
    assert result.status == "unverified"
    assert "at most 100000 rows" in result.issues[0]


def test_advisories_of_a_result_without_samples_are_empty(clear):
    """A result that was read back from a record holds no samples."""
    result = clear.judged()
    assert advisories(rule_of(spec_of()), type(result)(result.status, (), result.criteria)) == []


def test_positions_of_values_that_are_not_known_are_minus_one():
    assert positions_in(["b", "x", "a"], ["a", "b"]).tolist() == [1, -1, 0]
    assert positions_in(["x", "x"], ["a", "b"]).tolist() == [-1, -1]
