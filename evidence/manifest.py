"""What a bundle holds: names, kinds, sizes and hashes, and the rule by which files are fitted in.

A bundle is a flat folder of immutable files within the contract's limits. ``RULE`` says what
happens to whatever is larger.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evidence.canonical import loads_strict, sha256_hex
from evidence.errors import InputError
from evidence.evidence_limits import (
    MAX_FILE_BYTES,
    MAX_FILES,
    MAX_TOTAL_BYTES,
    name_problem,
)
from evidence.ledger import LEDGER
from evidence.values import as_mapping, is_count, is_sha256, is_text

MANIFEST = "manifest.json"
STATEMENT = "verdict.intoto.json"
CRATE = "ro-crate-metadata.json"
UNLISTED = (MANIFEST, STATEMENT)
"""Files that the manifest cannot list: itself, and the statement that names its hash."""

KINDS = (
    *("spec", "execution", "identity", "effective_config", "code_revision", "code_patch"),
    *("result", "decision", "evaluator", "gate", "checkpoints", "crate"),
    *("metrics", "predictions", "generated_tasks", "script", "artifact", "journal"),
)
"""Kinds of files, in the order in which they are fitted in."""

RULE = (
    f"At most {MAX_FILE_BYTES} bytes a file, {MAX_FILES} files and {MAX_TOTAL_BYTES} bytes in all. "
    "Files are fitted in by kind, in the order of `kinds`, then by name; the ledger comes before "
    "all artifacts, and the records of attempts come last, the newest first. JSON Lines above the "
    "limit of a file are split at line ends into numbered parts. What does not fit is left out "
    "and listed under `omitted` with size, rows and SHA-256; it stays in the run directory."
)
_ATTEMPT = re.compile(r"attempt-(?P<number>[0-9]{1,9})\.json")
_RESERVED_FILES = len((*UNLISTED, CRATE))
"""Files that are made of those that were fitted in."""
_RESERVED_BYTES = 192 * 1024
_RESERVED_BYTES_EACH = 1024
"""For what manifest and crate say of one offered file."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file offered to a bundle."""

    name: str
    kind: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a bundle, as its manifest lists it.

    Attributes:
        name: file name, never a path.
        kind: one of `KINDS`.
        sha256: of its bytes.
        size: in bytes.
        rows: lines of a JSON Lines file, else None.
        part_of: for a part, the name and SHA-256 of the whole file and which part it is.
    """

    name: str
    kind: str
    sha256: str
    size: int
    rows: int | None = None
    part_of: Mapping[str, Any] | None = None

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object; ``rows`` and ``part_of`` only where there is one."""
        record: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "sha256": self.sha256,
            "size": self.size,
        }
        if self.rows is not None:
            record["rows"] = self.rows
        if self.part_of is not None:
            record["part_of"] = dict(self.part_of)
        return record


