import hashlib
import json

import pytest

from evidence.errors import InputError
from evidence.evaluator import evaluator_id, validate


def provenance(**changed):
    return {
        "code_sha256": "a" * 64,
        "prompt_template": "chat v1",
        "decoding": {"temperature": 0, "max_tokens": 512, "stop": []},
        "parser": "last number",
        "items": {"ids": ["i0", "i1"]},
        **changed,
    }


OLD, NEW = provenance(), provenance(parser="last number v2")
OLD_ID, NEW_ID = evaluator_id(OLD), evaluator_id(NEW)


def score(arm, value=0.5, seed=0, evaluator=OLD_ID, metric="accuracy"):
    return {
        "arm": arm,
        "metric": metric,
        "value": value,
        "evaluator_id": evaluator,
        "seed": seed,
        "predictions_ref": "p.jsonl",
    }


def evaluation(*scores, evaluators=None, arms=("baseline", "treatment"), metric="accuracy"):
    return {
        "version": 1,
        "evaluators": {OLD_ID: OLD} if evaluators is None else evaluators,
        "scores": list(scores),
        "comparisons": [{"metric": metric, "arms": list(arms)}],
    }


GOOD = evaluation(score("treatment"), score("base"), score("baseline"))
BOTH = {OLD_ID: OLD, NEW_ID: NEW}


def test_one_frozen_evaluator_is_comparable():
    """Arms sorted, the base included although the comparison does not name it."""
    assert validate(GOOD).to_record() == {
        "status": "valid",
        "issues": [],
        "comparisons": [
            {
                "metric": "accuracy",
                "status": "comparable",
                "arms": ["base", "baseline", "treatment"],
                "evaluator_ids": [OLD_ID],
                "missing_arms": [],
            }
        ],
    }


def test_evaluator_id_is_the_hash_of_the_canonical_provenance():
    """Keys in any order; non-ASCII escaped; 1.0 is written as such."""
    found = evaluator_id({"b": 1.0, "a": "ß"})
    assert found == hashlib.sha256(b'{"a":"\\u00df","b":1.0}').hexdigest()
    assert evaluator_id({"a": "ß", "b": 1.0}) == found
    assert evaluator_id({"a": "ß", "b": 1}) != found
    with pytest.raises(InputError):
        evaluator_id({"a": float("nan")})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("code_sha256", [None, "see build_report.py: sha256(...)", "a" * 63, "g" * 64, 1, True]),
        ("prompt_template", [None, "", 1, []]),
        ("decoding", [None, {}, [], "greedy"]),
        ("parser", [None, " ", {}]),
        (
            "items",
            [
                None,
                {},
                [],
                {"ids": []},
                {"ids": [1]},
                {"ids": "i0"},
                {"ids": [""]},
                {"ids": ["i0", 1]},
                {"manifest_ref": "items.jsonl"},
                {"manifest_ref": "", "manifest_sha256": "a" * 64},
                {"manifest_ref": "items.jsonl", "manifest_sha256": "abc"},
            ],
        ),
    ],
)
def test_each_part_of_an_identity_is_required(field, values):
    for value in values:
        changed = provenance(**{field: value})
        name = evaluator_id(changed)
        result = validate(
            evaluation(
                score("baseline", evaluator=name), evaluators={name: changed}, arms=["baseline"]
            )
        )
        assert result.status == "invalid"
        assert result.issues == (f"Evaluator {name}: {field} is required.",)


def test_items_may_be_named_by_a_manifest():
    changed = provenance(items={"manifest_ref": "items.jsonl", "manifest_sha256": "b" * 64})
    name = evaluator_id(changed)
    report = evaluation(
        score("baseline", evaluator=name), evaluators={name: changed}, arms=["baseline"]
    )
    assert validate(report).status == "valid"


