"""Where a run directory lies: a local folder or an object store, behind one small interface.

A store keeps files that are written once, one file that is replaced as a whole, and logs of lines
that are only added to. Paths are relative, with `/` between segments, and can never leave the
root. Every write is atomic: after a crash at any instant a file has its old content or its new
content, and a log ends in whole lines plus at most one torn one, which is not read.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import quote, unquote

from evidence.errors import InputError

_MAX_SEGMENT_BYTES = 200
_SAFE = "".join(chr(code) for code in range(33, 127) if chr(code) not in '"%*/:<>?\\|')
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Lock(Protocol):
    """The right to write, held by one process at a time."""

    @property
    def token(self) -> int:
        """Grows with every holder: a later holder has a larger token."""
        ...

    def check(self) -> None:
        """Do nothing while the lock is held.

        Raises:
            ConflictError: if it is not held any more.
        """
        ...

    def release(self) -> None:
        """Give the lock back. Releasing twice does nothing."""
        ...


class Store(Protocol):
    """Files under one root."""

    @property
    def url(self) -> str:
        """The root, as a person would write it."""
        ...

    @property
    def refuses_taken_lines(self) -> bool:
        """Whether `append_line` checks its number, so that nobody needs to look beforehand."""
        ...

    def read_if_exists(self, path: str) -> bytes | None:
        """Return the bytes of a file, or None if there is no such file."""
        ...

    def exists(self, path: str) -> bool:
        """Whether there is a file of that path."""
        ...

    def paths(self, prefix: str = "") -> list[str]:
        """Return the paths of all files below a folder, sorted."""
        ...

    def write_new(self, path: str, data: bytes) -> bool:
        """Write a file unless one of that path exists.

        Returns:
            False if one exists; it is left as it is.
        """
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Write a file, replacing what is there as a whole."""
        ...

    def append_line(self, log: str, line: bytes, *, number: int) -> None:
        """Add one line to a log and wait until it is on the disk.

        Args:
            log: path of the log.
            line: without a line end.
            number: count of lines including this one; used where a store can check it.

        Raises:
            ConflictError: if another process added a line in the meantime.
        """
        ...

    def read_lines(self, log: str, *, after: int = 0) -> list[bytes]:
        """Return the whole lines of a log from line number ``after`` on; a torn one is dropped."""
        ...

    def acquire_lock(self, holder: Mapping[str, Any]) -> Lock:
        """Take the store's lock.

        Args:
            holder: facts that name the holder, shown to others.

        Raises:
            ConflictError: if another process holds it; the message names the holder.
        """
        ...

    def lock_holder(self) -> dict[str, Any] | None:
        """Return the facts of the holder, or None when nobody holds the lock."""
        ...


def check_path(path: str, *, where: str | None = None) -> str:
    """Return the path if it is relative and stays below its root.

    Raises:
        InputError: if it is absolute, empty, climbs out, names a hidden file, or holds
            backslashes or control characters.
    """
    expected = "a relative path of plain segments, none of them hidden, '.' or '..'"
    if not path or len(path) > 1000 or "\\" in path or not path.isprintable():
        raise InputError("path", path, expected, where=where)
    for segment in path.split("/"):
        if not segment or segment.startswith(".") or len(segment.encode()) > 255:
            raise InputError("path", path, expected, where=where)
    return path


def encode_segment(value: str | int, *, field: str) -> str:
    """Return a reversible path segment for one key value.

    Whole numbers get six digits (so that names sort as numbers); text keeps its safe characters
    and percent-encodes all others, a leading dot, and a first character that would make the text
    read as a number.

    Raises:
        InputError: if the value is empty, negative, of another type or too long for a file name.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise InputError(field, value, "a whole number of at least 0")
        return f"{value:06d}"
    if not isinstance(value, str) or not value:
        raise InputError(field, value, "text that is not empty, or a whole number")
    segment = quote(value, safe=_SAFE, errors="surrogatepass")
    if segment[0] == "." or segment[0].isdigit():
        segment = f"%{ord(segment[0]):02X}{segment[1:]}"
    if len(segment) > _MAX_SEGMENT_BYTES:
        raise InputError(field, value, f"at most {_MAX_SEGMENT_BYTES} bytes when encoded")
    return segment


def decode_segment(segment: str) -> str | int:
    """Return the key value that `encode_segment` wrote."""
    if segment.isdigit():
        return int(segment)
    return unquote(segment, errors="surrogatepass")


def write_error(error: OSError, path: str, *, size: int, where: str) -> InputError:
    """Return the one-line error for a write that the operating system refused."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in _DISK_FULL:
        expected = f"a disk with room for {size} more bytes (earlier files are intact)"
    else:
        expected = "a file that can be written"
    return InputError(path, reason, expected, where=where)
