"""The pieces of an arm's training loop as they are executed: a rollout step, its updates, a save."""

from __future__ import annotations

from evidence.run import TableRef
from tasks.context import RunContext
from tasks.learner import Learner
from tasks.minibatch import has_update, update_ref
from tasks.rescoring import rescore_rollout
from tasks.rollout import sample_rollout


async def train_update(ctx: RunContext, learner: Learner, update: int) -> TableRef:
    """Apply one optimizer step, unless it is part of the history already.

    Reads: `tokens` of its rollout step, and `rescoring`. Writes: intent and outcome, `update_tokens`, `updates`.
    Calls the service. Safe to repeat: an update that is in the tables is only looked up, and is
    applied again only when the live weights were lost.
    """
    arm, phase = learner.arm, learner.phase
    if not has_update(ctx, arm, phase, update):
        step = update // ctx.execution.rollout.updates_per_step
        datums = ctx.execution.rollout.batch_size // ctx.execution.rollout.minibatches
        with ctx.timed(arm.name, phase, step, f"update-{update}", units=1, samples=datums):
            await learner.update(update)
    return update_ref(ctx, arm, phase, update)


async def run_step(ctx: RunContext, learner: Learner, step: int) -> None:
    """One rollout step with all of its updates."""
    await sample_rollout(ctx, learner, step)
    await rescore_rollout(ctx, learner, step)
    first = learner.version_of_step(step)
    for update in range(first, first + ctx.execution.rollout.updates_per_step):
        await train_update(ctx, learner, update)


async def save_checkpoint(ctx: RunContext, learner: Learner, step: int) -> str:
    """Keep an arm's state after a rollout step, unless it was kept already; returns its URI."""
    version = learner.version_of_step(step + 1)
    for event in ctx.run.events("checkpoint"):
        mine = (event["arm"], event["phase"]) == (learner.arm.name, learner.phase)
        if mine and event["policy_version"] == version:
            return str(event["uri"])
    return await learner.save(step)
