"""The ledger of a run: what was intended before it was sent, and what came back.

One JSON object a line, ``{"n", "at", "event", "token", ...}``: a count from 1, the time in UTC,
the kind of event, and the token of the lock under which it was written (0 without a lock).
A torn last line is what a crash leaves behind and is not read; any other flaw is an error.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from evidence.canonical import loads_strict
from evidence.errors import ConflictError, InputError
from evidence.lease import Clock
from evidence.store import Store

LEDGER = "ledger.jsonl"
_RESERVED = ("n", "at", "event", "token")
_TRIES = 50


class Shared:
    """What all ledgers of this process on the same store share."""

    def __init__(self) -> None:
        self.mutex = threading.RLock()
        self.lines = 0
        """Lines that this process knows to be there."""


class Ledger:
    """Appends events to a store's ledger and reads them.

    Args:
        store: where the ledger lies.
        clock: current time with zone.
        token: returns the token of the lock this process holds, or 0.
        shared: the same for all ledgers of this process on the same store.
    """

    def __init__(
        self, store: Store, *, clock: Clock, token: Callable[[], int], shared: Shared
    ) -> None:
        self._store = store
        self._clock = clock
        self._token = token
        self._shared, self._mutex = shared, shared.mutex
        self._events: list[dict[str, Any]] = []
        self._whole_under = 0  # token of the lock under which everything has been read

    def append(self, event: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Add an event and wait until it is on the disk.

        Returns:
            The event as written.

        Raises:
            InputError: if a field has a reserved name or is not JSON.
            ConflictError: if a process with a later lock has written to this run.
        """
        taken = [name for name in fields if name in _RESERVED]
        if taken:
            raise InputError(f"event {event}", taken[0], f"no field named {', '.join(_RESERVED)}")
        with self._mutex:
            if not self._is_whole():
                self._refresh()
                self._refuse_later_writer()
            for _ in range(_TRIES):
                record = self._record(event, fields)
                try:
                    self._store.append_line(LEDGER, _line(record), number=record["n"])
                except ConflictError:
                    self._refresh()
                    self._refuse_later_writer()
                    continue
                self._events.append(record)
                self._shared.lines = record["n"]
                return record
        raise ConflictError(LEDGER, "other writers", "at most one process", where=self._store.url)

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return all events, or those of one kind, oldest first.

        Raises:
            InputError: naming the line, if one of them is not a numbered event.
        """
        with self._mutex:
            if not self._is_whole():
                self._refresh()
            return [dict(found) for found in self._events if event in (None, found["event"])]

    def _record(self, event: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        head = {
            "n": len(self._events) + 1,
            "at": self._clock().isoformat(),
            "event": event,
            "token": self._token(),
        }
        return {**head, **fields}

    def _is_whole(self) -> bool:
        """Whether nothing can be missing: read under the lock that this process still holds.

        Only a store that refuses taken lines is trusted with it. If the lock was lost without our
        noticing, the next line is refused, and whatever was decided on old lines with it.
        """
        token = self._token()
        held = self._store.refuses_taken_lines and token > 0 and token == self._whole_under
        return held and len(self._events) >= self._shared.lines

    def _refresh(self) -> None:
        token, known = self._token(), len(self._events)
        for number, line in enumerate(self._store.read_lines(LEDGER, after=known), start=known + 1):
            where = f"{self._store.url}/{LEDGER} line {number}"
            record = loads_strict(line, where=where)
            if not isinstance(record, dict) or record.get("n") != number:
                raise InputError("n", record, f"an event numbered {number}", where=where)
            if not isinstance(record.get("event"), str):
                raise InputError("event", record.get("event"), "the event's name", where=where)
            self._events.append(record)
        self._whole_under = token

    def _refuse_later_writer(self) -> None:
        own = self._token()
        latest = max((found.get("token", 0) for found in self._events), default=0)
        if own and latest > own:
            found, expected = f"a line of lock {latest}", f"none later than our lock {own}"
            raise ConflictError(LEDGER, found, expected, where=self._store.url)


def _line(record: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(record, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        expected = f"fields that are JSON ({error})"
        raise InputError(f"event {record.get('event')}", record, expected) from error
    return text.encode("ascii")
