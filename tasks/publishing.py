"""Weights that are published for evaluation, and how to get at them again after a restart."""

from __future__ import annotations

from tasks.context import RunContext
from tasks.evaluation import Subject
from tasks.failures import ModelLost, PermanentServiceError
from tasks.learner import Learner
from tasks.sampling import ServiceSampler


def final_subject(ctx: RunContext, learner: Learner, version: int) -> Subject:
    """An arm's final weights; they are published when the evaluation first needs them."""

    async def open_it() -> ServiceSampler:
        return await _open(ctx, learner, version)

    return Subject(learner.arm.name, learner.arm.seed, version, open_it)


async def published_subject(ctx: RunContext, learner: Learner, version: int) -> Subject:
    """An arm's weights at a version, published now, while they are live."""
    await _published(ctx, learner, version)
    return final_subject(ctx, learner, version)


async def _published(ctx: RunContext, learner: Learner, version: int) -> str:
    for event in reversed(ctx.run.events("published")):
        if (event["arm"], event["policy_version"]) == (learner.arm.name, version):
            return str(event["uri"])
    return await _publish(ctx, learner, version)


async def _publish(ctx: RunContext, learner: Learner, version: int) -> str:
    uri = await learner.publish_final(version)
    ctx.run.append("published", arm=learner.arm.name, policy_version=version, uri=uri)
    return uri


async def _open(ctx: RunContext, learner: Learner, version: int) -> ServiceSampler:
    """Open what was published; if the service has forgotten it, publish the same weights again."""
    label = f"{learner.arm.name}@{version}"
    uri = await _published(ctx, learner, version)
    try:
        return await ctx.service.open_sampler(path=uri, label=label)
    except (ModelLost, PermanentServiceError):
        uri = await _publish(ctx, learner, version)
        return await ctx.service.open_sampler(path=uri, label=label)
