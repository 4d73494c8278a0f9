import pytest

from evidence.errors import InputError
from evidence.output import apply_update, validate, validate_history

SPEC = {"arms": [{"name": "baseline"}, {"name": "treatment"}]}
FINAL = {
    "status": "succeeded",
    "summary": "Both arms ran.",
    "metrics": {"acc": 0.5, "arms": {"base": {"acc": 0.1}, "baseline": {"acc": 0.4}}},
    "completed_arms": ["baseline", "treatment"],
    "verdict": "supported",
    "outcome_reason": "supported",
}
RUNNING = {
    "status": "running",
    "summary": "Base evaluated.",
    "metrics": {"acc": 0.1},
    "completed_arms": ["baseline"],
}
STEPS = {"field": "steps", "original": "20", "effective": "14", "reason": "wall clock"}


def status(report, spec=SPEC):
    return validate(report, spec=spec).status


def test_a_final_and_a_running_output_are_consistent():
    assert validate(FINAL, spec=SPEC).to_record() == {"status": "consistent", "issues": []}
    assert status(RUNNING) == "consistent"


@pytest.mark.parametrize(
    ("verdict", "reason", "expected"),
    [
        ("supported", "supported", "consistent"),
        ("supported", None, "consistent"),
        ("supported", "refuted", "inconsistent"),
        ("supported", "tie", "inconsistent"),
        ("refuted", "refuted", "consistent"),
        ("refuted", "supported", "inconsistent"),
        ("refuted", "insufficient_evidence", "inconsistent"),
        ("inconclusive", None, "consistent"),
        ("inconclusive", "tie", "consistent"),
        ("inconclusive", "mixed_criteria", "consistent"),
        ("inconclusive", "insufficient_evidence", "consistent"),
        ("inconclusive", "incomplete_execution", "consistent"),
        ("inconclusive", "supported", "inconsistent"),
        ("inconclusive", "refuted", "inconsistent"),
        ("inconclusive", "looks_good", "inconsistent"),
        ("inconclusive", "", "inconsistent"),
        ("inconclusive", 1, "inconsistent"),
        ("inconclusive", ["tie"], "inconsistent"),
        ("validated", None, "inconsistent"),
        ("SUPPORTED", None, "inconsistent"),
        (None, None, "inconsistent"),
        (True, None, "inconsistent"),
        (["supported"], None, "inconsistent"),
    ],
    ids=repr,
)
def test_verdict_and_reason_go_together(put, verdict, reason, expected):
    report = put(put(FINAL, ("verdict",), verdict), ("outcome_reason",), reason)
    assert status(report) == expected


def test_a_final_output_needs_a_verdict(put):
    bare = put(put(FINAL, ("verdict",)), ("outcome_reason",))
    assert status(bare) == "inconsistent"
    assert status({**bare, "status": "failed"}) == "inconsistent"


@pytest.mark.parametrize("field", ["verdict", "outcome_reason"])
@pytest.mark.parametrize("value", ["supported", "inconclusive", "tie", "", 0, False])
def test_a_running_output_has_neither_verdict_nor_reason(field, value):
    assert status({**RUNNING, field: value}) == "inconsistent"
    assert status({**RUNNING, field: None}) == "consistent"


@pytest.mark.parametrize("verdict", ["supported", "refuted"])
def test_a_definitive_verdict_needs_every_arm_and_a_success(put, verdict):
    report = {**FINAL, "verdict": verdict, "outcome_reason": verdict}
    assert status(report) == "consistent"
    assert status({**report, "completed_arms": ["treatment"]}) == "inconsistent"
    assert status({**report, "completed_arms": []}) == "inconsistent"
    assert status({**report, "completed_arms": ["baseline", "treatment", "extra"]}) == "consistent"
    assert status({**report, "status": "failed"}) == "inconsistent"
    assert status({**report, "completed_arms": []}, spec=None) == "consistent"


