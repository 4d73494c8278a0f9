"""Work is not waiting: the bounds count from the first failure, and anew after progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.evaluation import BASE, Subject, evaluate
from tasks.failures import Failure, FailureKind, ModelLost, ServiceError, ServiceOutage
from tasks.learner import Learner
from tasks.service import Service
from tasks.service_settings import ServiceSettings
from tests.tasks.fake_runs import FakeEnvironment, FakeService, context, open_fake
from tests.tasks.fakes import FakeClock

pytestmark = pytest.mark.anyio

OUTAGE = Failure(FailureKind.OUTAGE, "Connection error.")
LOST = Failure(FailureKind.LOST_MODEL, "410 model_lost", 410)
SUBJECT = Subject(arm=BASE, seed=0, policy_version=0, open=open_fake)


async def test_time_before_the_first_failure_is_not_waiting() -> None:
    """1000 s of work, then a connection error: more than the 600 s of waiting, but none of it."""
    clock = FakeClock()
    service = Service(ServiceSettings(url="http://127.0.0.1:1"), clock=clock)
    tries = 0

    async def work() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            clock.time += 1000.0
            raise OUTAGE.as_error("work")
        return "done"

    assert await service.retrying("work", work) == "done"
    assert tries == 2


async def _evaluate(folder: Path, lost: dict[str, int]) -> FakeService:
    """Evaluate ten items in chunks of 8 and 2; each item is lost some times, after 500 s."""
    service, environment = FakeService(), FakeEnvironment()

    def before(item_id: str) -> None:
        if lost.get(item_id, 0):
            lost[item_id] -= 1
            service.clock.time += 500.0
            raise LOST.as_error(item_id)

    environment.before = before
    await evaluate(context(folder, environment, service=service), SUBJECT, BASE)
    return service


async def test_finished_chunk_begins_the_waiting_of_an_evaluation_anew(tmp_path: Path) -> None:
    """Round 1 loses both chunks (1000 s), round 2 finishes the first, rounds 2 and 3 lose the
    second: 1000 s after the first loss, but 500 s after the last progress."""
    service = await _evaluate(tmp_path, {"item-0": 1, "item-9": 3})

    assert len(service.clock.slept) == 3


async def test_evaluation_without_progress_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(ServiceOutage, match="evaluation of base") as error:
        await _evaluate(tmp_path, {"item-0": 99})

    assert error.value.final


class _Trainer:
    async def close(self) -> bool:
        return True


class _Replaying(Learner):
    """Replays from the beginning, 400 s an update; some updates lose the model some times."""

    losing: dict[int, int]

    async def _open(self, version: int) -> None:
        trainer: Any = _Trainer()
        self._trainer, self._version = trainer, 0

    async def _apply(self, trainer: Any, index: int) -> None:
        service: Any = self.ctx.service
        service.clock.time += 400.0
        if self.losing.get(index, 0):
            self.losing[index] -= 1
            raise LOST.as_error(f"update {index}")
        self._version = index + 1


def _learner(folder: Path, lost: dict[int, int]) -> _Replaying:
    ctx = context(folder)
    learner = _Replaying(ctx, ctx.arms[0], phase="train", init_uri="tinker://x")
    learner.losing = lost
    return learner


async def test_longer_replay_begins_the_waiting_anew(tmp_path: Path) -> None:
    """Lost in update 1, and 1200 s later in update 2: one update further, so asked again."""
    learner = _learner(tmp_path, {1: 1, 2: 1})

    await learner.at(3)

    assert learner._version == 3


async def test_replay_that_gets_no_further_is_given_up(tmp_path: Path) -> None:
    """Lost in update 1 again and again, every 800 s: the second time 600 s have passed."""
    with pytest.raises(ServiceError) as error:
        await _learner(tmp_path, {1: 99}).at(3)

    assert error.value.final
    assert not isinstance(error.value, ModelLost)


async def test_progress_of_a_rollout_begins_the_waiting_for_its_policy_anew(
    tmp_path: Path,
) -> None:
    ctx = context(tmp_path)
    learner = Learner(ctx, ctx.arms[0], phase="train", init_uri="tinker://x")
    clock: Any = ctx.service.clock
    await learner.lost(LOST.as_error("sample"))
    clock.time += 1000.0
    learner.progressed()

    await learner.lost(LOST.as_error("sample"))
    clock.time += 1000.0

    with pytest.raises(ServiceOutage):
        await learner.lost(LOST.as_error("sample"))
