import pytest

from evidence.capacity import patience, validate

BLOCKED = {
    "status": "failed",
    "summary": "No capacity.",
    "metrics": {},
    "completed_arms": [],
    "verdict": "inconclusive",
    "outcome_reason": "incomplete_execution",
    "capacity_block": {
        "error": "503 trainer capacity exhausted",
        "comparison_steps_completed": 0,
        "released_clients": True,
    },
}


@pytest.mark.parametrize(
    ("steps", "left", "may"),
    [
        (0, 60, True),
        (0, 0.001, True),
        (0, 0, False),
        (0, -5, False),
        (0, None, False),
        (0, "60", False),
        (0, True, False),
        (0, float("nan"), False),
        (0, float("inf"), False),
        (1, 60, False),
        (14, 60, False),
    ],
)
def test_only_a_run_without_steps_and_with_time_left_may_be_queued_again(put, steps, left, may):
    report = put(BLOCKED, ("capacity_block", "comparison_steps_completed"), steps)
    result = validate(report, wall_left_minutes=left)
    assert result.to_record() == {"status": "consistent", "issues": [], "may_requeue": may}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("error", [None, "", 503, []]),
        ("comparison_steps_completed", [None, True, False, "0", 0.0, -1, []]),
        ("released_clients", [None, 1, 0, "true", []]),
    ],
)
def test_a_block_has_three_parts(put, field, values):
    for value in values:
        result = validate(put(BLOCKED, ("capacity_block", field), value), wall_left_minutes=60)
        assert (result.status, result.may_requeue) == ("inconsistent", False)
        assert result.issues[0].startswith(f"capacity_block.{field}: expected")
    missing = validate(put(BLOCKED, ("capacity_block", field)), wall_left_minutes=60)
    assert missing.status == "inconsistent"


def test_clients_may_have_been_kept(put):
    kept = put(BLOCKED, ("capacity_block", "released_clients"), False)
    assert validate(kept, wall_left_minutes=1).may_requeue


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("status", "succeeded"),
        ("status", "running"),
        ("verdict", "supported"),
        ("verdict", None),
        ("outcome_reason", "insufficient_evidence"),
        ("outcome_reason", None),
    ],
)
def test_a_blocked_run_ends_failed_inconclusive_and_incomplete(put, field, value):
    result = validate(put(BLOCKED, (field,), value), wall_left_minutes=60)
    assert result.status == "inconsistent"
    assert result.issues[0].startswith(f"{field}: expected")


@pytest.mark.parametrize("block", [[], "503", 1, {}, True])
def test_a_block_of_another_form_is_inconsistent(put, block):
    assert validate(put(BLOCKED, ("capacity_block",), block)).status == "inconsistent"


@pytest.mark.parametrize(
    "report", [None, {}, [], "x", {"status": "succeeded", "capacity_block": None}]
)
def test_an_output_without_a_block_is_consistent(report):
    result = validate(report, wall_left_minutes=60)
    assert (result.status, result.may_requeue) == ("consistent", False)


@pytest.mark.parametrize(
    ("steps", "minutes", "answer"),
    [
        (0, 0, "retry"),
        (0, 9.9, "retry"),
        (0, 10, "stop"),
        (0, 12, "stop"),
        (1, 10, "retry"),
        (3, 12, "retry"),
        (3, 29.9, "retry"),
        (3, 30, "stop"),
        (3, 31, "stop"),
        (True, 1, "stop"),
        ("0", 1, "stop"),
        (-1, 1, "stop"),
        (0, "1", "stop"),
        (0, float("nan"), "stop"),
        (0, -1, "stop"),
    ],
    ids=repr,
)
def test_patience_is_longer_once_steps_have_run(steps, minutes, answer):
    assert patience(comparison_steps_completed=steps, minutes_refused=minutes) == answer
