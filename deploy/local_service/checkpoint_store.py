"""Checkpoints by name: what exists, of which kind, and what may not be touched.

A checkpoint is a small record (``runs/<model>/<kind>/<name>.json``) that points to a folder of
weights (``blobs/<id>``). The folder is written under a temporary name, synced and renamed; then the
record is replaced in one step. So a name always stands for one whole checkpoint, the old one or the
new one, whenever the service is killed; folders that no record points to are removed at start.
"""

from __future__ import annotations

import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deploy.local_service.errors import invalid_request, not_found
from deploy.local_service.journal import read_document, sync_directory, sync_tree, write_document

TRAINING = "weights"
SAMPLER = "sampler_weights"
KINDS: Mapping[str, str] = {TRAINING: "training", SAMPLER: "sampler"}
"""URI segment to the type that clients are told."""

FULL_INITIALIZATION = "full_initialization"
"""Scope of a training checkpoint with optimizer state and not one optimizer step: immutable."""
TRAINING_STATE = "training_state"
SAMPLER_WEIGHTS = "sampler_weights"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@+=~-]{0,127}")
_SCHEME = "tinker://"


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """A checkpoint's address, ``tinker://<model_id>/<kind>/<name>``."""

    model_id: str
    kind: str
    name: str

    @classmethod
    def parse(cls, uri: str) -> CheckpointPath:
        """Read an address.

        Raises:
            ApiError: 400 if the text is not one.
        """
        parts = uri.removeprefix(_SCHEME).split("/")
        if not uri.startswith(_SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise invalid_request(
                f"path {uri!r}: not a checkpoint, expected tinker://<model>/weights|sampler_weights/<name>"
            )
        return cls(parts[0], parts[1], check_name(parts[2]))

    @property
    def uri(self) -> str:
        """The address as clients see it."""
        return f"{_SCHEME}{self.model_id}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        """The address within its training run."""
        return f"{self.kind}/{self.name}"


def check_name(name: str) -> str:
    """Return a checkpoint name that is safe as a file name and in an address.

    Raises:
        ApiError: 400 with the rule.
    """
    if not _NAME.fullmatch(name):
        raise invalid_request(
            f"name {name[:200]!r}: not usable, expected 1 to 128 letters, digits or . _ : @ + = ~ - "
            "and no dot in front"
        )
    return name


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """What is known about one checkpoint."""

    path: str
    blob: str
    created_at: str
    expires_at: str | None
    user_metadata: dict[str, str] | None
    base_model: str
    base_sha256: str
    lora: dict[str, Any]
    with_optimizer: bool
    optimizer_steps: int
    scope: str
    immutable: bool
    adapter_sha256: str
    optimizer_sha256: str | None
    optimizer: dict[str, Any]
    """Family, hyperparameters held by the server, and those of the last step."""
    size_bytes: int
    restored_from: str | None
    """Address of the checkpoint its training run was started from."""

    @property
    def address(self) -> CheckpointPath:
        """The parsed address."""
        return CheckpointPath.parse(self.path)

    def expired(self, now: datetime) -> bool:
        """Say whether the checkpoint's time is over."""
        return self.expires_at is not None and datetime.fromisoformat(self.expires_at) <= now


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """What a new checkpoint holds, beside its files."""

    base_model: str
    base_sha256: str
    lora: dict[str, Any]
    with_optimizer: bool
    optimizer_steps: int
    adapter_sha256: str
    optimizer_sha256: str | None
    optimizer: dict[str, Any]
    restored_from: str | None

    def scope(self, kind: str) -> str:
        """Name the scope a checkpoint of this content and kind has."""
        if kind == SAMPLER:
            return SAMPLER_WEIGHTS
        if self.with_optimizer and self.optimizer_steps == 0:
            return FULL_INITIALIZATION
        return TRAINING_STATE


def utc_now() -> datetime:
    """Return the time of day, in UTC."""
    return datetime.now(UTC)


class CheckpointStore:
    """All checkpoints of one store folder. Safe to use from several threads."""

    def __init__(self, folder: Path, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._runs = folder / "runs"
        self._blobs = folder / "blobs"
        self._clock = clock
        self._lock = threading.RLock()
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._runs.mkdir(parents=True, exist_ok=True)

    def _file(self, path: CheckpointPath) -> Path:
        return self._runs / quote(path.model_id, safe="") / path.kind / f"{path.name}.json"

    def clean(self) -> int:
        """Remove folders that no record points to (left by a kill); return how many."""
        with self._lock:
            kept = {record.blob for record in self._records()}
            orphans = [folder for folder in self._blobs.iterdir() if folder.name not in kept]
            for folder in orphans:
                shutil.rmtree(folder)
        return len(orphans)

    def find(self, path: CheckpointPath) -> CheckpointRecord | None:
        """Return a checkpoint's record; an expired one is not found."""
        document = read_document(self._file(path))
        if document is None:
            return None
        record = CheckpointRecord(**document)
        return None if record.expired(self._clock()) else record

    def get(self, uri: str) -> CheckpointRecord:
        """Return the record of an address.

        Raises:
            ApiError: 400 if the address is malformed, 404 if there is no such checkpoint.
        """
        record = self.find(CheckpointPath.parse(uri))
        if record is None:
            raise not_found(f"path {uri}: no such checkpoint (deleted, expired or never saved)")
        return record

    def folder(self, record: CheckpointRecord) -> Path:
        """Return the folder of a checkpoint's files."""
        return self.blob_folder(record.blob)

    def blob_folder(self, blob: str) -> Path:
        """Return the folder of that id, whether or not it is there."""
        return self._blobs / blob

    def check_free(self, path: CheckpointPath, *, overwrite: bool) -> None:
        """Refuse a name that must not be written.

        Raises:
            ApiError: 400 if the name is taken, or taken by an immutable checkpoint.
        """
        existing = self.find(path)
        if existing is None:
            return
        if existing.immutable:
            raise invalid_request(
                f"path {path.uri}: a full initialization checkpoint is immutable and is never "
                "overwritten; choose another name"
            )
        if not overwrite:
            raise invalid_request(
                f"path {path.uri}: exists already; choose another name or save with overwrite"
            )

    def save(
        self,
        path: CheckpointPath,
        content: CheckpointContent,
        write: Callable[[Path], None],
        *,
        overwrite: bool = False,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> CheckpointRecord:
        """Write one checkpoint durably.

        A full initialization checkpoint is immutable, so that both arms of a comparison can prove
        where they started; it does not expire either, whatever time to live is asked for.

        Args:
            path: its address.
            content: what the files hold.
            write: writes the files into the folder it is given.
            overwrite: replace a checkpoint of that name (never an immutable one).
            ttl_seconds: seconds until it expires; None keeps it.
            user_metadata: free text pairs of the client.

        Raises:
            ApiError: 400 as `check_free`.
            OSError: if the disk refuses; an older checkpoint of that name is intact then.
        """
        self.check_free(path, overwrite=overwrite)
        blob = secrets.token_hex(12)
        temporary = self._blobs / f".{blob}.tmp"
        try:
            temporary.mkdir()
            write(temporary)
            sync_tree(temporary)
            temporary.rename(self._blobs / blob)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_directory(self._blobs)
        record = self._record(path, content, blob, ttl_seconds, user_metadata)
        with self._lock:
            self.check_free(path, overwrite=overwrite)
            replaced = self.find(path)
            write_document(self._file(path), asdict(record))
        if replaced is not None:
            shutil.rmtree(self._blobs / replaced.blob, ignore_errors=True)
        return record

    def _record(
        self,
        path: CheckpointPath,
        content: CheckpointContent,
        blob: str,
        ttl_seconds: int | None,
        user_metadata: dict[str, str] | None,
    ) -> CheckpointRecord:
        scope = content.scope(path.kind)
        immutable = scope == FULL_INITIALIZATION
        now = self._clock()
        expires = None if ttl_seconds is None or immutable else now + timedelta(seconds=ttl_seconds)
        folder = self._blobs / blob
        return CheckpointRecord(
            path=path.uri,
            blob=blob,
            created_at=now.isoformat(),
            expires_at=None if expires is None else expires.isoformat(),
            user_metadata=user_metadata,
            scope=scope,
            immutable=immutable,
            size_bytes=sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()),
            **asdict(content),
        )

    def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint.

        Raises:
            ApiError: 404 if it is not there, 400 if it is immutable.
        """
        with self._lock:
            record = self.get(path.uri)
            if record.immutable:
                raise invalid_request(
                    f"path {path.uri}: a full initialization checkpoint is immutable and is never "
                    "deleted"
                )
            self._remove(record)

    def _remove(self, record: CheckpointRecord) -> None:
        file = self._file(record.address)
        file.unlink(missing_ok=True)
        sync_directory(file.parent)
        shutil.rmtree(self._blobs / record.blob, ignore_errors=True)

    def set_ttl(self, path: CheckpointPath, ttl_seconds: int | None) -> CheckpointRecord:
        """Let a checkpoint expire in so many seconds, or never.

        Raises:
            ApiError: 404 if it is not there, 400 if it is immutable and would expire.
        """
        with self._lock:
            record = self.get(path.uri)
            if record.immutable and ttl_seconds is not None:
                raise invalid_request(
                    f"path {path.uri}: a full initialization checkpoint is immutable and never expires"
                )
            expires = None
            if ttl_seconds is not None:
                expires = (self._clock() + timedelta(seconds=ttl_seconds)).isoformat()
            document = asdict(record) | {"expires_at": expires}
            write_document(self._file(path), document)
            return CheckpointRecord(**document)

    def sweep(self) -> int:
        """Delete what has expired; return how many."""
        now = self._clock()
        with self._lock:
            old = [record for record in self._records() if record.expired(now)]
            for record in old:
                self._remove(record)
        return len(old)

    def all(self, model_id: str | None = None) -> list[CheckpointRecord]:
        """Return the checkpoints of one training run, or all; newest first."""
        now = self._clock()
        records = [record for record in self._records(model_id) if not record.expired(now)]
        return sorted(records, key=lambda record: (record.created_at, record.path), reverse=True)

    def _records(self, model_id: str | None = None) -> Iterator[CheckpointRecord]:
        runs = (
            sorted(self._runs.iterdir())
            if model_id is None
            else [self._runs / quote(model_id, safe="")]
        )
        for run in runs:
            for kind in KINDS:
                for file in sorted((run / kind).glob("[!.]*.json")):
                    document = read_document(file)
                    if document is not None:
                        yield CheckpointRecord(**document)


def describe(record: CheckpointRecord) -> dict[str, Any]:
    """Return a record in the form the SDK's checkpoint type has."""
    path = record.address
    return {
        "checkpoint_id": path.checkpoint_id,
        "checkpoint_type": KINDS[path.kind],
        "time": record.created_at,
        "tinker_path": record.path,
        "size_bytes": record.size_bytes,
        "public": False,
        "user_metadata": record.user_metadata,
        "expires_at": record.expires_at,
    }
