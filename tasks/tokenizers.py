"""The tokenizer of the model that the service made, and the environment that speaks with it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from envs.protocols import Environment
from envs.registry import make_environment
from evidence.canonical import digest, loads_strict
from evidence.errors import ConflictError
from tasks.context import RunContext
from tasks.partners import served_partners

GSM8K_ENV = "GATED_RL_GSM8K"
"""Folder of the GSM8K files, where they are not to be fetched from the hub."""

DATA = "environment_data"
"""Event of the ledger: digests of the tasks and of their order."""


def load_tokenizer(source: str) -> Any:
    """Load a tokenizer from a folder or from the hub.

    Text after a colon is a variant that the hub does not know, as the SDK reads it too. A folder
    that names the plain fast tokenizer is read by that class alone: finding the class of a model
    by its name imports every model there is.
    """
    if _is_plain(Path(source)):
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - takes seconds

        return PreTrainedTokenizerFast.from_pretrained(source)
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds to import

    name = source if Path(source).is_dir() else source.split(":", 1)[0]
    return AutoTokenizer.from_pretrained(name)


def _is_plain(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    if not config.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    found = loads_strict(config.read_bytes(), where=str(config))
    return isinstance(found, dict) and found.get("tokenizer_class") == "PreTrainedTokenizerFast"


async def prepare_environment(ctx: RunContext, tokenizer_id: str | None) -> None:
    """Build the run's environment with the tokenizer that the service names, if not built yet.

    Args:
        ctx: the run.
        tokenizer_id: as the training client reported it; the base model's name where it did not.
    """
    if ctx.has_environment:
        return
    own = tokenizer_id or ctx.spec.base_model

    def build() -> Environment:
        loaded = {ctx.spec.base_model: load_tokenizer(own)}

        ctx.tokenizer = loaded[ctx.spec.base_model]

        def tokenizer_of(model: str) -> Any:
            return loaded[model] if model in loaded else load_tokenizer(model)

        return make_environment(
            ctx.execution.environment.name,
            ctx.execution.environment.settings,
            tokenizer=loaded[ctx.spec.base_model],
            renderer=ctx.execution.renderer,
            data_dir=os.environ.get(GSM8K_ENV),
            seed=ctx.arms[0].seed,
            system_prompt=ctx.execution.system_prompt,
            partners=served_partners(ctx, tokenizer_of),
        )

    environment = await asyncio.to_thread(build)
    _record_data(ctx, environment)
    ctx.environment = environment


def _record_data(ctx: RunContext, environment: Environment) -> None:
    """Write down what the tasks are made of, once; other data later are refused.

    Raises:
        ConflictError: if the run was begun with other tasks, or in another order.
    """
    order = dict(environment.data_order)
    found = {
        "name": environment.name,
        "data_sha256": dict(environment.data_digests),
        "data_order_sha256": digest(order),
        "source": order.get("source"),
    }
    known = ctx.run.events(DATA)
    if not known:
        ctx.run.append(DATA, **found)
        return
    for field, value in found.items():
        if known[0].get(field) != value:
            expected = f"{known[0].get(field)!r}, as when the run was begun"
            raise ConflictError(f"environment.{field}", value, expected, where=ctx.run.path)


async def restore_environment(ctx: RunContext) -> None:
    """Build the environment again after a restart, with the tokenizer that the probe found."""
    probes = ctx.run.events("probe")
    await prepare_environment(ctx, probes[0]["info"]["tokenizer"] if probes else None)
