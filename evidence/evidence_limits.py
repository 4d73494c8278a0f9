"""Which evidence files are kept: size and number, immutable names, hashes, and no secrets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from evidence.canonical import sha256_hex
from evidence.secret_scan import scan_bytes
from evidence.values import as_list, as_mapping, is_count, is_sha256, is_text, show

MIB = 1024 * 1024
MAX_FILE_BYTES = 10 * MIB
MAX_FILES = 64
MAX_TOTAL_BYTES = 40 * MIB
MAX_NAME_BYTES = 255

_ENV_FILE = re.compile(r"^\.env|\.env(?:$|\.)", re.IGNORECASE)
_FORBIDDEN_IN_NAME = re.compile(r'[\x00-\x1f\x7f/\\:<>"|?*\ud800-\udfff]')
_ATTACHMENTS = "/attachments/"

FileStatus = Literal["kept", "unchanged", "refused"]
Scanner = Callable[[str, bytes], list[str]]
"""Returns what is secret in a named file, one line each; empty if nothing is."""


@dataclass(frozen=True, slots=True)
class FileDecision:
    """What happens to one offered file.

    Attributes:
        name: as offered.
        status: ``kept`` (new), ``unchanged`` (kept before with the same bytes) or ``refused``.
        sha256: of the bytes, None where there are none at hand.
        size: bytes that count against the limits.
        reason: why it was refused, else None.
    """

    name: str
    status: FileStatus
    sha256: str | None = None
    size: int = 0
    reason: str | None = None

    @property
    def accepted(self) -> bool:
        """Whether the file is part of the evidence."""
        return self.status != "refused"

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "name": self.name,
            "status": self.status,
            "sha256": self.sha256,
            "size": self.size,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class EvidenceResult:
    """The answer to an offer of evidence.

    Attributes:
        files: one decision for each offered file, in order.
        issues: what is wrong with the offer besides its files.
    """

    files: tuple[FileDecision, ...]
    issues: tuple[str, ...] = ()

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "files": [decision.to_record() for decision in self.files],
            "issues": list(self.issues),
        }


class _Kept:
    """The evidence kept so far, and what of the limits is used up."""

    def __init__(self) -> None:
        self.by_name: dict[str, FileDecision] = {}
        self.bytes = 0

    def add(self, decision: FileDecision) -> None:
        if decision.status == "kept":
            self.by_name[decision.name] = decision
            self.bytes += decision.size


def validate(
    report: object, *, kept: Iterable[object] = (), scan: Scanner = scan_bytes
) -> EvidenceResult:
    """Decide for each offered file, in order, whether it is kept.

    A file is ``content`` (text, or bytes) or a ``source_url`` under ``/attachments/``, never both.
    Its name stands for its bytes for good: the same bytes again change nothing, others are
    refused. A file that would exceed a limit is refused; smaller ones after it may still fit.

    Args:
        report: the reported ``evidence`` object: version 1, ``files``, ``checkpoints``.
        kept: files of earlier updates of the same run, in the same form, or as name, sha256 and
            size.
        scan: finds secrets in a file; a file with any is refused.
    """
    known = _Kept()
    for entry in kept:
        known.add(_kept_before(as_mapping(entry), known))
    found = as_mapping(report)
    decisions = []
    for entry in as_list(found.get("files")):
        decision = _decide(as_mapping(entry), known, scan=scan)
        known.add(decision)
        decisions.append(decision)
    return EvidenceResult(tuple(decisions), tuple(_offer_issues(report, found, scan)))


def name_problem(name: object) -> str | None:
    """Say why a text cannot name an evidence file, None if it can.

    A name is one path component that every file system can hold, and no environment file.
    """
    if not is_text(name):
        return "a file needs a name"
    if _FORBIDDEN_IN_NAME.search(name) or name in (".", "..") or name != name.strip(" "):
        return "a name is a plain file name, never a path"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"a name has at most {MAX_NAME_BYTES} bytes"
    if _ENV_FILE.search(name):
        return "environment files are never evidence"
    return None


def _kept_before(entry: Mapping[str, Any], known: _Kept) -> FileDecision:
    """Take a file of an earlier update as kept; its bytes need not be at hand any more."""
    name, sha256, size = entry.get("name"), entry.get("sha256"), entry.get("size")
    if entry.get("content") is None and is_sha256(sha256) and is_count(size) and is_text(name):
        return FileDecision(name, "kept", sha256.lower(), size)
    return _decide({"kind": "kept before", **entry}, known, scan=lambda _name, _data: [])


def _decide(entry: Mapping[str, Any], known: _Kept, *, scan: Scanner) -> FileDecision:
    name = entry.get("name")
    problem = name_problem(name)
    if problem is None and not is_text(entry.get("kind")):
        problem = "a file needs a kind"
    data, source_problem = _bytes_of(entry)
    problem = problem or source_problem
    if problem is not None or not isinstance(name, str):
        return FileDecision(show(name), "refused", reason=problem)
    payload = data if data is not None else str(entry.get("source_url")).encode()
    problem = _content_problem(name, payload, entry, is_url=data is None)
    sha256 = sha256_hex(payload)
    before = known.by_name.get(name)
    if problem is None and before is not None:
        if before.sha256 == sha256:
            return FileDecision(name, "unchanged", sha256, before.size)
        problem = "the name is taken by other bytes: use a new name"
    size = 0 if data is None else len(data)
    problem = problem or _limit_problem(size, known)
    if problem is None:
        findings = scan(name, payload)
        problem = f"secret: {findings[0]}" if findings else None
    if problem is not None:
        return FileDecision(name, "refused", reason=problem)
    return FileDecision(name, "kept", sha256, size)


def _bytes_of(entry: Mapping[str, Any]) -> tuple[bytes | None, str | None]:
    """Return the bytes of a file, or None for one that is referred to by URL; and a problem."""
    content, url = entry.get("content"), entry.get("source_url")
    if (content is None) == (url is None):
        return None, "a file has either content or source_url"
    if content is None:
        return None, None if _is_attachment(url) else "source_url must be HTTPS under /attachments/"
    if isinstance(content, bytes):
        return content, None
    if not isinstance(content, str):
        return None, "content must be text"
    if len(content) > MAX_FILE_BYTES:
        return None, f"a file has at most {MAX_FILE_BYTES} bytes"
    try:
        return content.encode(), None
    except UnicodeEncodeError:
        return None, "content must be text that UTF-8 can hold"


def _is_attachment(url: object) -> bool:
    """Whether a URL is HTTPS, under /attachments/, and carries no credential."""
    if not is_text(url) or url != url.strip() or not url.isprintable():
        return False
    try:
        parts = urlsplit(url)
        plain = parts.username is None and parts.password is None and "@" not in parts.netloc
        host, port = parts.hostname, parts.port
    except ValueError:
        return False
    steps = parts.path.split("/")
    inside = parts.path.startswith(_ATTACHMENTS) and len(parts.path) > len(_ATTACHMENTS)
    climbs = ".." in steps or "." in steps or "%2e" in url.lower() or "\\" in url
    clean = not parts.query and not parts.fragment and port in (None, 443)
    return parts.scheme == "https" and bool(host) and plain and inside and not climbs and clean


def _content_problem(
    name: str, payload: bytes, entry: Mapping[str, Any], *, is_url: bool
) -> str | None:
    if len(payload) > MAX_FILE_BYTES:
        return f"a file has at most {MAX_FILE_BYTES} bytes"
    claimed = entry.get("sha256")
    if claimed is None:
        return None
    if not is_sha256(claimed):
        return "sha256 must be 64 hexadecimal digits"
    if not is_url and claimed.lower() != sha256_hex(payload):
        return "sha256 is not that of the bytes"
    return None


def _limit_problem(size: int, known: _Kept) -> str | None:
    if len(known.by_name) >= MAX_FILES:
        return f"a run has at most {MAX_FILES} files"
    if known.bytes + size > MAX_TOTAL_BYTES:
        return f"a run has at most {MAX_TOTAL_BYTES} bytes of files"
    return None


def _offer_issues(report: object, found: Mapping[str, Any], scan: Scanner) -> Sequence[str]:
    if report is None:
        return []
    if not isinstance(report, Mapping):
        return ["evidence: expected an object."]
    issues = []
    if found.get("version") != 1 or isinstance(found.get("version"), bool):
        issues.append("evidence.version: expected 1.")
    if not isinstance(found.get("files"), list | tuple | None):
        issues.append("evidence.files: expected a list.")
    for number, checkpoint in enumerate(as_list(found.get("checkpoints"))):
        uri = as_mapping(checkpoint).get("uri")
        if not is_text(uri) or not _is_plain_reference(uri):
            issues.append(
                f"evidence.checkpoints[{number}].uri: expected a URI without credentials."
            )
        elif scan("checkpoint uri", uri.encode(errors="replace")):
            issues.append(f"evidence.checkpoints[{number}].uri: expected a URI without secrets.")
    return issues


def _is_plain_reference(uri: str) -> bool:
    try:
        parts = urlsplit(uri)
    except ValueError:
        return False
    return bool(parts.scheme) and "@" not in parts.netloc and not parts.query
