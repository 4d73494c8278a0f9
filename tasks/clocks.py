"""How much of the wall-time budget is used, waiting and earlier attempts included."""

from __future__ import annotations

from datetime import UTC, datetime

from tasks.context import RunContext


def seconds_since_start(ctx: RunContext) -> float:
    """Wall seconds since the run was first started, by the ledger's own clock."""
    events = ctx.run.events("started")
    if not events:
        return 0.0
    first = datetime.fromisoformat(events[0]["at"])
    return max(0.0, (datetime.now(UTC) - first).total_seconds())


def wall_left_seconds(ctx: RunContext) -> float | None:
    """Seconds left of the spec's wall-time budget; None where it sets none."""
    budget = ctx.spec.budget.max_wall_minutes
    return None if budget is None else 60.0 * budget - seconds_since_start(ctx)
