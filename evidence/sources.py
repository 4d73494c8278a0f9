"""The program itself as evidence: its source files in readable packs, and which revision it is."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.canonical import digest, sha256_hex
from evidence.errors import InputError

PACKAGES = ("flows", "tasks", "losses", "envs", "evidence", "deploy")
ROOT = Path(__file__).resolve().parents[1]
_DEPENDENCIES = (
    *("prefect", "tinker", "tinker-cookbook", "torch", "transformers", "datasets"),
    *("pyarrow", "numpy", "scipy", "pydantic", "fsspec"),
)
_HEAD = re.compile(
    rb"# ---- file (?P<path>[^\n]+), (?P<size>[0-9]+) bytes, sha256 ([0-9a-f]{64})\n"
)
_Git = Callable[[Sequence[str]], bytes | None]


@dataclass(frozen=True, slots=True)
class Revision:
    """Which code ran.

    Attributes:
        record: package version, git commit and whether it was changed, digest of all sources,
            versions of what they build on.
        patch: what the working tree changes against the commit, None if nothing or unknown.
    """

    record: Mapping[str, Any]
    patch: bytes | None


def read_sources(root: Path = ROOT) -> dict[str, bytes]:
    """Return the program's source files by path, read once."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }


def source_packs(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return one readable pack of source files for each package, by package name.

    A pack is text: before each file stands a line with its path, length and SHA-256.
    """
    packs: dict[str, bytes] = {}
    for path, data in files.items():
        head = f"# ---- file {path}, {len(data)} bytes, sha256 {sha256_hex(data)}\n"
        package = path.partition("/")[0]
        packs[package] = packs.get(package, b"") + head.encode() + data + b"\n"
    return packs


def unpack_sources(pack: bytes, *, where: str | None = None) -> dict[str, bytes]:
    """Return the files of a pack by path.

    Raises:
        InputError: if a file's length or hash is not what its line says.
    """
    found: dict[str, bytes] = {}
    at = 0
    while at < len(pack):
        head = _HEAD.match(pack, at)
        if head is None:
            raise InputError(f"byte {at}", pack[at : at + 20], "the line of a file", where=where)
        data = pack[head.end() : head.end() + int(head["size"])]
        path = head["path"].decode("utf-8", errors="replace")
        if sha256_hex(data).encode() != head[3]:
            raise InputError(path, sha256_hex(data), f"sha256 {head[3].decode()}", where=where)
        found[path] = data
        at = head.end() + int(head["size"]) + 1
    return found


def revision(files: Mapping[str, bytes], *, root: Path = ROOT, git: _Git | None = None) -> Revision:
    """Say which code runs: the git commit where there is one, else the package's version.

    Args:
        files: the program's source files by path.
        root: folder of the packages.
        git: runs git with arguments and returns its output, None if that failed; for tests.
    """
    run_git = git or _git_in(root)
    is_tracked = run_git(["ls-files", "--error-unmatch", "evidence/sources.py"]) is not None
    commit = run_git(["rev-parse", "HEAD"]) if is_tracked else None
    diff = run_git(["diff", "HEAD", "--no-ext-diff", "--", *PACKAGES]) if commit else None
    record = {
        "version": 1,
        "package": "gated-rl",
        "package_version": installed_version(),
        "git_commit": commit.decode().strip() if commit else None,
        "git_dirty": bool(diff) if diff is not None else None,
        "source_sha256": source_digest(files),
        "python": platform.python_version(),
        "dependencies": {name: installed_version(name) for name in _DEPENDENCIES},
    }
    return Revision(record, diff or None)


def source_digest(files: Mapping[str, bytes]) -> str:
    """Return one digest over the paths and bytes of source files."""
    return digest({path: sha256_hex(data) for path, data in files.items()})


def installed_version(name: str = "gated-rl") -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_in(root: Path) -> _Git:
    program = shutil.which("git")

    def run(arguments: Sequence[str]) -> bytes | None:
        if program is None:
            return None
        try:
            done = subprocess.run(
                [program, "--no-optional-locks", "-C", str(root), *arguments],
                capture_output=True,
                check=False,
                timeout=30,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    return run
