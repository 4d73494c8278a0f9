"""The training client of a diagnostic: one frozen batch, a fixed number of updates, no refresh."""

from __future__ import annotations

from tasks.arms import ArmPlan
from tasks.context import RunContext
from tasks.datums import Floats
from tasks.frozen_batch import assert_frozen
from tasks.learner import Learner
from tasks.minibatch import Minibatch, MinibatchLoss, keep_computed
from tasks.sampling import ServiceSampler
from tasks.trainer import Trainer

PHASE = "diagnostic"


class FrozenLearner(Learner):
    """A learner that uses the batch it froze and nothing else.

    Before each use, replays after a lost client included, the batch is held against its digests.
    What a loss was given and decided is on the disk before its gradient is sent.

    Args:
        ctx: the run.
        arm: the arm.
        init_uri: the full initial state.
        max_updates: updates after which no further one is made.
    """

    def __init__(self, ctx: RunContext, arm: ArmPlan, *, init_uri: str, max_updates: int) -> None:
        super().__init__(ctx, arm, phase=PHASE, init_uri=init_uri)
        self._max_updates = max_updates

    async def sampler(self, version: int) -> ServiceSampler:
        """The sampler of the initial state; there is no other.

        Raises:
            RuntimeError: for any later version.
        """
        if version != 0:
            raise RuntimeError(f"a diagnostic samples from version 0 alone, asked for {version}")
        return await super().sampler(version)

    async def _apply(self, trainer: Trainer, index: int) -> float | None:
        if index >= self._max_updates:
            raise RuntimeError(f"update {index} asked for, {self._max_updates} are allowed")
        assert_frozen(self.ctx.run)
        return await super()._apply(trainer, index)

    def _loss(self, minibatch: Minibatch, anchor: list[Floats] | None) -> MinibatchLoss:
        loss = super()._loss(minibatch, anchor)
        loss.on_computed = lambda known: keep_computed(
            self.ctx, self.arm, self.phase, minibatch, known
        )
        return loss