def test_issues_of_one_evaluator_come_in_the_order_of_the_record():
    result = validate({"version": 1, "evaluators": {"x": {}}, "scores": [], "comparisons": []})
    assert result.issues == (
        "Evaluator x: code_sha256 is required.",
        "Evaluator x: prompt_template is required.",
        "Evaluator x: decoding is required.",
        "Evaluator x: parser is required.",
        "Evaluator x: items is required.",
        "Evaluator x: identity does not match provenance hash.",
    )


@pytest.mark.parametrize(
    "changed", [{"temperature": 0.1}, {"temperature": float("nan")}, {"temperature": 0.0}]
)
def test_an_identity_is_the_hash_of_exactly_this_provenance(changed):
    """0 and 0.0 are different texts, so different identities."""
    report = {**GOOD, "evaluators": {OLD_ID: provenance(decoding={**OLD["decoding"], **changed})}}
    result = validate(report)
    assert result.issues == (f"Evaluator {OLD_ID}: identity does not match provenance hash.",)
    assert result.comparisons[0].status == "comparable"


def comparable(*scores, arms=("baseline", "treatment")):
    return validate(evaluation(*scores, evaluators=BOTH, arms=arms)).comparisons[0]


def test_a_changed_evaluator_needs_every_arm_and_the_base_again():
    old = [score("base"), score("baseline"), score("treatment")]
    new = [score(arm, evaluator=NEW_ID) for arm in ("base", "baseline", "treatment")]
    assert comparable(*old, *new).status == "comparable"
    for left_out in range(3):
        some = [entry for index, entry in enumerate(new) if index != left_out]
        kept = [entry for index, entry in enumerate(old) if index == left_out]
        mixed = comparable(*kept, *some)
        assert mixed.status == "incomparable"
        assert mixed.evaluator_ids == tuple(sorted([OLD_ID, NEW_ID]))
        assert mixed.missing_arms == ()


def test_old_scores_beside_complete_new_ones_do_not_spoil_a_comparison():
    """Both evaluators cover everything, or only the new one does."""
    old = [score("base"), score("baseline")]
    new = [score(arm, evaluator=NEW_ID) for arm in ("base", "baseline", "treatment")]
    found = comparable(*old, *new)
    assert (found.status, found.evaluator_ids) == ("comparable", (NEW_ID,))
    assert comparable(*old, score("treatment"), *new).evaluator_ids == tuple(
        sorted([OLD_ID, NEW_ID])
    )


def test_every_seed_must_be_scored_by_the_same_evaluator():
    new = [
        score(arm, evaluator=NEW_ID, seed=seed)
        for arm in ("baseline", "treatment")
        for seed in (0, 1)
    ]
    assert comparable(*new).status == "comparable"
    assert comparable(*new[:3], score("treatment", seed=1)).status == "incomparable"


@pytest.mark.parametrize(
    "arms", [("baseline", "treatment", "third"), ("third", "baseline", "third")]
)
def test_a_compared_arm_without_a_score_is_missing(arms):
    found = validate(evaluation(score("baseline"), score("treatment"), arms=arms))
    assert found.status == "incomparable"
    assert found.comparisons[0].missing_arms == ("third",)


def test_other_metrics_do_not_count():
    report = evaluation(score("baseline"), score("treatment", metric="reward"))
    assert validate(report).comparisons[0].missing_arms == ("treatment",)
    nothing = validate(evaluation(score("baseline"), metric="reward", arms=["baseline"]))
    assert nothing.comparisons[0].to_record() == {
        "metric": "reward",
        "status": "incomparable",
        "arms": [],
        "evaluator_ids": [],
        "missing_arms": ["baseline"],
    }


def test_scores_are_finite_numbers(no_number):
    result = validate(evaluation(score("baseline"), score("treatment", value=no_number)))
    assert result.status == "invalid"
    assert result.issues == ("Score 2 (treatment, accuracy): value: expected a finite number.",)
    assert result.comparisons[0].missing_arms == ("treatment",)


