"""Read the small files that people hand over: specs, records, evidence files."""

from pathlib import Path
from typing import Any

from evidence.canonical import loads_strict
from evidence.errors import InputError

MAX_RECORD_BYTES = 64 * 1024 * 1024
MAX_FILE_BYTES = 10 * 1024 * 1024


def read_bytes(path: Path, *, field: str, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Read a file of bounded size.

    Raises:
        InputError: if it is missing, is no regular file, cannot be read, or is too large.
    """
    try:
        if not path.is_file():
            raise InputError(field, str(path), "a readable file")
        size = path.stat().st_size
        if size > max_bytes:
            raise InputError(
                field, f"{path} ({size} bytes)", f"a file of at most {max_bytes} bytes"
            )
        return path.read_bytes()
    except (PermissionError, ValueError) as error:
        # ValueError: a NUL or a lone surrogate in the name itself.
        if isinstance(error, InputError):
            raise
        raise InputError(field, str(path), "a readable file") from error


def read_json(path: Path, *, field: str) -> Any:
    """Read one strict JSON document (no duplicate keys, no NaN, bounded depth).

    Raises:
        InputError: naming the file and what is wrong with it.
    """
    return loads_strict(read_bytes(path, field=field), where=str(path))


def read_folder(folder: Path, *, field: str) -> dict[str, bytes]:
    """Read the regular files directly inside a folder; links are not followed.

    Raises:
        InputError: if it is no folder, or a file in it is larger than 10 MiB.
    """
    if not folder.is_dir():
        raise InputError(field, str(folder), "a folder with the run's evidence files")
    return {
        path.name: read_bytes(path, field=field, max_bytes=MAX_FILE_BYTES)
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.is_symlink()
    }
