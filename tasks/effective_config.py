"""The configuration that is executed, in the contract's names and in full."""

from __future__ import annotations

from typing import Any

from tasks.context import RunContext


def effective_config(ctx: RunContext) -> dict[str, Any]:
    """What this run executes: every setting, nothing that depends on time, path or service."""
    spec, execution = ctx.spec, ctx.execution
    raw = spec.raw
    return {
        "base_model": spec.base_model,
        "lora_rank": spec.lora_rank,
        "dataset": raw.get("dataset"),
        "steps": spec.steps,
        "batch_size": spec.batch_size,
        "max_seq_len": spec.max_seq_len,
        "arms": raw.get("arms"),
        "n_examples": spec.eval.n_examples or execution.evaluation.items,
        "n_eval": len(ctx.eval_ids),
        "max_tokens": execution.rollout.max_tokens,
        "limit": ctx.limit,
        "execution": execution.model_dump(mode="json"),
        "execution_sha256": execution.digest,
        "spec_sha256": spec.digest,
    }
