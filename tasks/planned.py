"""What a spec and its execution file plan, in the form that services and environments take."""

from __future__ import annotations

from collections.abc import Mapping

from envs.protocols import EpisodeSettings
from evidence.execution import ExecutionFile
from evidence.spec import Spec
from tasks.service import LoraSettings


def planned_lora(
    spec: Spec, execution: ExecutionFile, *, optimizer: Mapping[str, float] | None = None
) -> LoraSettings:
    """The adapter that every trained arm starts from.

    Args:
        spec: names the base model.
        execution: the adapter's shape and seed.
        optimizer: hyperparameters that the service is asked to hold; None to leave them open.
    """
    lora = execution.lora
    return LoraSettings(
        base_model=spec.base_model,
        rank=lora.rank,
        seed=lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
        optimizer=optimizer,
    )


def planned_rollouts(spec: Spec, execution: ExecutionFile) -> EpisodeSettings:
    """How training episodes are sampled."""
    rollout = execution.rollout
    return EpisodeSettings(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_turns=rollout.max_turns,
        max_seq_len=spec.max_seq_len,
        max_seq_len_policy=execution.max_seq_len_policy,
    )
