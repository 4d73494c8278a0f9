"""The bundle and the report, written when a run has ended."""

from __future__ import annotations

from evidence.bundle import build_bundle
from tasks.context import RunContext


async def write_reports(ctx: RunContext) -> None:
    """Seal the bundle and render the report from it."""
    ctx.tell("report", "bundle and report")
    build_bundle(ctx.run)
