"""Files that survive a kill: atomic documents, synced append-only logs, and the store's lock."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self


def sync_directory(folder: Path) -> None:
    """Force a folder's entries (new names, renames, removals) to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Force every file below a folder, and the folders themselves, to disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(Path(root) / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(root))


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a JSON document so that a reader sees the old bytes or the new ones, never a part.

    Raises:
        OSError: if the disk refuses; the old document is intact then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(document, sort_keys=True, allow_nan=False).encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def read_document(path: Path) -> dict[str, Any] | None:
    """Return a JSON document, or None if it is not there."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError(f"{path.name}: a {type(document).__name__}, expected a JSON object")
    return document


def _whole_lines(data: bytes) -> bytes:
    """Drop the last line if a kill cut it short (a record always ends in a newline)."""
    return data[: data.rfind(b"\n") + 1]


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a log in order; a line cut short by a kill is not a record."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for line in _whole_lines(data).splitlines():
        yield json.loads(line)


class AppendLog:
    """A JSON-lines file whose records are on disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        created = not path.exists()
        self._stream = path.open("ab")
        if created:
            sync_directory(path.parent)
        else:
            self._cut_torn_line(path)

    def _cut_torn_line(self, path: Path) -> None:
        # The next record would otherwise be glued to half a record and be lost with it.
        data = path.read_bytes()
        whole = len(_whole_lines(data))
        if whole != len(data):
            self._stream.truncate(whole)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and force it to disk.

        Raises:
            OSError: if the disk refuses; the record then counts as not written.
        """
        start = self._stream.seek(0, os.SEEK_END)
        try:
            self._stream.write(json.dumps(record, sort_keys=True, allow_nan=False).encode() + b"\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError:
            self._stream.truncate(start)
            raise

    def close(self) -> None:
        """Release the file."""
        self._stream.close()


class StoreLock:
    """One process per store folder, by a lock that the system releases on any kind of exit."""

    def __init__(self, folder: Path, *, wait_seconds: float) -> None:
        """Take the lock.

        Args:
            folder: the store; made if missing.
            wait_seconds: how long a service that is going down may still hold it.

        Raises:
            TimeoutError: if another service keeps the store.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._stream = (folder / "service.lock").open("a+")
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    self._stream.close()
                    raise TimeoutError(
                        f"store {folder}: held by another service for {wait_seconds:g} s, "
                        "expected a store of its own"
                    ) from None
                time.sleep(0.05)
            else:
                return

    def release(self) -> None:
        """Give the store up."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
