"""The one state that every arm starts from: a full initialization checkpoint, made once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.context import RunContext
from tasks.failures import Failure, FailureKind, PermanentServiceError
from tasks.warm_start import warm_weights

CHECKPOINT = "initialization"


async def ensure_initialization(ctx: RunContext) -> str:
    """Make the initialization checkpoint, or return the one that this run has made.

    It holds a fresh adapter or, after a warm start, the weights of that; in either case an
    optimizer that has done no step. Writes: the event `initialization`, and what a warm start
    writes. Calls the service. Safe to repeat: a checkpoint whose reply was lost is left behind, and
    another one is made before any arm has loaded either.

    Returns:
        Its URI.

    Raises:
        PermanentServiceError: if the checkpoint does not hold the warm start's adapter.
    """
    known = ctx.run.events("initialization")
    if known:
        return str(known[0]["uri"])
    settings = ctx.execution.warm_start
    weights = None if settings is None else await warm_weights(ctx, settings)

    async def make() -> str:
        trainer = await (
            ctx.service.create_trainer(ctx.lora, label=CHECKPOINT)
            if weights is None
            else ctx.service.load_weights(weights, ctx.lora, label=CHECKPOINT)
        )
        try:
            return await trainer.save(CHECKPOINT)
        finally:
            await trainer.close()

    uri = await ctx.service.retrying("initialization checkpoint", make, from_scratch=True)

    async def look() -> dict[str, Any] | None:
        return await ctx.service.reachability.checkpoint(uri)

    report = await ctx.service.retrying("initialization checkpoint, report", look)
    if weights is not None:
        await _check_adapter(ctx, weights, uri, report or {})
    ctx.run.append("initialization", uri=uri, report=report)
    return uri


async def _check_adapter(
    ctx: RunContext, weights: str, uri: str, report: Mapping[str, Any]
) -> None:
    """What was saved must be what was loaded, where the service can tell."""
    loaded = await ctx.service.reachability.checkpoint(weights) or {}
    wanted, found = loaded.get("adapter_sha256"), report.get("adapter_sha256")
    if wanted != found:
        text = f"{uri} holds the adapter {found}, the warm start's is {wanted}"
        failure = Failure(FailureKind.PERMANENT, text)
        raise PermanentServiceError(text, what="initialization checkpoint", failure=failure)


def initialization_report(ctx: RunContext) -> Mapping[str, Any]:
    """What the service itself says about the initialization checkpoint; empty where it is silent.

    Keys of interest: ``scope``, ``immutable``, ``adapter_sha256``.
    """
    known = ctx.run.events("initialization")
    return (known[0]["report"] or {}) if known else {}
