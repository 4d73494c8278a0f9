"""Calls are abandoned at their deadline or when nobody answers, and never cancelled."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from tasks.failures import ServiceOutage
from tasks.service_settings import Deadlines
from tasks.watch import Watch, in_thread
from tests.tasks.fakes import FakeClock

pytestmark = pytest.mark.anyio

LIMITS = Deadlines(watch_every=5.0, watch_dead=20.0)


def _watch(clock: FakeClock, answers: list[bool]) -> Watch:
    async def alive() -> bool:
        return answers.pop(0) if answers else False

    return Watch(clock, LIMITS, alive)


async def test_finished_future_gives_its_value() -> None:
    future: Future[int] = Future()
    future.set_result(3)

    assert await _watch(FakeClock(), []).settle(future, 10.0, "x") == 3


async def test_future_that_never_ends_is_abandoned_not_cancelled() -> None:
    clock, future = FakeClock(), Future[int]()

    with pytest.raises(TimeoutError, match="no answer to x within 60 s"):
        await _watch(clock, [True] * 100).settle(future, 60.0, "x")

    assert clock.time == 60.0
    assert not future.cancelled()


async def test_dead_service_is_noticed_long_before_the_deadline() -> None:
    """First missed at 5 s; 20 s later, at 25 s, the call is given up."""
    clock, future = FakeClock(), Future[int]()

    with pytest.raises(ServiceOutage) as error:
        await _watch(clock, []).settle(future, 900.0, "x")

    assert clock.time == 25.0
    assert not error.value.final
    assert error.value.failure is not None
    assert error.value.failure.may_have_happened


async def test_service_that_comes_back_is_waited_for() -> None:
    clock, future = FakeClock(), Future[int]()

    with pytest.raises(TimeoutError):
        await _watch(clock, [False, False, True] * 10).settle(future, 100.0, "x")


async def test_service_that_answers_calls_is_not_dead_whatever_its_health_check_says() -> None:
    """Ten calls of 5 s each, and every look misses: 50 s without a sign of life but the answers."""
    clock = FakeClock()
    pending: list[Future[int]] = []

    async def alive() -> bool:
        pending[-1].set_result(3)
        return False

    watch = Watch(clock, LIMITS, alive)
    for _ in range(10):
        pending.append(Future[int]())
        assert await watch.settle(pending[-1], 60.0, "x") == 3

    assert clock.time == 50.0


async def test_look_that_missed_an_hour_ago_does_not_count() -> None:
    """Missed once and given up at 6 s; an hour later one look misses, and then all is well."""
    clock = FakeClock()
    watch = _watch(clock, [False, False, *[True] * 100])
    with pytest.raises(TimeoutError):
        await watch.settle(Future[int](), 6.0, "x")
    clock.time += 3600.0

    with pytest.raises(TimeoutError, match="no answer to y within 60 s"):
        await watch.settle(Future[int](), 60.0, "y")


async def test_service_that_lets_health_checks_hang_is_noticed() -> None:
    """A look that takes 5 s in vain every 10 s: missed at 5 s, 15 s and 25 s, given up at 30 s."""
    clock = FakeClock()

    async def alive() -> bool:
        clock.time += 5.0
        return False

    with pytest.raises(ServiceOutage):
        await Watch(clock, LIMITS, alive).settle(Future[int](), 900.0, "x")

    assert clock.time == 30.0


async def test_call_without_an_answer_is_told_every_half_minute() -> None:
    """100 s: at 30, 60 and 90; a call that was answered within 30 s is never told of."""
    clock, told = FakeClock(), []
    watch = _watch(clock, [True] * 100)
    watch.on_slow = lambda what, seconds: told.append((what, seconds))

    with pytest.raises(TimeoutError):
        await watch.settle(Future[int](), 100.0, "optimizer step")
    with pytest.raises(TimeoutError):
        await watch.settle(Future[int](), 25.0, "forward")

    assert told == [("optimizer step", 30.0), ("optimizer step", 60.0), ("optimizer step", 90.0)]


async def test_many_calls_ask_once_together() -> None:
    asked = 0
    clock = FakeClock()

    async def alive() -> bool:
        nonlocal asked
        asked += 1
        return True

    watch = Watch(clock, LIMITS, alive)
    for _ in range(10):
        with pytest.raises(TimeoutError):
            await watch.settle(Future[int](), 0.5, "x")

    assert asked <= 2


async def test_error_of_the_work_is_raised() -> None:
    def work() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await _watch(FakeClock(), []).settle(in_thread(work, "w"), 10.0, "w")
