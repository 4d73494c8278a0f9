"""Capacity blocks: what to do while the service refuses, and what to report when it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from evidence.values import as_mapping, is_count, is_number, is_text

Consistency = Literal["consistent", "inconsistent"]

PATIENCE_BEFORE_FIRST_STEP_MINUTES = 10
PATIENCE_AFTER_MINUTES = 30


@dataclass(frozen=True, slots=True)
class CapacityResult:
    """The answer to a reported capacity block.

    Attributes:
        status: whether the block has the contract's form and agrees with the rest of the output.
        issues: one sentence each.
        may_requeue: whether a fresh run may be queued: no comparison step has run and wall time is
            left. (This program also resumes after steps; that is its own affair.)
    """

    status: Consistency
    issues: tuple[str, ...]
    may_requeue: bool

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "status": self.status,
            "issues": list(self.issues),
            "may_requeue": self.may_requeue,
        }


def validate(report: object, *, wall_left_minutes: object = None) -> CapacityResult:
    """Judge the capacity block of a structured output.

    Args:
        report: the structured output; one without a capacity block is consistent.
        wall_left_minutes: what is left of the spec's wall-time budget; unknown means none.
    """
    output = as_mapping(report)
    if output.get("capacity_block") is None:
        return CapacityResult("consistent", (), may_requeue=False)
    issues = block_issues(output)
    steps = as_mapping(output["capacity_block"]).get("comparison_steps_completed")
    time_left = is_number(wall_left_minutes) and wall_left_minutes > 0
    return CapacityResult(
        status="inconsistent" if issues else "consistent",
        issues=tuple(issues),
        may_requeue=not issues and steps == 0 and time_left,
    )


def block_issues(output: Mapping[str, Any]) -> list[str]:
    """List what is wrong with the capacity block of a structured output; none if it has none."""
    if output.get("capacity_block") is None:
        return []
    block = as_mapping(output["capacity_block"])
    issues = []
    if not is_text(block.get("error")):
        issues.append("capacity_block.error: expected the exact error text.")
    if not is_count(block.get("comparison_steps_completed")):
        issues.append("capacity_block.comparison_steps_completed: expected a whole number.")
    if not isinstance(block.get("released_clients"), bool):
        issues.append("capacity_block.released_clients: expected true or false.")
    expected = {
        "status": "failed",
        "verdict": "inconclusive",
        "outcome_reason": "incomplete_execution",
    }
    issues += [
        f"{field}: expected {value} with a capacity_block."
        for field, value in expected.items()
        if output.get(field) != value
    ]
    return issues


def patience(*, comparison_steps_completed: object, minutes_refused: object) -> str:
    """Say whether to ``retry`` or to ``stop`` while the service refuses for capacity.

    Before the first comparison step waiting ends after 10 minutes. Once steps have run it ends
    after 30, so that finished work is not given up too soon. Numbers that cannot be read stop.

    Args:
        comparison_steps_completed: steps of the comparison that have run.
        minutes_refused: minutes since the first refusal in a row.
    """
    if not is_count(comparison_steps_completed) or not is_number(minutes_refused):
        return "stop"
    before = comparison_steps_completed == 0
    limit = PATIENCE_BEFORE_FIRST_STEP_MINUTES if before else PATIENCE_AFTER_MINUTES
    return "retry" if 0 <= minutes_refused < limit else "stop"
