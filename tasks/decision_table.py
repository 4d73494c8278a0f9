"""The computed decision as a table."""

from __future__ import annotations

from evidence.criteria import DecisionResult
from evidence.run import TableRef
from tasks.context import RunContext


def write_decision(ctx: RunContext, judged: DecisionResult) -> TableRef:
    """Write one row per computed criterion; the decision is recomputed, never copied."""
    rows = [
        {
            "criterion": one.id,
            "metric": one.metric,
            "effect": one.effect,
            "lower": one.lower,
            "upper": one.upper,
            "half_width": one.half_width,
            "margin": one.margin,
            "n_items": one.n_items,
            "status": one.status,
        }
        for one in judged.criteria
    ]
    return ctx.run.write_table("decision", rows)
