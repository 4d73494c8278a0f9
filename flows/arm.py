"""One arm, from the initialization checkpoint to its final evaluation."""

from __future__ import annotations

import asyncio
import contextlib

from evidence.result import StructuredResult
from flows import steps
from tasks.arm_metrics import arm_metrics
from tasks.context import RunContext
from tasks.evaluation import FINAL
from tasks.feasibility import optional_evaluations_kept
from tasks.learner import Learner
from tasks.publishing import final_subject, published_subject


async def run_arm(ctx: RunContext, learner: Learner, result: StructuredResult) -> None:
    """Train an arm (if it is trained), evaluate it, and post its numbers as soon as it is done.

    However it ends, its client is released: another arm may be waiting for the room.
    """
    optional = _OptionalEvaluations(ctx, learner)
    try:
        if learner.arm.trained:
            await train_arm(ctx, learner, result, optional)
        last = learner.version_of_step(ctx.rollout_steps) if learner.arm.trained else 0
        await steps.EVALUATION(ctx, final_subject(ctx, learner, last), FINAL)
        await optional.finish()
        result.complete_arm(learner.arm.name, arm_metrics(ctx, learner.arm))
    finally:
        await optional.abandon()
        await learner.drop()


async def train_arm(
    ctx: RunContext, learner: Learner, result: StructuredResult, optional: _OptionalEvaluations
) -> None:
    """Rollout, updates and checkpoint of every rollout step."""
    updates = ctx.execution.rollout.updates_per_step
    for step in range(ctx.rollout_steps):
        await steps.ROLLOUT(ctx, learner, step)
        if learner.arm.distils:
            await steps.RESCORING(ctx, learner, step)
        first = learner.version_of_step(step)
        for update in range(first, first + updates):
            await steps.UPDATE(ctx, learner, update)
        last = step + 1 == ctx.rollout_steps
        if last or (step + 1) % ctx.execution.checkpoint_every == 0:
            await steps.CHECKPOINT(ctx, learner, step)
        await optional.start_if_due(step)
        ctx.tell("train", arm=learner.arm.name, done=step + 1, total=ctx.rollout_steps)
        result.post_metrics(arm_metrics(ctx, learner.arm), arm=learner.arm.name)


class _OptionalEvaluations:
    """Evaluations between the steps: they run beside training, which does not wait for them."""

    def __init__(self, ctx: RunContext, learner: Learner) -> None:
        self._ctx, self._learner = ctx, learner
        self._running: list[asyncio.Task[object]] = []

    async def start_if_due(self, step: int) -> None:
        """Publish the weights after a step and evaluate them, where that is planned and fits."""
        every = self._ctx.execution.evaluation.every
        last = step + 1 == self._ctx.rollout_steps
        if every is None or last or (step + 1) % every or not optional_evaluations_kept(self._ctx):
            return
        label = f"step-{step + 1:06d}"
        if self._ctx.run.has_table("evaluations", key=(self._learner.arm.name, label)):
            return
        version = self._learner.version_of_step(step + 1)
        subject = await published_subject(self._ctx, self._learner, version)
        work = steps.EVALUATION(self._ctx, subject, label)
        self._running.append(asyncio.ensure_future(work))

    async def finish(self) -> None:
        """Wait for those that are still running."""
        for evaluation in self._running:
            await evaluation

    async def abandon(self) -> None:
        """Stop those that are still running; finished items are kept."""
        for evaluation in self._running:
            evaluation.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await evaluation
