"""How often and how long the service is asked again: one policy, for every kind of call."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tasks.clock import Clock
from tasks.failures import (
    GATEWAY_STATUS,
    CapacityBlocked,
    Failure,
    FailureKind,
    PermanentServiceError,
    ServiceError,
    ServiceOutage,
)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Waiting times in seconds.

    Refused for capacity: 60, 120, 240, 240, ... with jitter, or what the service asks for. Not
    reachable: short waits first, because a restarted service is back within seconds. Waiting ends
    after `before_first_step` seconds while no comparison step has been completed (nothing is lost
    then, and the run can be started later), and after `after_first_step` seconds otherwise. Both
    count from the moment when the first try that failed was begun, so that what the SDK spends on
    its own retries is part of them, and begin anew when there was progress in between.

    Bounds: no try is begun later than that limit; the last one ends by its own deadline
    (`tasks.service_settings.Deadlines`). With the defaults and jitter at its extremes, one request
    is tried at most 5 times before the first step and 10 times after it when it is refused for
    capacity, and 17 and 39 times when nothing can be reached. An internal error of the server,
    word for word the same, is permanent at the 8th try, 108 to 132 s after the first. A page of a
    proxy that does not get through (`tasks.failures.GATEWAY_STATUS`) is no such error, however
    often it is the same: it is waited out like a service that cannot be reached.
    """

    capacity_delays: tuple[float, ...] = (60.0, 120.0, 240.0)
    outage_delays: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
    jitter: float = 0.1
    before_first_step: float = 600.0
    after_first_step: float = 1800.0
    sdk_spends: float = 360.0
    """Of a try that failed, at most so many seconds count as waiting: as long as the SDK retries by
    itself. A call that worked for longer before it failed was not waiting."""
    same_error_limit: int = 3
    """How often one internal error of the server, word for word, is worth another try."""
    same_error_seconds: float = 90.0
    """For so long after its first appearance it is worth another try all the same: a hiccup of some
    seconds gives the same words to every try that falls into it."""

    def delay(self, failure: Failure, waits: int, uniform: float) -> float:
        """Seconds before the next try.

        ``Retry-After`` replaces the schedule for as many waits as the schedule has entries; from
        then on the longer of the two counts, so that a service that says 1 for ever is not asked
        every second for ever.

        Args:
            failure: the failure to wait out.
            waits: waits of this request so far.
            uniform: a random number in [0, 1).
        """
        capacity = failure.kind is FailureKind.CAPACITY
        delays = self.capacity_delays if capacity else self.outage_delays
        scheduled = delays[min(waits, len(delays) - 1)]
        scheduled *= 1.0 + self.jitter * (2.0 * uniform - 1.0)
        if failure.retry_after is None:
            return scheduled
        asked = max(1.0, failure.retry_after)
        return asked if waits < len(delays) else max(asked, scheduled)


class Patience:
    """The waiting of one request, from its first failure until it succeeds or is given up."""

    def __init__(
        self,
        policy: RetryPolicy,
        clock: Clock,
        rng: random.Random,
        *,
        steps_completed: Callable[[], int],
        on_wait: Callable[[str, Failure, float], None] | None = None,
        seconds_left: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._seconds_left = seconds_left
        self._policy, self._clock, self._rng = policy, clock, rng
        self._steps_completed, self._on_wait = steps_completed, on_wait
        self._since: float | None = None
        self._waits = 0
        self._same = _SAME_NOTHING

    @property
    def waits(self) -> int:
        """How often this request has waited since it last succeeded."""
        return self._waits

    def succeeded(self) -> None:
        """Forget the refusals after progress: the next one is waited out from the beginning."""
        self._since, self._waits, self._same = None, 0, _SAME_NOTHING

    async def wait(self, failure: Failure, what: str) -> None:
        """Wait before the next try, or give up.

        Raises:
            PermanentServiceError: if asking again cannot help, or the server gave the same
                internal error too often and for too long.
            CapacityBlocked: if the service has refused for long enough, or the wait would pass
                the wall-time budget.
            ServiceOutage: if it has been out of reach for long enough, likewise.
        """
        now = self._clock.now()
        if self._since is None:
            self._since = now - min(failure.spent, self._policy.sdk_spends)
        self._refuse_hopeless(failure, what, now)
        delay = self._policy.delay(failure, self._waits, self._rng.random())
        waited = now - self._since
        steps = self._steps_completed()
        limit = self._policy.after_first_step if steps else self._policy.before_first_step
        left = self._seconds_left()
        if waited + delay > limit or (left is not None and delay > left):
            raise _given_up(failure, what, waited=waited, steps=steps)
        self._waits += 1
        if self._on_wait is not None:
            self._on_wait(what, failure, delay)
        await self._clock.sleep(delay)

    def _refuse_hopeless(self, failure: Failure, what: str, now: float) -> None:
        if failure.kind is FailureKind.PERMANENT:
            raise PermanentServiceError(failure.text, what=what, failure=failure, final=True)
        if failure.kind is not FailureKind.OUTAGE or failure.status is None:
            return
        if failure.status in GATEWAY_STATUS:
            return
        words, times, since = self._same
        times, since = (times + 1, since) if words == failure.text else (1, now)
        self._same = (failure.text, times, since)
        lasted = now - since
        if times > self._policy.same_error_limit and lasted >= self._policy.same_error_seconds:
            text = f"the same internal error {times} times in {lasted:.0f} s: {failure.text}"
            raise PermanentServiceError(text, what=what, failure=failure, final=True)


_SAME_NOTHING: tuple[str, int, float] = ("", 0, 0.0)
"""Words of the last internal error, how often in a row, and since when."""


def _given_up(failure: Failure, what: str, *, waited: float, steps: int) -> ServiceError:
    if failure.kind is FailureKind.CAPACITY:
        return CapacityBlocked(
            failure.text,
            what=what,
            failure=failure,
            final=True,
            waited_seconds=waited,
            steps_completed=steps,
        )
    return ServiceOutage(failure.text, what=what, failure=failure, final=True)
