"""The run directory without its tables: identity, ledger, gates, attempts, result, kept files."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from evidence.canonical import digest, loads_strict
from evidence.errors import ConflictError, InputError
from evidence.gate import GateResult
from evidence.lease import Clock, utc_now
from evidence.ledger import Ledger, Shared
from evidence.object_store import open_store
from evidence.store import Lock, Store, check_path, encode_segment

RESULT = "result.json"
IDENTITY = "identity.json"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_GATE_FILE = re.compile(r"gates/(?P<gate>[^/]+?)(?:\.(?P<number>[0-9]+))?\.json")


@dataclass
class _Writers:
    """What the writers of one run in this process share."""

    ledger: Shared = field(default_factory=Shared)
    lock: Lock | None = None


_WRITERS: dict[str, _Writers] = {}


class RunFiles:
    """Everything of a run directory that is not Parquet. Use it as `evidence.run.Run`."""

    def __init__(self, store: Store, *, clock: Clock = utc_now) -> None:
        self._store = store
        self._writers = _WRITERS.setdefault(store.url, _Writers())
        self._ledger = Ledger(store, clock=clock, token=self._token, shared=self._writers.ledger)
        self._clock = clock
        self.identity: Mapping[str, Any] = self.read_json(IDENTITY)
        self.spec: Mapping[str, Any] = self.read_json("spec.json")
        self.execution: Mapping[str, Any] | None = self._read_json_if_exists("execution.json")
        _check_identity(self.identity, self.spec, self.execution, where=store.url)

    @property
    def path(self) -> str:
        """The run directory, as `open` takes it."""
        return self._store.url

    @property
    def store(self) -> Store:
        """Where the files lie."""
        return self._store

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return str(self.identity["run_id"])

    @property
    def spec_sha256(self) -> str:
        """Digest of the spec this run belongs to."""
        return str(self.identity["spec_sha256"])

    @contextmanager
    def lock(self) -> Iterator[Lock]:
        """Hold the right to write to this run: one process at a time.

        A local directory uses a file lock that ends with the process; an object store uses a
        lease with a fencing token. Every write of this process then checks that it is still held.

        Raises:
            ConflictError: if another process holds it; the message names the holder.
        """
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "run_id": self.run_id}
        lock = self._store.acquire_lock({**holder, "since": self._clock().isoformat()})
        self._writers.lock = lock
        try:
            self._renew_view()
            yield lock
        finally:
            self._writers.lock = None
            lock.release()

    def lock_holder(self) -> dict[str, Any] | None:
        """Return who holds the lock (host, pid, since, token), or None."""
        return self._store.lock_holder()

    # ---- files ---------------------------------------------------------------------------------

    def read_bytes(self, path: str) -> bytes:
        """Return the bytes of a file of this run.

        Raises:
            InputError: if there is no such file, or the path leaves the run directory.
        """
        data = self._store.read_if_exists(path)
        if data is None:
            raise InputError(path, "no such file", "a file of this run", where=self.path)
        return data

    def write_bytes(self, path: str, data: bytes) -> str:
        """Write a file once. The same bytes again change nothing.

        Returns:
            The path.

        Raises:
            ConflictError: if the file exists with other bytes.
        """
        self._guard()
        if not self._store.write_new(path, data) and self.read_bytes(path) != data:
            expected = "the bytes it was first written with"
            raise ConflictError(path, "other bytes", expected, where=self.path)
        return path

    def read_json(self, path: str) -> Any:
        """Return the value of a JSON file of this run, read strictly.

        Raises:
            InputError: if there is no such file or it is not plain JSON.
        """
        return loads_strict(self.read_bytes(path), where=f"{self.path}/{path}")

    def write_json(self, path: str, value: Any) -> str:
        """Write a JSON file once. An equal value again changes nothing.

        Returns:
            The path.

        Raises:
            ConflictError: if the file exists with another value; both digests are named.
            InputError: if the value is not JSON (NaN, for instance).
        """
        self._guard()
        _write_json_once(self._store, path, value)
        return path

    def write_file(self, name: str, data: bytes) -> str:
        """Keep an evidence file under ``files/``. Names are immutable.

        Returns:
            Its path in the run directory.

        Raises:
            ConflictError: if the name is taken by other bytes.
        """
        return self.write_bytes(f"files/{check_path(name, where=self.path)}", data)

    def files(self, prefix: str = "") -> list[str]:
        """Return the paths of all files below a folder of the run, sorted."""
        return self._store.paths(prefix)

    # ---- ledger --------------------------------------------------------------------------------

    def append(self, event: str, **fields: Any) -> dict[str, Any]:
        """Add an event to the ledger and wait until it is on the disk.

        Returns:
            The event as written: ``{"n", "at", "event", "token", ...}``.
        """
        self._guard()
        return self._ledger.append(event, fields)

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return all events of the ledger, or those of one kind, oldest first."""
        return self._ledger.events(event)

    # ---- gates ---------------------------------------------------------------------------------

    def write_gate(self, result: GateResult) -> str:
        """Keep the record of a gate. A gate that is asked again gets a numbered new record.

        Returns:
            The path. If the newest record of the gate is equal, nothing is written.
        """
        record = result.to_record()
        known = self._gate_paths().get(result.gate, [])
        if known and digest(self.read_json(known[-1])) == digest(record):
            return known[-1]
        number = "" if not known else f".{len(known) + 1}"
        return self.write_json(
            f"gates/{encode_segment(result.gate, field='gate')}{number}.json", record
        )

    def gate(self, gate: str) -> GateResult | None:
        """Return the newest record of a gate, or None if it was never asked."""
        known = self._gate_paths().get(gate)
        return GateResult.from_record(self.read_json(known[-1])) if known else None

    def gate_records(self, gate: str) -> list[GateResult]:
        """Return every record of a gate, oldest first; empty if it was never asked."""
        paths = self._gate_paths().get(gate, [])
        return [GateResult.from_record(self.read_json(path)) for path in paths]

    def gates(self) -> dict[str, GateResult]:
        """Return the newest record of every gate, by name."""
        return {
            gate: GateResult.from_record(self.read_json(paths[-1]))
            for gate, paths in sorted(self._gate_paths().items())
        }

    def _gate_paths(self) -> dict[str, list[str]]:
        numbered: dict[str, list[tuple[int, str]]] = {}
        for path in self._store.paths("gates"):
            match = _GATE_FILE.fullmatch(path)
            if match:
                entry = (int(match["number"] or 1), path)
                numbered.setdefault(match["gate"], []).append(entry)
        return {gate: [path for _, path in sorted(found)] for gate, found in numbered.items()}

    # ---- result and attempts -------------------------------------------------------------------

    def result(self) -> dict[str, Any] | None:
        """Return the structured result as last posted, or None.

        The ledger tells it: the file is a view for readers from outside, which a process that was
        paused while it lost its lease may have put back to an earlier post.
        """
        posted = self.events("result")
        found = posted[-1]["result"] if posted else self._read_json_if_exists(RESULT)
        return None if found is None else dict(found)

    def replace_result(self, record: Mapping[str, Any]) -> None:
        """Post a structured result, replacing the last one as a whole.

        Each posted result is also an event of the ledger, so that it can be shown later what was
        known when. Use `evidence.result.StructuredResult`, which keeps the rules.
        """
        self._guard()
        with self._writers.ledger.mutex:
            if self.result() == record:
                return
            self._ledger.append("result", {"result": dict(record)})
            self._store.replace(RESULT, _pretty(record))

    def _renew_view(self) -> None:
        """Bring the file of the result up to the ledger: its last writer may have been cut off."""
        posted = self.result()
        if posted is not None and self._read_json_if_exists(RESULT) != posted:
            self._store.replace(RESULT, _pretty(posted))

    def posted_results(self) -> list[dict[str, Any]]:
        """Return every structured result that was posted, oldest first."""
        return [event["result"] for event in self.events("result")]

    @property
    def attempt(self) -> int:
        """Number of the current attempt, from 1: one more than the attempts that were closed."""
        return len(self.events("attempt_closed")) + 1

    def close_attempt(self, record: Mapping[str, Any]) -> int:
        """Keep the final record of the current attempt; the next one starts from all numbers.

        Closing an attempt again, before anything was posted since, changes nothing.

        Returns:
            The number of the attempt that was closed.
        """
        events = self.events()
        closed = [event for event in events if event["event"] == "attempt_closed"]
        posted = [event["n"] for event in events if event["event"] == "result"]
        if closed and closed[-1]["n"] > max(posted, default=0):
            number = int(closed[-1]["attempt"])  # closed already, perhaps before its file was kept
        else:
            number = self.attempt
            self.append("attempt_closed", attempt=number)
        self.write_json(f"attempts/{number}/{RESULT}", record)
        return number

    # ---- inside --------------------------------------------------------------------------------

    def _token(self) -> int:
        lock = self._writers.lock
        return lock.token if lock else 0

    def _guard(self) -> None:
        lock = self._writers.lock
        if lock:
            lock.check()

    def _read_json_if_exists(self, path: str) -> Any:
        data = self._store.read_if_exists(path)
        return None if data is None else loads_strict(data, where=f"{self.path}/{path}")


