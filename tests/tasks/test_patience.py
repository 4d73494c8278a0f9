"""Waiting has stated bounds: calls and seconds, before and after the first comparison step."""

import dataclasses

import pytest

from tasks.failures import (
    CapacityBlocked,
    Failure,
    FailureKind,
    PermanentServiceError,
    ServiceError,
    ServiceOutage,
)
from tasks.patience import Patience, RetryPolicy
from tests.tasks.fakes import FakeClock, FixedRandom

pytestmark = pytest.mark.anyio

CAPACITY = Failure(FailureKind.CAPACITY, "503 trainer capacity exhausted", 503)
OUTAGE = Failure(FailureKind.OUTAGE, "Connection error.")


def _patience(
    clock: FakeClock, *, steps: int = 0, jitter: float = 0.5, budget: float | None = None
) -> Patience:
    return Patience(
        RetryPolicy(),
        clock,
        FixedRandom(jitter),  # type: ignore[arg-type]
        steps_completed=lambda: steps,
        seconds_left=lambda: None if budget is None else budget - clock.time,
    )


async def _refused(
    patience: Patience, failure: Failure, *, call_seconds: float = 0.0
) -> tuple[int, ServiceError]:
    """Ask until the policy gives up; how often was asked, and how it ended."""
    clock = patience._clock
    assert isinstance(clock, FakeClock)
    for calls in range(1, 1000):
        clock.time += call_seconds
        try:
            await patience.wait(failure, "create")
        except ServiceError as error:
            return calls, error
    raise AssertionError("never gave up")


@pytest.mark.parametrize(
    ("steps", "jitter", "calls", "waits"),
    [
        (0, 0.5, 4, [60.0, 120.0, 240.0]),
        (0, 0.0, 5, [54.0, 108.0, 216.0, 216.0]),
        (3, 0.5, 9, [60.0, 120.0, *[240.0] * 6]),
        (3, 0.0, 10, [54.0, 108.0, *[216.0] * 7]),
    ],
)
async def test_patience_gives_up_a_refusal_after_ten_or_thirty_minutes(
    steps: int, jitter: float, calls: int, waits: list[float]
) -> None:
    """60 + 120 + 240 = 420 s, and 660 s would pass 600; 60 + 120 + 6 * 240 = 1620 of 1800 s."""
    clock = FakeClock()

    asked, error = await _refused(_patience(clock, steps=steps, jitter=jitter), CAPACITY)

    assert isinstance(error, CapacityBlocked)
    assert error.final
    assert (asked, error.error, error.steps_completed) == (calls, CAPACITY.text, steps)
    assert clock.slept == pytest.approx(waits)


async def test_patience_counts_the_time_that_the_calls_themselves_take() -> None:
    """From the first refusal on: the SDK spends 57 s on each, 60 + 57 + 120 + 57 = 294 s, and 240
    more fit (534 s); with the fourth call 591 s have passed, 648 s by the clock."""
    clock = FakeClock()

    asked, _ = await _refused(_patience(clock), CAPACITY, call_seconds=57.0)

    assert asked == 4
    assert clock.time == 648.0


@pytest.mark.parametrize(
    ("spent", "steps", "calls", "seconds"),
    [
        (57.0, 0, 4, 648.0),
        (300.0, 0, 2, 660.0),
        (300.0, 3, 4, 1620.0),
        (900.0, 0, 2, 1860.0),
    ],
    ids=["creation", "training", "training_after_steps", "nine_minutes_of_work_each"],
)
async def test_time_that_the_sdk_spends_on_a_failed_call_is_part_of_the_wait(
    spent: float, steps: int, calls: int, seconds: float
) -> None:
    """The clock starts with the first try that failed. A refused creation takes the SDK 57 s: 57 +
    60 + 57 + 120 + 57 + 240 + 57. A refused step takes it 300 s: 300 + 60 + 300, and another 120 s
    would pass 600; after steps 300 + 60 + 300 + 120 + 300 + 240 + 300 = 1620, and another 240 s
    would pass 1800. Of 900 s of work 360 count."""
    clock = FakeClock()
    failure = dataclasses.replace(CAPACITY, spent=spent)

    asked, _ = await _refused(_patience(clock, steps=steps), failure, call_seconds=spent)

    assert (asked, clock.time) == (calls, seconds)


@pytest.mark.parametrize(
    ("failure", "steps", "calls"),
    [(CAPACITY, 0, 5), (CAPACITY, 1, 10), (OUTAGE, 0, 17), (OUTAGE, 1, 39)],
    ids=["capacity", "capacity_after_a_step", "outage", "outage_after_a_step"],
)
async def test_stated_bounds_on_calls_and_time_hold_for_any_jitter(
    failure: Failure, steps: int, calls: int
) -> None:
    """Whatever the jitter: no more tries than the policy states, and none begun after its limit."""
    limit = RetryPolicy().after_first_step if steps else RetryPolicy().before_first_step

    for jitter in [number / 50 for number in range(50)]:
        clock = FakeClock()
        asked, _ = await _refused(_patience(clock, steps=steps, jitter=jitter), failure)
        assert asked <= calls
        assert clock.time <= limit

    most, _ = await _refused(_patience(FakeClock(), steps=steps, jitter=0.0), failure)
    assert most == calls


