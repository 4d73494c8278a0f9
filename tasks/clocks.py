"""How much of the wall-time budget is used, waiting and earlier attempts included."""

from __future__ import annotations

from datetime import UTC, datetime

from evidence.run import Run
from evidence.spec import Spec
from tasks.context import RunContext


def seconds_since_start(ctx: RunContext) -> float:
    """Wall seconds since the run was first started, by the ledger's own clock."""
    return run_seconds(ctx.run)


def wall_left_seconds(ctx: RunContext) -> float | None:
    """Seconds left of the spec's wall-time budget; None where it sets none."""
    return run_seconds_left(ctx.run, ctx.spec)


def run_seconds(run: Run) -> float:
    """Wall seconds since the run was first started, whether or not a process carries it out."""
    events = run.events("started")
    if not events:
        return 0.0
    first = datetime.fromisoformat(events[0]["at"])
    return max(0.0, (datetime.now(UTC) - first).total_seconds())


def run_seconds_left(run: Run, spec: Spec) -> float | None:
    """Seconds left of the spec's wall-time budget; None where it sets none."""
    budget = spec.budget.max_wall_minutes
    return None if budget is None else 60.0 * budget - run_seconds(run)
