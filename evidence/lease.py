"""A lease with a fencing token, for stores that have no file locks.

Each holder creates the object of the next token, which only one can; the token of the newest
object names the holder. A holder that stops giving signs of life is passed over after its lease
ran out. It notices by itself, since it stops at its own deadline, which is earlier: the claimant
waits `skew_seconds` longer, the largest difference between two machines' clocks that is allowed.
The deadline is one of two clocks: the monotonic one stands still while a machine sleeps, and the
wall clock may be put back.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from evidence.canonical import canonical_bytes, loads_strict
from evidence.errors import ConflictError, InputError, StoreError

LEASE_SECONDS = 60.0
SKEW_SECONDS = 5.0
LEASE_VARIABLE = "GATED_RL_LEASE_SECONDS"
SKEW_VARIABLE = "GATED_RL_CLOCK_SKEW_SECONDS"
Clock = Callable[[], datetime]


def lease_seconds(environment: Mapping[str, str] | None = None) -> float:
    """Return how long a lease lasts without a sign of life: a minute, or what the variable says.

    The holder alone decides it; a claimant reads when the lease runs out.
    """
    return _seconds(environment, LEASE_VARIABLE, LEASE_SECONDS)


def skew_seconds(environment: Mapping[str, str] | None = None) -> float:
    """Return the largest difference between two machines' clocks: 5 s, or what the variable says."""
    return _seconds(environment, SKEW_VARIABLE, SKEW_SECONDS)


def _seconds(environment: Mapping[str, str] | None, name: str, default: float) -> float:
    text = (os.environ if environment is None else environment).get(name)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (seconds > 0.0 and math.isfinite(seconds)):
        raise InputError(name, text, "seconds above 0")
    return seconds


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


