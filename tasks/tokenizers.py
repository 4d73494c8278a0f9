"""The tokenizer of the model that the service made, and the environment that speaks with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from envs.registry import make_environment
from tasks.context import RunContext
from tasks.partners import served_partners

GSM8K_ENV = "GATED_RL_GSM8K"
"""Folder of the GSM8K files, where they are not to be fetched from the hub."""


def load_tokenizer(source: str) -> Any:
    """Load a tokenizer from a folder or from the hub.

    Text after a colon is a variant that the hub does not know, as the SDK reads it too.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds to import

    name = source if Path(source).is_dir() else source.split(":", 1)[0]
    return AutoTokenizer.from_pretrained(name)


def prepare_environment(ctx: RunContext, tokenizer_id: str | None) -> None:
    """Build the run's environment with the tokenizer that the service names.

    Args:
        ctx: the run.
        tokenizer_id: as the training client reported it; the base model's name where it did not.
    """
    source = tokenizer_id or ctx.spec.base_model
    execution = ctx.execution
    ctx.environment = make_environment(
        execution.environment.name,
        execution.environment.settings,
        tokenizer=load_tokenizer(source),
        renderer=execution.renderer,
        data_dir=os.environ.get(GSM8K_ENV),
        seed=ctx.arms[0].seed,
        system_prompt=execution.system_prompt,
        partners=served_partners(ctx),
    )


def restore_environment(ctx: RunContext) -> None:
    """Build the environment again after a restart, with the tokenizer that the probe found."""
    if ctx.has_environment:
        return
    probes = ctx.run.events("probe")
    prepare_environment(ctx, probes[0]["info"]["tokenizer"] if probes else None)
