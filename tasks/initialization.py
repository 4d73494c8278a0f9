"""The one state that every arm starts from: a full initialization checkpoint, made once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.context import RunContext

CHECKPOINT = "initialization"


async def ensure_initialization(ctx: RunContext) -> str:
    """Make the initialization checkpoint, or return the one that this run has made.

    Writes: the event `initialization`. Calls the service. Safe to repeat: a checkpoint whose reply
    was lost is left behind, and another one is made before any arm has loaded either.

    Returns:
        Its URI.
    """
    known = ctx.run.events("initialization")
    if known:
        return str(known[0]["uri"])

    async def make() -> str:
        trainer = await ctx.service.create_trainer(ctx.lora, label=CHECKPOINT)
        try:
            return await trainer.save(CHECKPOINT)
        finally:
            await trainer.close()

    uri = await ctx.service.retrying("initialization checkpoint", make, from_scratch=True)

    async def look() -> dict[str, Any] | None:
        return await ctx.service.reachability.checkpoint(uri)

    report = await ctx.service.retrying("initialization checkpoint, report", look)
    ctx.run.append("initialization", uri=uri, report=report)
    return uri


def initialization_report(ctx: RunContext) -> Mapping[str, Any]:
    """What the service itself says about the initialization checkpoint; empty where it is silent.

    Keys of interest: ``scope``, ``immutable``, ``adapter_sha256``.
    """
    known = ctx.run.events("initialization")
    return (known[0]["report"] or {}) if known else {}
