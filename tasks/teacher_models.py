"""The weights that a teacher scores with: the policy that sampled, or the frozen initial one."""

from __future__ import annotations

from tasks.context import RunContext
from tasks.failures import ModelLost, PermanentServiceError
from tasks.learner import Learner
from tasks.sampling import ServiceSampler


class TeacherModel:
    """The teacher of one arm's rollout step.

    Args:
        ctx: the run.
        learner: the arm, which holds the policy that sampled the step.
        step: the rollout step.
    """

    def __init__(self, ctx: RunContext, learner: Learner, step: int) -> None:
        self._ctx, self._learner = ctx, learner
        self._frozen = learner.arm.advantage["teacher"] == "initial"
        self._sampled_by = learner.version_of_step(step)
        self._initial: ServiceSampler | None = None

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
        """Take note that the service has forgotten these weights; the next `open` brings them back.

        Raises:
            ServiceError: if they have been lost for as long as the policy waits.
        """
        await self.close()
        await self._learner.lost(error)

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
                return await ctx.service.open_sampler(path=event["uri"], label="initial teacher")
            except (ModelLost, PermanentServiceError):
                break
    return await ctx.service.open_sampler(
        path=await _publish_initial(ctx, init_uri), label="initial teacher"
    )


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