def test_an_inconclusive_verdict_may_lack_arms():
    report = {**FINAL, "verdict": "inconclusive", "outcome_reason": "incomplete_execution"}
    assert status({**report, "completed_arms": []}) == "consistent"
    assert status({**report, "completed_arms": [], "status": "failed"}) == "consistent"


@pytest.mark.parametrize("value", [None, "", "done", "Running", 1, True, ["running"]])
def test_there_are_three_statuses(value):
    assert status({**FINAL, "status": value}) == "inconsistent"


def test_a_summary_is_text(no_text):
    assert status({**FINAL, "summary": no_text}) == "inconsistent"


@pytest.mark.parametrize(
    "arms",
    [None, "baseline", {}, [1], [None], [""], [["baseline"]], ["baseline", "baseline"]],
    ids=repr,
)
def test_completed_arms_are_names_each_once(arms):
    assert status({**RUNNING, "completed_arms": arms}) == "inconsistent"


def test_metrics_are_finite_numbers(put, no_number):
    for path in (("metrics", "acc"), ("metrics", "arms", "baseline", "acc")):
        result = validate(put(FINAL, path, no_number), spec=SPEC)
        assert result.issues == (f"{'.'.join(path)}: expected a finite number.",)


@pytest.mark.parametrize(
    "metrics",
    [None, [], "x", 1, {"arms": []}, {"arms": None}, {"arms": {"a": 1}}, {"arms": {"a": None}}],
    ids=repr,
)
def test_metrics_of_another_form_are_inconsistent(metrics):
    assert status({**RUNNING, "metrics": metrics}) == "inconsistent"


@pytest.mark.parametrize(
    ("tested", "instead", "expected"),
    [
        (True, None, "consistent"),
        (None, None, "consistent"),
        (False, "a shorter run", "consistent"),
        (False, None, "inconsistent"),
        (False, "", "inconsistent"),
        (False, 1, "inconsistent"),
        ("false", "a shorter run", "inconsistent"),
        (0, "a shorter run", "inconsistent"),
    ],
    ids=repr,
)
def test_a_changed_claim_is_named(tested, instead, expected):
    report = {**FINAL, "original_hypothesis_tested": tested, "tested_instead": instead}
    assert status(report) == expected
    running = {**RUNNING, "original_hypothesis_tested": tested, "tested_instead": instead}
    assert status(running) == expected


def test_deviations_and_a_capacity_block_have_their_form():
    assert status({**FINAL, "deviations": [STEPS]}) == "consistent"
    assert status({**FINAL, "deviations": [{**STEPS, "field": "x"}]}) == "inconsistent"
    assert status({**FINAL, "deviations": "none"}) == "inconsistent"
    assert status({**FINAL, "capacity_block": {}}) == "inconsistent"


@pytest.mark.parametrize("report", [None, [], "x", 1, {}])
def test_an_output_of_another_form_is_inconsistent(report):
    assert status(report) == "inconsistent"


def test_a_number_once_posted_never_disappears(put):
    before = {**RUNNING, "metrics": {"acc": 0.1, "arms": {"base": {"acc": 0.1, "loss": 2}}}}
    assert validate(before, previous=before).status == "consistent"
    for path in (
        ("metrics", "acc"),
        ("metrics", "arms", "base", "loss"),
        ("metrics", "arms", "base"),
        ("metrics", "arms"),
        ("metrics",),
    ):
        assert validate(put(before, path), previous=before).status == "inconsistent"
    lost = validate(put(before, ("metrics", "arms", "base", "loss")), previous=before)
    assert lost.issues == ("metrics.arms.base.loss: was posted before and must be kept.",)
    corrected = put(before, ("metrics", "acc"), 0.2)
    assert validate(corrected, previous=before).status == "consistent"


def test_a_finished_arm_and_a_deviation_stay(put):
    before = {**RUNNING, "deviations": [STEPS]}
    assert validate({**before, "completed_arms": []}, previous=before).issues == (
        "completed_arms: baseline was completed before and must be kept.",
    )
    assert validate({**before, "deviations": []}, previous=before).issues == (
        "deviations: steps was recorded before and must be kept.",
    )
    assert validate({**before, "deviations": [{**STEPS, "reason": "x"}]}, previous=before).issues


