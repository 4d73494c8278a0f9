"""Promises: what was asked for, whether it is done, and the answer for as long as it may be asked.

A request's id is derived from the ids the client sent, so that a request sent again finds the
promise of the first one and is not executed a second time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.local_service.errors import ApiError, conflict


@dataclass(frozen=True, slots=True)
class Outcome:
    """The final answer of a promise, as a poll returns it."""

    body: dict[str, Any] | None = None
    """JSON result; None if the result is protobuf."""
    proto: bytes | None = None
    """Protobuf result of sampling and of forward/backward."""
    status: int = 200
    """HTTP status of the poll; 200 for every outcome but an injected fault or a lost model."""


def failed(message: str, *, category: str) -> Outcome:
    """Return the outcome of a request that was accepted and could not be carried out.

    Args:
        message: why.
        category: ``user`` or ``server``.
    """
    return Outcome(body={"error": message, "category": category})


@dataclass(slots=True)
class Promise:
    """One accepted request."""

    request_id: str
    session_id: str
    """The session whose end drops this promise."""
    fingerprint: str
    """Digest of the operation and its content; another one under the same id is a conflict."""
    sequence_ids: tuple[str, ...] = ()
    """Ids of the sequences a sampling request will return."""
    outcome: Outcome | None = None
    finished_at: float | None = None
    """Monotonic seconds."""
    cancelled: bool = False
    event: asyncio.Event = field(default_factory=asyncio.Event)


class FutureTable:
    """All promises. Made and read on the event loop; resolved from any thread."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._promises: dict[str, Promise] = {}
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._closing = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say on which loop the polls wait."""
        self._loop = loop

    def find(self, request_id: str) -> Promise | None:
        """Return the promise of that id, if it is still kept."""
        return self._promises.get(request_id)

    def open(
        self,
        request_id: str,
        *,
        session_id: str,
        fingerprint: str,
        sequence_ids: Sequence[str] = (),
    ) -> tuple[Promise, bool]:
        """Return the promise of an id and whether it is new (and has to be executed).

        Raises:
            ApiError: 409 if the id stands for a different request.
        """
        promise = self._promises.get(request_id)
        if promise is None:
            promise = Promise(request_id, session_id, fingerprint, sequence_ids=tuple(sequence_ids))
            self._promises[request_id] = promise
            return promise, True
        if promise.fingerprint != fingerprint:
            raise conflict(f"request {request_id}: sent before with other content")
        return promise, False

    def forget(self, promise: Promise) -> None:
        """Drop a promise that was never queued, so that the same request may be sent again."""
        self._promises.pop(promise.request_id, None)

    def resolve(self, promise: Promise, outcome: Outcome) -> None:
        """Give a promise its outcome, from any thread; the first outcome stands."""
        with self._lock:
            if promise.outcome is not None:
                return
            promise.outcome = outcome
            promise.finished_at = self._clock()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(promise.event.set)

    async def wait(self, promise: Promise, *, seconds: float) -> Outcome | None:
        """Return the outcome, or None if there is none yet after so many seconds."""
        if promise.outcome is None and not self._closing:
            try:
                await asyncio.wait_for(promise.event.wait(), seconds)
            except TimeoutError:
                return None
        return promise.outcome

    def pending(self) -> int:
        """Count the promises without an outcome."""
        return sum(promise.outcome is None for promise in self._promises.values())

    def drop_session(self, session_id: str, *, error: ApiError) -> list[Promise]:
        """Forget a session's promises and wake whoever waits for them with an error.

        Returns:
            The promises that had no outcome yet; their work should be cancelled.
        """
        dropped = [p for p in self._promises.values() if p.session_id == session_id]
        for promise in dropped:
            del self._promises[promise.request_id]
        unfinished = [promise for promise in dropped if promise.outcome is None]
        for promise in unfinished:
            promise.cancelled = True
            self.resolve(promise, Outcome(body=error.body(), status=error.status))
        return unfinished

    def sweep(self, *, older_than_seconds: float) -> int:
        """Forget outcomes that have been there for longer; return how many."""
        horizon = self._clock() - older_than_seconds
        old = [
            request_id
            for request_id, promise in self._promises.items()
            if promise.finished_at is not None and promise.finished_at <= horizon
        ]
        for request_id in old:
            del self._promises[request_id]
        return len(old)

    def wake_all(self) -> None:
        """Let every waiting poll return now (the service is going down)."""
        self._closing = True
        for promise in self._promises.values():
            promise.event.set()