@pytest.mark.parametrize("field", ["arm", "metric", "evaluator_id"])
def test_scores_name_arm_metric_and_evaluator(put, no_text, field):
    result = validate(put(GOOD, ("scores", 0, field), no_text))
    assert result.status == "invalid"
    assert result.issues[0].endswith(f"{field}: expected text.")


@pytest.mark.parametrize("seed", ["0", 0.0, True, []])
def test_a_seed_is_a_whole_number(put, seed):
    assert validate(put(GOOD, ("scores", 0, "seed"), seed)).status == "invalid"
    assert validate(put(GOOD, ("scores", 0, "seed"), 2**63)).status == "valid"
    assert validate(put(GOOD, ("scores", 0, "seed"), None)).status == "valid"


def test_a_score_of_an_unknown_evaluator_is_an_issue(put):
    result = validate(put(GOOD, ("scores", 0, "evaluator_id"), NEW_ID))
    assert result.issues == (
        "Score 1 (treatment, accuracy): evaluator_id names no recorded evaluator.",
    )


def test_two_values_for_one_score_are_an_issue_and_the_same_twice_is_none():
    twice = [score("baseline"), score("treatment"), score("treatment")]
    assert validate(evaluation(*twice)).status == "valid"
    result = validate(evaluation(*twice[:2], score("treatment", value=0.6)))
    assert result.issues == ("Score 3 (treatment, accuracy): another value was reported before.",)


@pytest.mark.parametrize(
    "report", [[], "x", 1, {}, {"version": 1}, {"version": 2, "evaluators": {}}]
)
def test_an_evaluation_of_another_form_is_invalid(report):
    assert validate(report).status == "invalid"


@pytest.mark.parametrize("version", [None, 2, "1", True])
def test_only_version_1_is_known(put, version):
    assert validate(put(GOOD, ("version",), version)).issues == ("version: expected 1.",)


@pytest.mark.parametrize("field", ["scores", "comparisons"])
@pytest.mark.parametrize("value", ["x", 1, {}, True])
def test_lists_must_be_lists(put, field, value):
    assert f"{field}: expected a list." in validate(put(GOOD, (field,), value)).issues


@pytest.mark.parametrize(
    "entry",
    [
        None,
        "x",
        {},
        {"metric": "m"},
        {"metric": "m", "arms": []},
        {"metric": "m", "arms": [1]},
        {"metric": "m", "arms": ["a", 1]},
        {"metric": 1, "arms": ["a"]},
        {"metric": "m", "arms": "ab"},
    ],
)
def test_a_comparison_of_another_form_is_an_issue(put, entry):
    result = validate(put(GOOD, ("comparisons", 0), entry))
    assert result.issues == ("Comparison 1: expected a metric and a list of arms.",)
    assert result.comparisons == ()


def test_a_base_evaluation_alone_is_valid():
    """It is posted before any arm exists: nothing is compared yet."""
    report = {"version": 1, "evaluators": {OLD_ID: OLD}, "scores": [score("base")]}
    assert validate(report).status == "valid"


def test_the_gate_has_a_gates_status():
    assert validate(GOOD).to_gate().status == "passed"
    missing = validate(evaluation(score("baseline"))).to_gate()
    assert (missing.status, missing.checks[0].status) == ("unverified", "unverified")
    assert validate(None).to_gate().status == "failed"
    json.dumps(missing.to_record())


def test_the_number_of_comparisons_is_bounded(put):
    one = GOOD["comparisons"][0]
    assert validate(put(GOOD, ("comparisons",), [one] * 200)).status == "valid"
    many = validate(put(GOOD, ("comparisons",), [one] * 201))
    assert many.issues == ("comparisons: expected at most 200; the others are not judged.",)
    assert len(many.comparisons) == 200


@pytest.mark.parametrize("report", [None, [], "x", 1])
def test_an_evaluation_must_be_an_object(report):
    assert validate(report).issues[0] == "evaluation: expected an object."
