"""A run directory on a local disk: temporary file, sync, then one atomic rename or link."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evidence.errors import ConflictError, InputError
from evidence.store import check_path, write_error

_LOCK_NAME = ".lock"
_TEMPORARY = ".tmp-"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)


class Disk:
    """The operating-system calls of a write, one method each, so that each can be made to fail."""

    def create(self, path: Path) -> int:
        """Open a new file for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)

    def open_log(self, path: Path) -> int:
        """Open a log for reading and writing, creating it if needed."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)

    def write(self, fd: int, data: memoryview) -> int:
        """Write some bytes; return how many were taken."""
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        """Wait until the file is on the disk."""
        os.fsync(fd)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, which must be free."""
        os.link(source, target, follow_symlinks=False)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file over another one."""
        source.replace(target)


class LocalStore:
    """Files under a local folder.

    Two writers of one new path: exactly one wins, also across processes. Symbolic links below
    the root are refused, so that nothing is read or written outside it.
    """

    def __init__(self, root: Path, *, disk: Disk | None = None) -> None:
        self._root = root.absolute()
        self._disk = disk or Disk()
        self._whole_logs: dict[str, tuple[int, int]] = {}

    @property
    def url(self) -> str:
        """The folder."""
        return str(self._root)

    @property
    def refuses_taken_lines(self) -> bool:
        """False: a local log is a plain file, kept apart by the process lock."""
        return False

    @property
    def root(self) -> Path:
        """The folder."""
        return self._root

    def local_path(self, path: str) -> Path:
        """Return where a file of this store lies, after checking every segment on the way.

        Raises:
            InputError: if the path climbs out or passes through a symbolic link.
        """
        place = self._root
        for segment in check_path(path, where=self.url).split("/"):
            place = place / segment
            try:
                mode = place.lstat().st_mode
            except (FileNotFoundError, NotADirectoryError):
                continue
            if stat.S_ISLNK(mode):
                raise InputError("path", path, "no symbolic link on the way", where=self.url)
        return place

    def read_if_exists(self, path: str) -> bytes | None:
        """Return the bytes of a file, or None if there is no such file."""
        try:
            return self.local_path(path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(path, error.strerror, "a readable file", where=self.url) from error

    def exists(self, path: str) -> bool:
        """Whether there is a file of that path."""
        return self.local_path(path).is_file()

    def paths(self, prefix: str = "") -> list[str]:
        """Return the paths of all files below a folder, sorted; hidden ones are left out."""
        top = self.local_path(prefix) if prefix else self._root
        found: list[str] = []
        for folder, folders, files in os.walk(top):
            folders[:] = [name for name in folders if not name.startswith(".")]
            names = [name for name in files if not name.startswith(".")]
            place = Path(folder).relative_to(self._root)
            found.extend((place / name).as_posix() for name in names)
        return sorted(found)

    def write_new(self, path: str, data: bytes) -> bool:
        """Write a file unless one of that path exists.

        Returns:
            False if one exists; it is left as it is.
        """
        target = self.local_path(path)
        if target.exists():
            return False
        try:
            temporary = self._temporary(target, data)
            try:
                return self._publish_new(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise write_error(error, path, size=len(data), where=self.url) from error

    def replace(self, path: str, data: bytes) -> None:
        """Write a file, replacing what is there as a whole."""
        target = self.local_path(path)
        try:
            temporary = self._temporary(target, data)
            try:
                self._disk.rename(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
            self._sync_folder(target.parent)
        except OSError as error:
            raise write_error(error, path, size=len(data), where=self.url) from error

    def append_line(self, log: str, line: bytes, *, number: int) -> None:
        """Add one line to a log and wait until it is on the disk.

        A torn line that a crash left behind is cut off first. If the write fails, the log keeps
        its former length. The number is not checked here: the process lock keeps others out.
        """
        place = self.local_path(log)
        try:
            is_new = not place.exists()
            place.parent.mkdir(parents=True, exist_ok=True)
            fd = self._disk.open_log(place)
            try:
                end = _end_of_whole_lines(fd)
                os.ftruncate(fd, end)
                os.lseek(fd, end, os.SEEK_SET)
                self._append(fd, line + b"\n", end=end)
            finally:
                os.close(fd)
            if is_new:
                self._sync_folder(place.parent)
        except OSError as error:
            raise write_error(error, log, size=len(line) + 1, where=self.url) from error

    def read_lines(self, log: str, *, after: int = 0) -> list[bytes]:
        """Return the whole lines of a log from line number ``after`` on; a torn one is dropped."""
        place = self.local_path(log)
        try:
            length = place.stat().st_size
        except FileNotFoundError:
            return []
        if self._whole_logs.get(log) == (length, after):
            return []  # the log has not grown since it was last read to its end
        data = self.read_if_exists(log) or b""
        lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]
        if data.endswith(b"\n"):
            self._whole_logs[log] = (len(data), len(lines))
        return lines[after:]

    def acquire_lock(self, holder: Mapping[str, Any]) -> LocalLock:
        """Take the folder's lock; it ends with the process at the latest.

        Raises:
            ConflictError: if another process holds it; the message names the holder.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._root / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise write_error(error, _LOCK_NAME, size=0, where=self.url) from error
        if not lock_soon(fd):
            found = _read_holder(fd)
            os.close(fd)
            shown = ", ".join(f"{name} {value}" for name, value in sorted(found.items()))
            raise ConflictError("lock", shown, "no other process", where=self.url) from None
        token = int(_read_holder(fd).get("token", 0)) + 1
        try:
            _write_holder(fd, {**holder, "token": token})
            self._remove_temporaries()
        except BaseException:
            os.close(fd)
            raise
        return LocalLock(fd, token=token, where=self.url)

    def lock_holder(self) -> dict[str, Any] | None:
        """Return the facts of the holder, or None when nobody holds the lock."""
        try:
            fd = os.open(self._root / _LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _read_holder(fd)
        finally:
            os.close(fd)
        return None

    def _temporary(self, target: Path, data: bytes) -> Path:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        fd = self._disk.create(temporary)
        try:
            try:
                self._write_all(fd, data)
                self._disk.fsync(fd)
            finally:
                os.close(fd)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _publish_new(self, temporary: Path, target: Path) -> bool:
        try:
            self._disk.link(temporary, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if target.exists():  # a file system without hard links: the process lock must do
                return False
            self._disk.rename(temporary, target)
        self._sync_folder(target.parent)
        return True

    def _append(self, fd: int, data: bytes, *, end: int) -> None:
        try:
            self._write_all(fd, data)
            self._disk.fsync(fd)
        except OSError:
            os.ftruncate(fd, end)
            raise

    def _write_all(self, fd: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._disk.write(fd, rest) :]

    def _sync_folder(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY)
        try:
            self._disk.fsync(fd)
        finally:
            os.close(fd)

    def _remove_temporaries(self) -> None:
        for folder, _, files in os.walk(self._root):
            for name in files:
                if name.startswith(_TEMPORARY):
                    (Path(folder) / name).unlink(missing_ok=True)


class LocalLock:
    """A held file lock. The operating system drops it when the process ends."""

    def __init__(self, fd: int, *, token: int, where: str) -> None:
        self._fd: int | None = fd
        self._token = token
        self._where = where

    @property
    def token(self) -> int:
        """Grows with every holder."""
        return self._token

    def check(self) -> None:
        """Do nothing while the lock is held.

        Raises:
            ConflictError: after it was released.
        """
        if self._fd is None:
            raise ConflictError("lock", "released", "a lock that is held", where=self._where)

    def release(self) -> None:
        """Give the lock back. Releasing twice does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def lock_soon(fd: int) -> bool:
    """Take a lock, trying for a tenth of a second; whether it was had.

    Whoever asks if a lock is held, as `LocalStore.lock_holder` does, takes it for an instant.
    """
    for _ in range(5):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.02)
        else:
            return True
    return False


def _write_holder(fd: int, holder: Mapping[str, Any]) -> None:
    """Put a holder over the one before it, whose token is never missing at any instant.

    Were the file emptied first, a process killed in between would make tokens start again, and
    every later holder would take the ledger's lines for those of a holder after itself.
    """
    data = json.dumps(holder).encode()
    os.pwrite(fd, data, 0)
    os.fsync(fd)
    os.ftruncate(fd, len(data))


def _read_holder(fd: int) -> dict[str, Any]:
    text = os.pread(fd, 65536, 0).decode(errors="replace")
    try:
        found, _ = json.JSONDecoder().raw_decode(text)  # the end of a longer one may still follow
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _end_of_whole_lines(fd: int) -> int:
    """Return the length of the log up to and including its last line end."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - 65536)
        cut = os.pread(fd, end - start, start).rfind(b"\n")
        if cut >= 0:
            return start + cut + 1
        end = start
    return 0
