"""The files of a bundle, read without following anything out of its folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evidence.errors import InputError
from evidence.evidence_limits import MAX_FILE_BYTES, MAX_FILES, MAX_TOTAL_BYTES
from evidence.manifest import MANIFEST

_MAX_LISTED = 4 * MAX_FILES


@dataclass(frozen=True, slots=True)
class BundleFiles:
    """What lies in a bundle's folder.

    Attributes:
        where: the folder.
        data: bytes by name, for every plain file within the limits.
        problems: what else lies there: links, folders, files beyond the limits.
    """

    where: str
    data: Mapping[str, bytes]
    problems: tuple[str, ...] = ()


def read_bundle_files(path: str | Path) -> BundleFiles:
    """Read a bundle's folder, or the newest bundle of a run directory.

    A folder with a manifest is a bundle itself, whatever lies within it. Symbolic links are never
    followed, and nothing is read beyond the contract's limits.

    Raises:
        InputError: if there is no bundle at that path.
    """
    folder = _bundle_folder(Path(path))
    data: dict[str, bytes] = {}
    problems: list[str] = []
    total = 0
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)[:_MAX_LISTED]
    for entry in listed:
        try:
            found = _read(folder, entry, bytes_left=MAX_TOTAL_BYTES - total)
        except InputError as error:
            problems.append(f"{error.field}: {error.value}")
            continue
        data[entry.name] = found
        total += len(found)
    if len(listed) > MAX_FILES:
        problems.append(f"more than {MAX_FILES} files")
    return BundleFiles(str(folder), data, tuple(problems))


def _bundle_folder(path: Path) -> Path:
    expected = f"a bundle's folder (with {MANIFEST}), or the directory of a run that has one"
    try:
        if os.path.lexists(path / MANIFEST):
            return path
        sealed = []
        number = 1
        while (newer := path / ("bundle" if number == 1 else f"bundle-{number}")).is_dir():
            if (newer / MANIFEST).is_file() and not newer.is_symlink():
                sealed.append(newer)
            number += 1
    except (OSError, ValueError) as error:
        raise InputError("bundle", str(path), f"{expected} ({error})") from error
    if not sealed:
        raise InputError("bundle", str(path), expected)
    return sealed[-1]


def _read(folder: Path, entry: os.DirEntry[str], *, bytes_left: int) -> bytes:
    expected = "a plain file"
    info = entry.stat(follow_symlinks=False)
    if stat.S_ISLNK(info.st_mode):
        raise InputError(entry.name, "a symbolic link", expected)
    if not stat.S_ISREG(info.st_mode):
        raise InputError(entry.name, "not a plain file", expected)
    if info.st_size > MAX_FILE_BYTES:
        raise InputError(entry.name, f"{info.st_size} bytes, above the limit of a file", expected)
    if info.st_size > bytes_left:
        raise InputError(entry.name, "above the limit of a bundle", expected)
    try:
        fd = os.open(folder / entry.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(entry.name, error.strerror, expected) from error