async def test_patience_honours_retry_after() -> None:
    clock = FakeClock()
    patience = _patience(clock)
    failure = Failure(FailureKind.CAPACITY, "429", 429, retry_after=7.0)

    for _ in range(3):
        await patience.wait(failure, "create")

    assert clock.slept == [7.0, 7.0, 7.0]


async def test_patience_is_not_fooled_by_a_short_retry_after_for_ever() -> None:
    """Three short waits, then the schedule: 3 + 240 + 240 = 483 s, the next would pass 600."""
    clock = FakeClock()
    failure = Failure(FailureKind.CAPACITY, "429", 429, retry_after=0.0)

    asked, _ = await _refused(_patience(clock), failure)

    assert asked == 6
    assert clock.time == 483.0


async def test_patience_gives_up_at_once_when_asked_to_come_back_too_late() -> None:
    failure = Failure(FailureKind.CAPACITY, "429", 429, retry_after=3600.0)

    asked, error = await _refused(_patience(FakeClock()), failure)

    assert asked == 1
    assert isinstance(error, CapacityBlocked)
    assert error.retry_after == 3600.0


async def test_patience_waits_for_an_outage_in_short_steps() -> None:
    """1 + 2 + 4 + 8 + 15 + 30 = 60 s, then 60 s each: nine of them reach 600 s."""
    clock = FakeClock()

    asked, error = await _refused(_patience(clock), OUTAGE)

    assert isinstance(error, ServiceOutage)
    assert clock.slept[:6] == [1.0, 2.0, 4.0, 8.0, 15.0, 30.0]
    assert (asked, clock.time) == (16, 600.0)


async def test_patience_does_not_retry_what_cannot_help() -> None:
    failure = Failure(FailureKind.PERMANENT, "402 billing", 402)

    asked, error = await _refused(_patience(FakeClock()), failure)

    assert asked == 1
    assert isinstance(error, PermanentServiceError)


@pytest.mark.parametrize(("jitter", "seconds"), [(0.0, 108.0), (0.5, 120.0), (1.0, 132.0)])
async def test_patience_stops_at_the_same_internal_error_after_two_minutes(
    jitter: float, seconds: float
) -> None:
    """A wrong setting that a server answers with 500 is not worth ten minutes: 1 + 2 + 4 + 8 + 15 +
    30 = 60 s are too few, and with 60 more it is the eighth try."""
    failure = Failure(FailureKind.OUTAGE, "500 KeyError: 'clip'", 500)
    clock = FakeClock()

    asked, error = await _refused(_patience(clock, jitter=jitter), failure)

    assert (asked, clock.time) == (8, pytest.approx(seconds))
    assert isinstance(error, PermanentServiceError)
    assert error.final
    assert f"8 times in {seconds:.0f} s: 500 KeyError: 'clip'" in error.error


async def test_patience_outlasts_a_hiccup_of_seconds() -> None:
    """A worker that is restarted for 7 s fails four tries with the same words, and for a minute
    seven."""
    clock = FakeClock()
    patience = _patience(clock)
    failure = Failure(FailureKind.OUTAGE, "worker died", 500)

    for _ in range(7):
        await patience.wait(failure, "create")

    assert clock.slept == [1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0]


async def test_patience_stops_at_the_fourth_internal_error_of_long_calls() -> None:
    """Each try takes 40 s: 40 + 1 + 40 + 2 + 40 + 4 + 40, the fourth comes 127 s after the first."""
    failure = Failure(FailureKind.OUTAGE, "500 KeyError: 'clip'", 500)

    asked, error = await _refused(_patience(FakeClock()), failure, call_seconds=40.0)

    assert asked == 4
    assert isinstance(error, PermanentServiceError)


async def test_patience_counts_another_internal_error_from_its_own_beginning() -> None:
    """One at 0 s; the other at 81, 83, 87 and 95 s has been there for 14 s."""
    clock = FakeClock()
    patience = _patience(clock)
    await patience.wait(Failure(FailureKind.OUTAGE, "one", 500), "create")
    clock.time += 80.0

    for _ in range(4):
        await patience.wait(Failure(FailureKind.OUTAGE, "other", 500), "create")

    assert clock.slept == [1.0, 2.0, 4.0, 8.0, 15.0]


@pytest.mark.parametrize("status", [408, 502, 504, 520, 529])
async def test_patience_waits_for_a_proxy_that_does_not_get_through(status: int) -> None:
    """It gives the same page each time; that is an outage: 60 s in short steps, then 9 * 60 s."""
    clock = FakeClock()
    failure = Failure(FailureKind.OUTAGE, "<html>Bad Gateway</html>", status)

    asked, error = await _refused(_patience(clock), failure)

    assert isinstance(error, ServiceOutage)
    assert error.final
    assert (asked, clock.time) == (16, 600.0)


async def test_patience_starts_anew_after_a_success() -> None:
    clock = FakeClock()
    patience = _patience(clock)
    await patience.wait(CAPACITY, "create")
    patience.succeeded()
    clock.time = 5000.0

    await patience.wait(CAPACITY, "create")

    assert clock.slept == [60.0, 60.0]


async def test_patience_does_not_wait_past_the_wall_time_budget() -> None:
    """60 + 120 = 180 of 400 s; the next 240 s would end at 420."""
    clock = FakeClock()

    asked, error = await _refused(_patience(clock, steps=3, budget=400.0), CAPACITY)

    assert isinstance(error, CapacityBlocked)
    assert error.final
    assert (asked, clock.slept) == (3, [60.0, 120.0])
