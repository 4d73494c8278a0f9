"""The forced checks' bounds, each at, just below and just above."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tasks.forced_checks import judged

GOOD: dict[str, Any] = {
    "episodes": [{"solution_shown": True}, {"solution_shown": True}],
    "mean_abs_change": 1e-3,
    "mean_abs_without_context": 0.1,
    "mean_abs_with_solution": 0.5,
    "alignment": {"tokens": 1, "turns": 1, "max_abs": 3.0, "mean_abs": 0.05},
    "gradient": {"on_mask": 1, "off_mask": 0, "trained_tokens": 1, "nonzero_advantages": 1},
}


def test_every_check_passes_at_its_bound() -> None:
    assert [(check.check, check.status) for check in judged("sdpo", GOOD)] == [
        ("solution_shown", "passed"),
        ("advantages_change_with_solution", "passed"),
        ("unchanged_prompt_scores_as_sampled", "passed"),
        ("rescored_tokens_aligned", "passed"),
        ("gradient_on_sampled_tokens_alone", "passed"),
    ]


@pytest.mark.parametrize(
    ("place", "value", "failing"),
    [
        (("episodes", 1, "solution_shown"), False, "solution_shown"),
        (("mean_abs_change",), 0.000999, "advantages_change_with_solution"),
        (("mean_abs_change",), None, "advantages_change_with_solution"),
        (("mean_abs_change",), float("nan"), "advantages_change_with_solution"),
        (("mean_abs_without_context",), 0.1001, "unchanged_prompt_scores_as_sampled"),
        (("alignment", "mean_abs"), 0.0501, "rescored_tokens_aligned"),
        (("alignment", "mean_abs"), float("nan"), "rescored_tokens_aligned"),
        (("alignment", "tokens"), 0, "rescored_tokens_aligned"),
        (("gradient", "off_mask"), 1, "gradient_on_sampled_tokens_alone"),
        (("gradient", "on_mask"), 0, "gradient_on_sampled_tokens_alone"),
    ],
)
def test_one_measurement_beyond_its_bound_fails_that_check_alone(
    place: tuple[Any, ...], value: Any, failing: str
) -> None:
    measured: Any = copy.deepcopy(GOOD)
    holder = measured
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value

    failed = [check for check in judged("sdpo", measured) if check.status == "failed"]

    assert [check.check for check in failed] == [failing]
    assert (failed[0].reason or "").startswith(f"sdpo: {failing}: measured ")