@dataclass(frozen=True, slots=True)
class Fitted:
    """What of the offered files goes into a bundle.

    Attributes:
        files: entries with their bytes, in the order of the rule.
        omitted: entries of files that are left out, and why.
    """

    files: tuple[tuple[Entry, bytes], ...]
    omitted: tuple[tuple[Entry, str], ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest that was read and has the right form."""

    record: Mapping[str, Any]
    entries: tuple[Entry, ...]

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return str(self.record["run_id"])


def fit(candidates: Iterable[Candidate]) -> Fitted:
    """Choose what goes into a bundle, by `RULE`.

    Raises:
        InputError: if two files have one name, or a name or kind cannot be used.
    """
    ordered = sorted(candidates, key=_rank)
    _refuse_names(ordered)
    files: list[tuple[Entry, bytes]] = []
    omitted: list[tuple[Entry, str]] = []
    reserved = _RESERVED_BYTES + _RESERVED_BYTES_EACH * max(MAX_FILES, len(ordered))
    bytes_left = MAX_TOTAL_BYTES - reserved
    for candidate in ordered:
        pieces = _pieces(candidate)
        size = sum(entry.size for entry, _ in pieces)
        whole = _entry(candidate.name, candidate.kind, candidate.data)
        if any(entry.size > MAX_FILE_BYTES for entry, _ in pieces):
            omitted.append((whole, "larger than a file may be, and no JSON Lines to split"))
        elif size > bytes_left:
            omitted.append((whole, "the bundle has no room for its bytes"))
        elif len(files) + len(pieces) > MAX_FILES - _RESERVED_FILES:
            omitted.append((whole, "the bundle has no room for another file"))
        else:
            files += pieces
            bytes_left -= size
    return Fitted(tuple(files), tuple(omitted))


def split_lines(data: bytes, *, limit: int) -> list[bytes]:
    """Cut JSON Lines at line ends into as few parts of at most ``limit`` bytes as possible.

    A single line above the limit stays a part of its own.
    """
    parts: list[bytes] = []
    start = 0
    while len(data) - start > limit:
        cut = data.rfind(b"\n", start, start + limit) + 1
        if cut <= start:
            cut = data.find(b"\n", start) + 1 or len(data)
        parts.append(data[start:cut])
        start = cut
    if start < len(data) or not parts:
        parts.append(data[start:])
    return parts


def whole_file(
    name: str, files: Mapping[str, bytes], entries: Iterable[Entry], *, where: str | None = MANIFEST
) -> bytes | None:
    """Return a file's bytes, put together from its parts; None if neither is there.

    Args:
        name: of the whole file.
        files: bytes by name.
        entries: those of the manifest.
        where: the file that names the parts, for messages.

    Raises:
        InputError: if a part is missing, or the parts do not give the whole.
    """
    if name in files:
        return files[name]
    parts = [
        (one.part_of["part"], one) for one in entries if one.part_of and one.part_of["name"] == name
    ]
    if not parts:
        return None
    for _, entry in parts:
        if entry.name not in files:
            raise InputError(entry.name, "missing", "a file of the bundle", where=where)
    data = b"".join(files[entry.name] for _, entry in sorted(parts, key=lambda part: part[0]))
    if sha256_hex(data) != as_mapping(parts[0][1].part_of)["sha256"]:
        raise InputError(name, "other bytes", "parts that give the whole file", where=where)
    return data


def read_manifest(data: bytes, *, where: str | None = None) -> Manifest:
    """Read a manifest strictly.

    Raises:
        InputError: naming the field that is missing or has another form.
    """
    record = loads_strict(data, where=where)
    if not isinstance(record, Mapping) or record.get("version") != 1:
        raise InputError("manifest.version", as_mapping(record).get("version"), "1", where=where)
    for name in ("run_id", "spec_sha256"):
        if not is_text(record.get(name)):
            raise InputError(f"manifest.{name}", record.get(name), "text", where=where)
    listed = record.get("files")
    if not isinstance(listed, list):
        raise InputError("manifest.files", listed, "a list", where=where)
    entries = tuple(_read_entry(entry, index, where) for index, entry in enumerate(listed))
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        raise InputError("manifest.files", len(names), "each name once", where=where)
    return Manifest(record, entries)


def _read_entry(value: object, index: int, where: str | None) -> Entry:
    found = as_mapping(value)
    name, kind = found.get("name"), found.get("kind")
    sha256, size, rows = found.get("sha256"), found.get("size"), found.get("rows")
    place = f"manifest.files[{index}]"
    if not isinstance(name, str) or name_problem(name) is not None or name in UNLISTED:
        raise InputError(f"{place}.name", name, "a plain file name", where=where)
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"{place}.kind", kind, f"one of {', '.join(KINDS)}", where=where)
    if not is_sha256(sha256):
        raise InputError(f"{place}.sha256", sha256, "64 hexadecimal digits", where=where)
    if not is_count(size):
        raise InputError(f"{place}.size", size, "a whole number", where=where)
    if rows is not None and not is_count(rows):
        raise InputError(f"{place}.rows", rows, "a whole number", where=where)
    return Entry(name, kind, sha256, size, rows, _read_part(found.get("part_of"), place, where))


def _read_part(value: object, place: str, where: str | None) -> Mapping[str, Any] | None:
    if value is None:
        return None
    found = as_mapping(value)
    if not is_text(found.get("name")) or not is_sha256(found.get("sha256")):
        expected = "the name and SHA-256 of the whole file"
        raise InputError(f"{place}.part_of", value, expected, where=where)
    for field in ("part", "parts"):
        if not is_count(found.get(field)):
            raise InputError(
                f"{place}.part_of.{field}", found.get(field), "a whole number", where=where
            )
    return found


def _rank(candidate: Candidate) -> tuple[int, int, str]:
    """Return the place in the order of `RULE`: kind, age, name."""
    if candidate.kind not in KINDS:
        raise InputError(f"kind of {candidate.name}", candidate.kind, f"one of {', '.join(KINDS)}")
    kind = KINDS.index(candidate.kind)
    if candidate.name == LEDGER:
        return KINDS.index("artifact"), -1, candidate.name
    attempt = _ATTEMPT.fullmatch(candidate.name) if candidate.kind == "journal" else None
    if attempt is not None:
        return len(KINDS), -int(attempt["number"]), candidate.name
    return kind, 0, candidate.name


def _refuse_names(candidates: Sequence[Candidate]) -> None:
    seen: set[str] = set(UNLISTED)
    for candidate in candidates:
        problem = name_problem(candidate.name)
        if problem is not None:
            raise InputError("file name", candidate.name, problem)
        if candidate.name.lower() in seen:
            raise InputError("file name", candidate.name, "each name once, whatever its case")
        seen.add(candidate.name.lower())


def _pieces(candidate: Candidate) -> list[tuple[Entry, bytes]]:
    """Return a file, or the parts of one that is too large."""
    data = candidate.data
    if len(data) <= MAX_FILE_BYTES or not candidate.name.endswith(".jsonl"):
        return [(_entry(candidate.name, candidate.kind, data), data)]
    parts = split_lines(data, limit=MAX_FILE_BYTES)
    whole = {"name": candidate.name, "sha256": sha256_hex(data), "parts": len(parts)}
    stem = candidate.name.removesuffix(".jsonl")
    return [
        (
            _entry(
                f"{stem}.part-{number:02d}-of-{len(parts):02d}.jsonl",
                candidate.kind,
                part,
                part_of={**whole, "part": number},
            ),
            part,
        )
        for number, part in enumerate(parts, start=1)
    ]


def _entry(name: str, kind: str, data: bytes, *, part_of: Mapping[str, Any] | None = None) -> Entry:
    rows = data.count(b"\n") if name.endswith(".jsonl") else None
    return Entry(name, kind, sha256_hex(data), len(data), rows, part_of)
