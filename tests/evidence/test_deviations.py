import pytest

from evidence.deviations import validate

STEPS = {"field": "steps", "original": "20", "effective": "14", "reason": "wall clock"}
MODEL = {"field": "model", "original": "4B", "effective": "2B", "reason": "not served"}


def update(status, *deviations):
    return {"status": status, "deviations": list(deviations)}


@pytest.mark.parametrize(
    ("updates", "status"),
    [
        ([update("running"), update("running", STEPS), update("succeeded", STEPS)], "recorded"),
        ([update("running", STEPS), update("failed", STEPS)], "recorded"),
        ([update("running", STEPS, MODEL), update("succeeded", STEPS, MODEL)], "recorded"),
        ([update("running", STEPS)], "recorded"),
        ([update("running"), update("succeeded")], "recorded"),
        ([], "recorded"),
        ([{"status": "running"}, {"status": "succeeded", "deviations": None}], "recorded"),
        ([update("succeeded", STEPS)], "unrecorded"),
        ([update("running"), update("failed", STEPS)], "unrecorded"),
        ([update("running", STEPS), update("succeeded", STEPS, MODEL)], "unrecorded"),
        (
            [update("running", STEPS), update("succeeded", {**STEPS, "effective": "12"})],
            "unrecorded",
        ),
        (
            [update("running", STEPS), update("succeeded", {**STEPS, "original": "30"})],
            "unrecorded",
        ),
        ([update("running", STEPS), update("succeeded", {**STEPS, "reason": "cut"})], "recorded"),
        ([update("running"), {"deviations": [STEPS]}], "unrecorded"),
        (
            [update("failed", STEPS), update("running", STEPS), update("succeeded", STEPS)],
            "unrecorded",
        ),
        (update("succeeded", STEPS), "unrecorded"),
        (update("running", STEPS), "recorded"),
    ],
)
def test_a_deviation_is_posted_while_running_first(updates, status):
    assert validate(updates).status == status


def test_an_unrecorded_deviation_is_named_and_kept():
    result = validate([update("running", STEPS), update("succeeded", STEPS, MODEL)])
    assert result.to_record() == {
        "status": "unrecorded",
        "issues": ["Deviation model was first posted in a final update."],
        "deviations": [STEPS, MODEL],
    }


@pytest.mark.parametrize(
    "entry",
    [
        None,
        "steps",
        {},
        {**STEPS, "field": "learning_rate"},
        {**STEPS, "field": None},
        {**STEPS, "field": ["steps"]},
        {**STEPS, "original": ""},
        {**STEPS, "effective": 14},
        {key: value for key, value in STEPS.items() if key != "reason"},
    ],
)
def test_a_deviation_of_another_form_is_invalid(entry):
    result = validate([update("running", entry), update("succeeded", entry)])
    assert result.status == "invalid"
    assert result.deviations == ()


@pytest.mark.parametrize("value", ["x", 1, {}, True])
def test_deviations_must_be_a_list(value):
    result = validate([{"status": "running", "deviations": value}])
    assert result.issues == ("Update 1: deviations: expected a list.",)


@pytest.mark.parametrize("updates", [None, "x", 1, [None, 3, []]])
def test_updates_of_another_form_hold_no_deviation(updates):
    assert validate(updates).deviations == ()


@pytest.mark.parametrize(
    "field", ["model", "objective", "effective_batch", "steps", "dataset", "evaluator", "endpoint"]
)
def test_seven_fields_may_deviate(field):
    entry = {**STEPS, "field": field}
    assert validate([update("running", entry)]).status == "recorded"