class LeaseFiles(Protocol):
    """What a lease needs of a store."""

    @property
    def url(self) -> str:
        """The root of the store."""
        ...

    def paths(self, prefix: str = "") -> list[str]:
        """Return the paths of all files below a folder, sorted."""
        ...

    def read_if_exists(self, path: str) -> bytes | None:
        """Return the bytes of a file, or None if there is no such file."""
        ...

    def write_new(self, path: str, data: bytes) -> bool:
        """Write a file unless one of that path exists; False if one exists."""
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Write a file as a whole."""
        ...


class Lease:
    """A held lease. `acquire_lease` makes one."""

    def __init__(
        self,
        files: LeaseFiles,
        *,
        token: int,
        holder: Mapping[str, Any],
        clock: Clock,
        lease_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._token = token
        self._holder = dict(holder)
        self._clock = clock
        self._seconds = lease_seconds
        self._monotonic = monotonic
        self._deadline = monotonic() + lease_seconds
        self._expires_at = self._next_expiry()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def token(self) -> int:
        """Grows with every holder."""
        return self._token

    def start(self) -> None:
        """Give signs of life from a background thread, three per lease time."""
        self._thread = threading.Thread(target=self._keep_alive, name="lease", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Give one sign of life.

        Raises:
            ConflictError: if the lease has run out and another process took it.
            StoreError: if it has run out, or the store does not answer.
        """
        self.check()
        sent, expires_at = self._monotonic(), self._next_expiry()
        self._files.replace(_path(self._token, "alive"), self._record(expires_at))
        self._deadline, self._expires_at = sent + self._seconds, expires_at

    def check(self) -> None:
        """Do nothing while the lease is held.

        Raises:
            ConflictError: once it was released, or has run out and another process took it.
            StoreError: once it has run out without another holder, or while nobody knows: the
                store was out of reach for too long, or this machine slept.
        """
        if self._stop.is_set():
            expected = "a lease that is held; another process may write now"
            raise ConflictError(
                "lease", f"token {self._token}, released", expected, where=self._url
            )
        if not self._ran_out:
            return
        found = f"token {self._token} ran out"
        if _newest_token(self._files) > self._token:
            expected = "a lease that is held; another process took it"
            raise ConflictError("lease", found, expected, where=self._url)
        expected = f"a sign of life that reaches the store every {self._seconds:.0f} s"
        raise StoreError("lease", found, expected, where=self._url)

    def release(self) -> None:
        """Give the lease back. Releasing twice does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._files.write_new(_path(self._token, "released"), canonical_bytes(self._holder))

    @property
    def _url(self) -> str:
        return self._files.url

    def record(self) -> bytes:
        """Return the first sign of life: who holds the lease, and until when."""
        return self._record(self._expires_at)

    def _record(self, expires_at: datetime) -> bytes:
        return canonical_bytes({"holder": self._holder, "expires_at": expires_at.isoformat()})

    def _next_expiry(self) -> datetime:
        return self._clock() + timedelta(seconds=self._seconds)

    @property
    def _ran_out(self) -> bool:
        return self._monotonic() >= self._deadline or self._clock() >= self._expires_at

    def _keep_alive(self) -> None:
        while not self._stop.wait(self._seconds / 3) and not self._ran_out:
            try:
                self.beat()
            except (OSError, InputError):
                continue  # the store is out of reach: try again until the deadline


def acquire_lease(
    files: LeaseFiles,
    *,
    holder: Mapping[str, Any],
    clock: Clock = utc_now,
    seconds: float | None = None,
    monotonic: Callable[[], float] = time.monotonic,
) -> Lease:
    """Take the lease of a store.

    Args:
        files: the store.
        holder: facts that name the holder, shown to others.
        clock: current time with zone.
        seconds: how long the lease lasts without a sign of life; `lease_seconds` by default.
        monotonic: a clock that never goes back, seconds.

    Raises:
        ConflictError: if another process holds it, or takes it at the same moment.
    """
    # Listed once: a claim that comes after the look at the holder then bars ours.
    newest = _newest_token(files)
    current = _holder_of(files, newest, clock=clock)
    if current is not None:
        raise _held(current, files.url)
    token = newest + 1
    lease = Lease(
        files,
        token=token,
        holder=holder,
        clock=clock,
        lease_seconds=lease_seconds() if seconds is None else seconds,
        monotonic=monotonic,
    )
    claim, path = lease.record(), _path(token, "claim")
    # A lost reply makes the client send the claim twice; its second try is refused.
    if not files.write_new(path, claim) and files.read_if_exists(path) != claim:
        raise _held({"token": token}, files.url)
    return lease


def lease_holder(files: LeaseFiles, *, clock: Clock = utc_now) -> dict[str, Any] | None:
    """Return the facts of the holder with its token, or None when nobody holds the lease."""
    return _holder_of(files, _newest_token(files), clock=clock)


def _holder_of(files: LeaseFiles, token: int, *, clock: Clock) -> dict[str, Any] | None:
    """Return the facts of a token's holder, or None if it does not hold the lease any more."""
    if token == 0 or files.read_if_exists(_path(token, "released")) is not None:
        return None
    data = files.read_if_exists(_path(token, "alive")) or files.read_if_exists(
        _path(token, "claim")
    )
    record = loads_strict(data or b"{}", where=f"{files.url}/{_path(token, 'alive')}")
    try:
        until = datetime.fromisoformat(record["expires_at"])
    except (KeyError, TypeError, ValueError):
        raise InputError("expires_at", record, "a time with zone", where=files.url) from None
    if clock() > until + timedelta(seconds=skew_seconds()):
        return None
    return {**record["holder"], "token": token}


def _held(holder: Mapping[str, Any], where: str) -> ConflictError:
    shown = ", ".join(f"{name} {value}" for name, value in sorted(holder.items()))
    return ConflictError("lease", shown, "no other process", where=where)


def _newest_token(files: LeaseFiles) -> int:
    tokens = [int(path.split("/")[1]) for path in files.paths("lease")]
    return max(tokens, default=0)


def _path(token: int, what: str) -> str:
    return f"lease/{token:09d}/{what}.json"
