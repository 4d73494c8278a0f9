"""Which base weights, precision and thread count a run is bound to, on a service that says so.

They are part of what the run is: a run that goes on must find the same ones.
"""

from __future__ import annotations

from typing import Any

from evidence.errors import ConflictError
from tasks.context import RunContext

FILE = "service-identity.json"
_KEYS = ("dtype", "threads")


async def bind_identity(ctx: RunContext) -> None:
    """Write down the embedded service's identity once, and refuse another one later.

    Raises:
        ConflictError: if the service now has other base weights, precision or threads, or no
            longer says which.
    """
    server = await ctx.service.reach()
    known = ctx.run.read_json(FILE) if ctx.run.store.exists(FILE) else None
    if known is None and not server.local:
        return
    found = identity_of(server.local, ctx.spec.base_model)
    if server.local and "base_model" not in found and ctx.spec.base_model in server.models:
        await _have_it_loaded(ctx)
        found = identity_of((await ctx.service.reach()).local, ctx.spec.base_model)
    if known is None:
        ctx.run.write_json(FILE, found)
        return
    for name, value in known.items():
        if found.get(name) != value:
            expected = f"{value!r}, as when the run was started"
            raise ConflictError(f"service {name}", found.get(name), expected, where=ctx.run.path)


async def _have_it_loaded(ctx: RunContext) -> None:
    """A service that was started again knows a model's digest once somebody has used it."""

    async def use() -> None:
        sampler = await ctx.service.open_sampler(base_model=ctx.spec.base_model, label="identity")
        try:
            await sampler.compute_logprobs([0, 1])
        finally:
            await sampler.close()

    await ctx.service.retrying("load the base model", use, from_scratch=True)


def identity_of(local: Any, base_model: str) -> dict[str, Any]:
    """What identifies the computing service, from its own description."""
    identity = {name: local.get(name) for name in _KEYS}
    for model in local.get("models", []):
        if model.get("name") == base_model:
            identity |= {
                "base_model": base_model,
                "base_sha256": model.get("base_sha256"),
                "base_source": model.get("source"),
            }
    return identity
