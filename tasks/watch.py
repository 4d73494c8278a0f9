"""Wait for a call of the SDK without ever cancelling it, and notice early that nobody answers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from tasks.clock import Clock
from tasks.failures import Failure, FailureKind, ServiceOutage
from tasks.service_settings import Deadlines

T = TypeVar("T")


SLOW_SECONDS = 30.0
"""After so long without an answer a person is told, and again after so long."""


class Watch:
    """Bounds the wait for futures of the SDK.

    A future that is given up is left alone: cancelling a queued training request would block
    every later request of its client for ever. Whoever gives up drops the client.
    """

    def __init__(
        self, clock: Clock, deadlines: Deadlines, alive: Callable[[], Awaitable[bool]]
    ) -> None:
        self._clock, self._deadlines, self._alive = clock, deadlines, alive
        self._asked_at = -math.inf
        self._looked_at = clock.now()
        self._unreachable_since: float | None = None
        self._told_at = clock.now()
        self.on_slow: Callable[[str, float], None] | None = None
        """Told about a call that has no answer yet, and for how many seconds: what the client does
        about a refusal by itself is not to be seen otherwise."""

    async def settle(self, future: Future[T], seconds: float, what: str) -> T:
        """Return the future's result, or raise what it raised.

        Args:
            future: of the SDK, or of a thread.
            seconds: deadline.
            what: names the call in an error.

        Raises:
            TimeoutError: past the deadline.
            ServiceOutage: if the service has been out of reach for `watch_dead` seconds, during
                which it was looked for and answered no call.
        """
        done = _event_of(future)
        began = self._clock.now()
        deadline = began + seconds
        while not future.done():
            left = deadline - self._clock.now()
            if left <= 0:
                raise TimeoutError(f"no answer to {what} within {seconds:g} s")
            if await self._clock.wait(done, min(self._deadlines.watch_every, left)):
                break
            self._tell_slow(what, began)
            await self._look(what)
        result = future.result()
        self._unreachable_since = None  # it has just answered
        return result

    def _tell_slow(self, what: str, began: float) -> None:
        """Tell of one pending call every `SLOW_SECONDS`, however many there are."""
        now = self._clock.now()
        if now - max(began, self._told_at) >= SLOW_SECONDS:
            self._told_at = now
            if self.on_slow is not None:
                self.on_slow(what, now - began)

    async def _look(self, what: str) -> None:
        """Ask once per `watch_every` whether anything answers, for all pending calls together."""
        now, every = self._clock.now(), self._deadlines.watch_every
        if now - self._asked_at >= 0.9 * every:
            if now - max(self._asked_at, self._looked_at) > 2.0 * every:
                self._unreachable_since = None  # nobody has looked since: it may have been back
            self._asked_at = now
            if await self._alive():
                self._unreachable_since = None
            elif self._unreachable_since is None:
                self._unreachable_since = now
            self._looked_at = self._clock.now()
        since = self._unreachable_since
        if since is not None and self._clock.now() - since >= self._deadlines.watch_dead:
            text = f"the service has not answered for {self._clock.now() - since:.0f} s"
            failure = Failure(FailureKind.OUTAGE, text, may_have_happened=True)
            raise ServiceOutage(text, what=what, failure=failure)


def _event_of(future: Future[T]) -> asyncio.Event:
    """An event of the running loop that is set when the future is done."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    return done


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run blocking SDK work in a daemon thread, which never keeps the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