def create_run_files(
    root: str,
    *,
    run_id: str,
    spec: Mapping[str, Any],
    execution: Mapping[str, Any] | None,
    identity: Mapping[str, Any],
    **storage_options: Any,
) -> Store:
    """Create a run directory, or check that the one that is there is of the same run.

    Raises:
        ConflictError: if the directory belongs to another spec, execution file or identity.
        InputError: if the run id or a value cannot be used.
    """
    if not _RUN_ID.fullmatch(run_id):
        expected = "1 to 128 letters, digits, '.', '_' or '-', the first a letter or digit"
        raise InputError("run_id", run_id, expected)
    store = open_store(f"{root.rstrip('/')}/{run_id}", **storage_options)
    full = {
        "version": 1,
        "run_id": run_id,
        "spec_sha256": digest(spec),
        "execution_sha256": None if execution is None else digest(execution),
        **identity,
    }
    existing = store.read_if_exists(IDENTITY)
    if existing is not None:
        _same_identity(loads_strict(existing, where=f"{store.url}/{IDENTITY}"), full, store.url)
    _write_json_once(store, "spec.json", spec)
    if execution is not None:
        _write_json_once(store, "execution.json", execution)
    _write_json_once(store, IDENTITY, full)
    return store


def _same_identity(found: Mapping[str, Any], asked: Mapping[str, Any], where: str) -> None:
    for name in [*asked, *found]:
        if found.get(name) != asked.get(name):
            expected = f"{asked.get(name)!r}, as asked for; this directory is of another run"
            raise ConflictError(name, found.get(name), expected, where=where)


def _check_identity(identity: Any, spec: Any, execution: Any, *, where: str) -> None:
    if not isinstance(identity, Mapping) or not isinstance(spec, Mapping):
        raise InputError(IDENTITY, identity, "a JSON object, and one in spec.json", where=where)
    for name, value in (("spec_sha256", spec), ("execution_sha256", execution)):
        actual = None if value is None else digest(value)
        if identity.get(name) != actual:
            expected = f"{identity.get(name)!r}, as {IDENTITY} says; the file was changed"
            raise ConflictError(name, actual, expected, where=where)


def _write_json_once(store: Store, path: str, value: Any) -> None:
    new = digest(value)
    if store.write_new(path, _pretty(value)):
        return
    old = digest(loads_strict(store.read_if_exists(path) or b"", where=f"{store.url}/{path}"))
    if old != new:
        expected = f"{old}, as first written"
        raise ConflictError(path, f"a value with digest {new}", expected, where=store.url)


def _pretty(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")
