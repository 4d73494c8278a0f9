"""A run directory on an object store (S3, GCS, or memory) through fsspec.

Object stores have neither rename nor append, but they can refuse a write to a key that exists.
New files use that. A log is a folder of numbered objects, one line each, so two writers can never
both add line 17: the second one learns that it is no longer alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from evidence.errors import ConflictError, InputError, StoreError
from evidence.lease import Clock, Lease, acquire_lease, lease_holder, utc_now
from evidence.local_store import Disk, LocalStore
from evidence.store import Store, check_path

PROTOCOLS = ("memory", "s3", "s3a", "gs", "gcs")


class ObjectStore:
    """Files under one prefix of an fsspec file system that can create exclusively.

    Args:
        fs: the file system; one of `PROTOCOLS`.
        base: path of the prefix in it, without a protocol.
        url: the prefix as a person would write it.
        clock: current time with zone; leases are judged by it.
        lease_seconds: how long a lease lasts without a sign of life; `evidence.lease.lease_seconds`
            by default.
    """

    def __init__(
        self,
        fs: Any,
        base: str,
        *,
        url: str,
        clock: Clock = utc_now,
        lease_seconds: float | None = None,
    ) -> None:
        self._fs = fs
        self._base = base.rstrip("/")
        self._url = url
        self._clock = clock
        self._lease_seconds = lease_seconds

    @property
    def url(self) -> str:
        """The prefix."""
        return self._url

    @property
    def refuses_taken_lines(self) -> bool:
        """True: each line is an object that can be created once."""
        return True

    def read_if_exists(self, path: str) -> bytes | None:
        """Return the bytes of a file, or None if there is no such file."""
        with self._reaching(path):
            try:
                return bytes(self._fs.cat_file(self._full(path)))
            except FileNotFoundError:
                return None

    def exists(self, path: str) -> bool:
        """Whether there is a file of that path."""
        with self._reaching(path):
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._full(path)))

    def paths(self, prefix: str = "") -> list[str]:
        """Return the paths of all files below a folder, sorted."""
        top = self._full(prefix) if prefix else self._base
        with self._reaching(prefix):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(top)
            except FileNotFoundError:
                return []
        start = len(self._base) + 1
        return sorted(str(path)[start:] for path in found if str(path) != top)

    def write_new(self, path: str, data: bytes) -> bool:
        """Write a file unless one of that path exists.

        Returns:
            False if one exists; it is left as it is.
        """
        with self._reaching(path):
            try:
                self._fs.pipe_file(self._full(path), data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                if not _is_conflict(error):
                    raise
                return False
        return True

    def replace(self, path: str, data: bytes) -> None:
        """Write a file, replacing what is there as a whole."""
        with self._reaching(path):
            self._fs.pipe_file(self._full(path), data)

    def append_line(self, log: str, line: bytes, *, number: int) -> None:
        """Add line ``number`` to a log.

        Raises:
            ConflictError: if that line exists already and is another one.
        """
        path = _line_path(log, number)
        # A lost reply makes the client send the same line twice; its second try is refused.
        if not self.write_new(path, line + b"\n") and self.read_if_exists(path) != line + b"\n":
            expected = "no other process writing to this run"
            raise ConflictError(path, "a line of another process", expected, where=self.url)

    def read_lines(self, log: str, *, after: int = 0) -> list[bytes]:
        """Return the lines of a log from line number ``after`` on."""
        first = _line_path(log, after + 1)
        paths = [path for path in self.paths(_log_folder(log)) if path >= first]
        full = [self._full(path) for path in paths]
        with self._reaching(log):
            found = self._fs.cat(full) if full else {}
        by_path = {str(key): value for key, value in found.items()}
        lines: list[bytes] = []
        for number, path in enumerate(full, start=after + 1):
            if not path.endswith(_line_path(log, number)):
                expected = f"line {number} of the log, none missing"
                raise ConflictError(_line_path(log, number), path, expected, where=self.url)
            lines.append(bytes(by_path[path]).rstrip(b"\n"))
        return lines

    def acquire_lock(self, holder: Mapping[str, Any]) -> Lease:
        """Take the lease of this run and keep it alive in the background.

        Raises:
            ConflictError: if another process holds it; the message names the holder.
        """
        lease = acquire_lease(self, holder=holder, clock=self._clock, seconds=self._lease_seconds)
        lease.start()
        return lease

    def lock_holder(self) -> dict[str, Any] | None:
        """Return the facts of the holder, or None when nobody holds the lease."""
        return lease_holder(self, clock=self._clock)

    @contextmanager
    def _reaching(self, path: str) -> Iterator[None]:
        """Turn what a driver raises, each in its own classes, into one line."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            expected = "an object store that answers"
            raise StoreError(path or "/", reason, expected, where=self.url) from error

    def _full(self, path: str) -> str:
        return f"{self._base}/{check_path(path, where=self.url)}"


def open_store(url: str, *, disk: Disk | None = None, **storage_options: Any) -> Store:
    """Return the store for a folder path or an fsspec URL.

    Args:
        url: a local path, ``file://``, or an address of one of `PROTOCOLS`.
        disk: the operating-system calls of a local store, for tests.
        storage_options: settings of the fsspec file system (endpoint, region, profile).

    Raises:
        InputError: if the protocol is another one, or its driver is not installed.
    """
    protocol = get_protocol(url)
    if protocol in ("file", "local"):
        return LocalStore(Path(url.removeprefix("file://").removeprefix("local://")), disk=disk)
    if protocol not in PROTOCOLS:
        expected = f"a local path or one of {', '.join(f'{name}://' for name in PROTOCOLS)}"
        raise InputError("run directory", url, expected)
    try:
        fs, base = url_to_fs(url, **storage_options)
    except (ImportError, ValueError) as error:
        raise InputError("run directory", url, f"a store that can be opened ({error})") from error
    return ObjectStore(fs, base, url=url)


def _log_folder(log: str) -> str:
    return log.removesuffix(".jsonl")


def _line_path(log: str, number: int) -> str:
    return f"{_log_folder(log)}/{number:09d}.json"


def _is_conflict(error: BaseException) -> bool:
    """Whether a store's answer means "the key exists", however the client words it."""
    seen = f"{error} {error.__cause__}"
    return any(
        word in seen
        for word in ("PreconditionFailed", "ConditionalRequestConflict", "412", "conditionNotMet")
    )
