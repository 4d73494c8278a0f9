"""Adapters that ship with the program: what a warm start gave, so that nobody has to repeat it.

An adapter is a folder with ``adapter.safetensors`` and ``adapter.json``. The record binds the
tensors to the base model that they were trained on, to the demonstrations, and to the command that
makes them.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import envs
from evidence.canonical import loads_strict, sha256_hex
from evidence.errors import InputError

FIELD = "warm_start.adapter"
TENSORS, RECORD = "adapter.safetensors", "adapter.json"
_FOLDER = "warm_start"


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter as it lies in its folder.

    Attributes:
        folder: where it lies.
        record: what ``adapter.json`` says.
        tensors: the bytes of ``adapter.safetensors``.
    """

    folder: Path
    record: Mapping[str, Any]
    tensors: bytes

    @property
    def adapter_sha256(self) -> str:
        """Digest of the adapter's float32 values and layout, as the embedded service reports it."""
        return str(self.record["adapter_sha256"])

    @property
    def base_sha256(self) -> str:
        """Digest of the base model that the adapter belongs to."""
        return str(self.record["base_sha256"])

    def to_request(self) -> dict[str, Any]:
        """What the embedded service is sent to take the adapter in."""
        names = ("base_model", "base_sha256", "lora_config", "adapter_sha256")
        return {name: self.record[name] for name in names} | {
            "safetensors": base64.b64encode(self.tensors).decode("ascii")
        }


def shipped_adapters() -> dict[str, Path]:
    """Name to folder of every adapter that ships with the program."""
    packages = (Path(root) for root in envs.__path__)
    records = (path for root in packages for path in sorted(root.glob(f"*/{_FOLDER}/{RECORD}")))
    return {path.parent.parent.name: path.parent for path in records}


def find_adapter(name: str, *, sha256: str | None) -> AdapterFiles:
    """Read a shipped adapter by name, or one in a folder.

    Args:
        name: name of a shipped adapter, or a folder.
        sha256: digest that the execution file gives; None where it gives none.

    Raises:
        InputError: if there is none, its files do not belong together, or it is not the one that
            the execution file names.
    """
    shipped = shipped_adapters()
    folder = shipped.get(name, Path(name))
    if not (folder / RECORD).is_file() or not (folder / TENSORS).is_file():
        known = ", ".join(shipped) or "none"
        raise InputError(FIELD, name, f"a folder with {RECORD} and {TENSORS}, or one of: {known}")
    record = _read_record(folder / RECORD)
    tensors = (folder / TENSORS).read_bytes()
    _expect("file_sha256", sha256_hex(tensors), record["file_sha256"], folder)
    if sha256 is not None:
        _expect("warm_start.adapter_sha256", sha256, record["adapter_sha256"], folder)
    return AdapterFiles(folder=folder, record=record, tensors=tensors)


def _read_record(path: Path) -> Mapping[str, Any]:
    record = loads_strict(path.read_bytes(), where=str(path))
    needed = {
        *("base_model", "base_sha256", "lora_config", "adapter_sha256"),
        *("file_sha256", "demonstrations_sha256"),
    }
    missing = sorted(needed - set(record)) if isinstance(record, dict) else sorted(needed)
    if missing:
        raise InputError(missing[0], None, "a value in the adapter's record", where=str(path))
    found: dict[str, Any] = record
    return found


def _expect(field: str, found: object, expected: object, folder: Path) -> None:
    if found != expected:
        raise InputError(
            field, found, f"{expected}, as the adapter's record says", where=str(folder)
        )