def test_a_history_is_judged_update_by_update(put):
    second = {**RUNNING, "metrics": {"acc": 0.1, "b": 1}}
    final = {**FINAL, "metrics": {"acc": 0.1, "b": 1}}
    assert validate_history([RUNNING, second, final], spec=SPEC).status == "consistent"
    result = validate_history([second, RUNNING, final], spec=SPEC)
    assert result.issues == ("Update 2: metrics.b: was posted before and must be kept.",)
    assert validate_history([RUNNING, {**final, "verdict": "x"}]).status == "inconsistent"
    for nothing in (None, {}, "x"):
        assert validate_history(nothing).status == "inconsistent"
    assert validate_history([None]).status == "inconsistent"


def test_the_base_model_is_posted_before_any_arm_completes():
    late = {**RUNNING, "metrics": {"acc": 0.1}}
    assert validate_history([late], base_arm="base").issues == (
        "Update 1: metrics.arms.base: expected before any arm completes.",
    )
    first = {**RUNNING, "completed_arms": [], "metrics": {"arms": {"base": {"acc": 0.1}}}}
    assert validate_history([first], base_arm="base").status == "consistent"
    then = {**RUNNING, "metrics": {"arms": {"base": {"acc": 0.1}}}}
    assert validate_history([first, then], base_arm="base").status == "consistent"
    assert validate_history([late]).status == "consistent"


def test_apply_update_loses_nothing():
    one = apply_update({}, {"status": "running", "metrics": {"arms": {"base": {"acc": 0.1}}}})
    assert one == {
        "status": "running",
        "summary": "Started.",
        "metrics": {"arms": {"base": {"acc": 0.1}}},
        "completed_arms": [],
    }
    two = apply_update(
        one,
        {
            "metrics": {"steps": 3, "arms": {"base": {"loss": 2.0}, "baseline": {"acc": 0.4}}},
            "completed_arms": ["baseline"],
            "deviations": [STEPS],
            "summary": "One arm done.",
        },
    )
    three = apply_update(two, {"completed_arms": ["treatment"], "deviations": [STEPS]})
    assert three["completed_arms"] == ["baseline", "treatment"]
    assert three["deviations"] == [STEPS]
    final = apply_update(three, {"status": "succeeded", "verdict": "inconclusive", "extra": 1})
    assert final["metrics"] == {
        "steps": 3,
        "arms": {"base": {"acc": 0.1, "loss": 2.0}, "baseline": {"acc": 0.4}},
    }
    assert list(final) == [
        "status",
        "summary",
        "metrics",
        "completed_arms",
        "verdict",
        "deviations",
        "extra",
    ]
    assert one["metrics"] == {"arms": {"base": {"acc": 0.1}}}


@pytest.mark.parametrize(
    "patch",
    [
        {"verdict": "supported"},
        {"status": "succeeded"},
        {"metrics": {"acc": float("nan")}},
        {"metrics": {"acc": "0.5"}},
        {"completed_arms": [1]},
        {"deviations": [{"field": "steps"}]},
        {"original_hypothesis_tested": False},
        {"status": "done"},
    ],
    ids=repr,
)
def test_apply_update_refuses_an_inconsistent_output(patch):
    with pytest.raises(InputError, match="structured output: expected a consistent output"):
        apply_update(RUNNING, patch)


def test_apply_update_adds_to_the_deviations_posted_before():
    model = {**STEPS, "field": "model"}
    one = apply_update(RUNNING, {"deviations": [STEPS]})
    assert apply_update(one, {"deviations": [model]})["deviations"] == [STEPS, model]
    assert apply_update(one, {"summary": "On."})["deviations"] == [STEPS]
    assert "deviations" not in apply_update(RUNNING, {"summary": "On."})
