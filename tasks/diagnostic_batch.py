"""The one batch of a diagnostic: sampled once from train tasks, then frozen."""

from __future__ import annotations

from typing import Any

from evidence.errors import InputError
from tasks.anchor import needs_anchor, recomputed_logprobs
from tasks.context import RunContext
from tasks.frozen_batch import assert_frozen, freeze, frozen
from tasks.learner import Learner
from tasks.minibatch import load_minibatch
from tasks.rollout import sample_rollout
from tasks.trainer import Trainer


async def sample_batch(ctx: RunContext, learner: Learner) -> None:
    """Sample the batch unless it has been frozen; complete groups of train tasks alone.

    Reads and writes: parts, `rollouts`, `tokens`. Calls the service. Safe to repeat.

    Raises:
        InputError: if a task is not one to train on.
    """
    if frozen(ctx.run) is not None:
        return
    wanted = ctx.environment.train_batch(0, ctx.execution.rollout.groups)
    train, held_out = set(ctx.environment.train_ids), set(ctx.environment.eval_ids)
    for item_id in wanted:
        if item_id not in train or item_id in held_out:
            raise InputError("item_id", item_id, "a train task that is not held out")
    await sample_rollout(ctx, learner, 0)


async def freeze_batch(ctx: RunContext, learner: Learner) -> dict[str, Any]:
    """Freeze the sampled batch; from here on nothing is asked of the sampler.

    Where the arm's loss compares with recomputed log-probabilities, the initial state scores the
    batch first, and the scores are frozen with it.

    Returns:
        The frozen batch's record.

    Raises:
        ConflictError: if it is not what was frozen before.
    """
    known = frozen(ctx.run)
    if known is not None:
        assert_frozen(ctx.run)
        return known
    await _recompute(ctx, learner)
    rollout = ctx.execution.rollout
    key = (learner.arm.name, learner.phase, 0)
    rows = ctx.run.read_arrow("rollouts", key=key)
    return freeze(
        ctx.run,
        arm=learner.arm.name,
        phase=learner.phase,
        facts={
            "groups": rollout.groups,
            "group_size": rollout.group_size,
            "minibatches": rollout.minibatches,
            "epochs": rollout.epochs,
            "sequences": rows.num_rows,
            "sampler_policy_version": sorted(set(rows.column("policy_version").to_pylist())),
            "sampler_checkpoint": ctx.run.events("initialization")[0]["uri"],
            "item_ids": sorted(set(rows.column("item_id").to_pylist())),
            "split": "train",
        },
    )


async def _recompute(ctx: RunContext, learner: Learner) -> None:
    """Keep the initial state's own scores of the batch, for a loss that reads them."""
    minibatch = load_minibatch(ctx, learner.arm, learner.phase, 0)
    if not needs_anchor(learner.arm, minibatch.correction):
        return

    async def score(trainer: Trainer) -> None:
        await recomputed_logprobs(ctx, learner.arm, learner.phase, minibatch, trainer)

    await learner.do(0, "recomputed log-probabilities", score)
