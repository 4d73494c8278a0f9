"""Feasibility rests on seconds; a process that was killed must not make them too few."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tasks import pilot
from tasks.context import RunContext
from tasks.evaluation import BASE, Subject, evaluate
from tasks.failures import ServiceOutage
from tests.tasks.fake_runs import FakeEnvironment, FakeService, context, open_fake
from tests.tasks.fakes import FakeClock

pytestmark = pytest.mark.anyio

SUBJECT = Subject(arm=BASE, seed=0, policy_version=0, open=open_fake)


class BeatingClock(FakeClock):
    """Lets a fixed number of sleeps pass, and then stands still."""

    def __init__(self, beats: int) -> None:
        super().__init__()
        self.left = beats

    async def sleep(self, seconds: float) -> None:
        if not self.left:
            await asyncio.Event().wait()
        self.left -= 1
        await super().sleep(seconds)


async def test_joint_step_counts_the_time_of_an_interrupted_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after two sleeps of 10 s, in the third: three beats stand for 30 s."""
    service = FakeService()
    service.clock = BeatingClock(2)
    ctx = context(tmp_path, service=service)

    async def interrupted(ctx: RunContext, learner: Any, step: int) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        raise ServiceOutage("gone", final=True)

    async def finished(ctx: RunContext, learner: Any, step: int) -> None:
        return None

    monkeypatch.setattr(pilot, "run_step", interrupted)
    with pytest.raises(ServiceOutage):
        await pilot.run_pilot(ctx, "tinker://x")
    untimed = ctx.timings(what=pilot.JOINT_STEP)
    monkeypatch.setattr(pilot, "run_step", finished)
    await pilot.run_pilot(ctx, "tinker://x")

    assert untimed == []
    (timed,) = ctx.timings(what=pilot.JOINT_STEP)
    assert timed["units"] == 2
    assert 30.0 <= timed["seconds"] < 40.0


async def test_base_evaluation_without_a_timing_times_one_chunk_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the last part: ten items are there, and 8 of them are asked once more."""
    environment = FakeEnvironment()
    ctx = context(tmp_path, environment)
    with monkeypatch.context() as patch:
        patch.setattr(ctx.run, "append", _killed_at_timing(ctx))
        with pytest.raises(KeyboardInterrupt):
            await evaluate(ctx, SUBJECT, BASE)
    assert ctx.timings(what=BASE) == []
    assert ctx.run.parts(BASE, "eval", BASE) == [0, 1]
    environment.asked.clear()

    await evaluate(ctx, SUBJECT, BASE)

    (timed,) = ctx.timings(arm=BASE, what=BASE)
    assert (timed["units"], timed["samples"]) == (8, 8)
    assert environment.asked == list(environment.eval_ids[:8])
    assert len(ctx.run.read_table("evaluations", key=(BASE, BASE))) == 10


def _killed_at_timing(ctx: RunContext) -> Any:
    append = ctx.run.append

    def kept(event: str, **fields: Any) -> Any:
        if event == "timing":
            raise KeyboardInterrupt
        return append(event, **fields)

    return kept


async def test_evaluation_that_has_its_timing_never_adds_one_of_no_items(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    await evaluate(ctx, SUBJECT, BASE)
    other = Subject(arm="dppo", seed=0, policy_version=4, open=open_fake)
    await evaluate(ctx, other, "final")

    await evaluate(ctx, other, "final")

    assert [event["units"] for event in ctx.timings(phase="eval")] == [10, 10]
