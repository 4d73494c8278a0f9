"""The weights that a teacher scores with: the policy that sampled, or the frozen initial one."""

from __future__ import annotations

from evidence.run import RESCORED
from tasks.context import RunContext
from tasks.failures import Failure, FailureKind, ModelLost, PermanentServiceError
from tasks.learner import Learner
from tasks.patience import Patience
from tasks.sampling import ServiceSampler

LABEL = "initial teacher"
"""Names the frozen teacher in what the service is asked for, and so in its errors."""


class TeacherModel:
    """The teacher of one arm's rollout step.

    Args:
        ctx: the run.
        learner: the arm, which holds the policy that sampled the step.
        step: the rollout step.
    """

    def __init__(self, ctx: RunContext, learner: Learner, step: int) -> None:
        self._ctx, self._learner, self._step = ctx, learner, step
        self._frozen = learner.arm.advantage["teacher"] == "initial"
        self._sampled_by = learner.version_of_step(step)
        self._initial: ServiceSampler | None = None
        self._lost: Patience | None = None
        self._finished = 0

    @property
    def version(self) -> int:
        """Optimizer steps done by the teacher's weights."""
        return 0 if self._frozen else self._sampled_by

    async def open(self) -> ServiceSampler:
        """Return a client of the teacher's weights; none of the arm's updates is undone for it."""
        if not self._frozen:
            return await self._learner.sampler(self._sampled_by)
        if self._initial is None:
            self._initial = await open_initial(self._ctx, self._learner.init_uri)
        return self._initial

    async def lost(self, error: ModelLost) -> None:
        """Take note that the service has forgotten weights; the next `open` brings them back.

        The frozen teacher is opened again by itself: the arm's client is not touched for it. Where
        the policy that sampled was asked too, and it is the one that is gone, the arm restores it.

        Raises:
            ServiceError: if they have been lost for as long as the policy waits.
        """
        if not (self._frozen and error.what.endswith(LABEL)):
            await self._learner.lost(error)
            return
        await self.close()
        place = {"arm": self._learner.arm.name, "phase": self._learner.phase}
        failure = error.failure or Failure(FailureKind.LOST_MODEL, error.error)
        self._ctx.run.append(
            "service_failure",
            **place,
            what="initial teacher lost",
            kind=failure.kind.value,
            error=error.error,
        )
        await self._patience().wait(failure, f"initial teacher of {place['arm']}")

    def _patience(self) -> Patience:
        """The waiting for the frozen teacher; groups that were finished since are progress."""
        arm, phase = self._learner.arm.name, self._learner.phase
        finished = len(self._ctx.run.parts(arm, phase, self._step, folder=RESCORED))
        self._lost = self._lost or self._ctx.service.patience()
        if finished > self._finished:
            self._lost.succeeded()
        self._finished = finished
        return self._lost

    async def close(self) -> None:
        """Let the frozen teacher go; the arm's own policy belongs to its learner."""
        initial, self._initial = self._initial, None
        if initial is not None:
            await initial.close()


async def open_initial(ctx: RunContext, init_uri: str) -> ServiceSampler:
    """Open the initialization checkpoint's weights for scoring.

    Writes: the event `initial_published`. They are published once a run, and again only where the
    service has forgotten what was published.
    """
    for event in reversed(ctx.run.events("initial_published")):
        if event["of"] == init_uri:
            try:
                return await ctx.service.open_sampler(path=event["uri"], label=LABEL)
            except (ModelLost, PermanentServiceError):
                break
    return await ctx.service.open_sampler(path=await _publish_initial(ctx, init_uri), label=LABEL)


async def _publish_initial(ctx: RunContext, init_uri: str) -> str:
    async def publish() -> str:
        trainer = await ctx.service.load_trainer(init_uri, label="initial-teacher")
        try:
            return await trainer.publish_named("initial-teacher")
        finally:
            await trainer.close()

    uri = await ctx.service.retrying("publish the initial teacher", publish, from_scratch=True)
    ctx.run.append("initial_published", of=init_uri, uri=uri)
    return uri
