"""A simulator or judge that fails is an outage: no score, no dropped item, no failed gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.evaluation import BASE, Subject, evaluate
from tasks.failures import ServiceOutage
from tasks.rollout import GroupSampling
from tests.tasks.fake_runs import FakeEnvironment, FakeSampler, context, open_fake

pytestmark = pytest.mark.anyio


async def test_evaluation_with_a_failed_judge_is_an_outage_and_goes_on_later(
    tmp_path: Path,
) -> None:
    """Ten items are two chunks of 8 and 2: the second one is kept, the first one asked again."""
    environment = FakeEnvironment(failing={"item-3"})
    ctx = context(tmp_path, environment)
    subject = Subject(arm=BASE, seed=0, policy_version=0, open=open_fake)

    with pytest.raises(ServiceOutage, match="grading of item-3: judge: no answer") as error:
        await evaluate(ctx, subject, BASE)
    kept = ctx.run.parts(BASE, "eval", BASE)
    environment.failing.clear()
    await evaluate(ctx, subject, BASE)

    assert error.value.final
    assert kept == [1]
    scored = {row["item_id"] for row in ctx.run.read_table("evaluations", key=(BASE, BASE))}
    assert scored == set(environment.eval_ids)


async def test_rollout_with_a_failed_judge_keeps_nothing_of_the_group(tmp_path: Path) -> None:
    ctx = context(tmp_path, FakeEnvironment(failing={"train-0-0"}))
    groups = GroupSampling(ctx, ctx.arms[0], "pilot", 0, 0)

    with pytest.raises(ServiceOutage, match="grading of train-0-0"):
        await groups.sample(0, "train-0-0", FakeSampler())  # type: ignore[arg-type]
    await groups.sample(1, "train-0-1", FakeSampler())  # type: ignore[arg-type]

    assert ctx.run.parts(ctx.arms[0].name, "pilot", 0) == [1]
