"""The lasting record of training runs: how each was made, and which requests it has applied.

``runs/<model>/run.json`` is written once, when a model is created. ``runs/<model>/applied.jsonl``
gets one synced line for every request that changed the model or wrote a checkpoint, after it was
applied and before its answer is given out. The live model is lost with the process; the record is
not, so that after a lost answer or a restart one can ask how many optimizer steps were applied.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deploy.local_service.checkpoint_store import utc_now
from deploy.local_service.journal import AppendLog, read_document, read_log, write_document


@dataclass(frozen=True, slots=True)
class RunRecord:
    """How a training run was made."""

    model_id: str
    session_id: str
    base_model: str
    base_sha256: str
    lora: dict[str, Any]
    user_metadata: dict[str, Any] | None
    created_at: str
    restored_from: str | None
    """Address of the checkpoint it was loaded from."""
    restored_optimizer: bool
    """Whether the optimizer's state came with it."""


@dataclass(slots=True)
class AppliedSummary:
    """What one training run has applied, counted from its journal."""

    last_seq_id: int = -1
    optimizer_steps: int = 0
    """Steps in the optimizer's state (those before a restored checkpoint included)."""
    requests: Counter[str] = field(default_factory=Counter)
    """Applied requests by operation."""
    last_request_at: str | None = None
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Answers of finished saves by request id: they outlive the model."""

    def add(self, record: dict[str, Any]) -> None:
        """Count one journal line."""
        self.last_seq_id = max(self.last_seq_id, record["seq_id"])
        self.optimizer_steps = record["optimizer_steps"]
        self.requests[record["operation"]] += 1
        self.last_request_at = record["applied_at"]
        if record.get("result") is not None:
            self.results[record["request_id"]] = record["result"]


class RunBook:
    """All training runs of one store folder. Safe to use from several threads."""

    def __init__(self, folder: Path, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._folder = folder / "runs"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._lock = threading.Lock()
        self._logs: dict[str, AppendLog] = {}
        self._records: dict[str, RunRecord] = {}
        self._summaries: dict[str, AppliedSummary] = {}
        for file in sorted(self._folder.glob("*/run.json")):
            document = read_document(file)
            if document is not None:
                record = RunRecord(**document)
                self._records[record.model_id] = record

    def _run_folder(self, model_id: str) -> Path:
        return self._folder / quote(model_id, safe="")

    def create(self, record: RunRecord) -> None:
        """Write down a new run."""
        write_document(self._run_folder(record.model_id) / "run.json", asdict(record))
        with self._lock:
            self._records[record.model_id] = record

    def find(self, model_id: str) -> RunRecord | None:
        """Return a run's record, live or not."""
        return self._records.get(model_id)

    def all(self) -> list[RunRecord]:
        """Return all runs, newest first."""
        with self._lock:
            records = list(self._records.values())
        return sorted(
            records, key=lambda record: (record.created_at, record.model_id), reverse=True
        )

    def summary(self, model_id: str) -> AppliedSummary:
        """Return what a run has applied."""
        with self._lock:
            return self._summary(model_id)

    def _summary(self, model_id: str) -> AppliedSummary:
        summary = self._summaries.get(model_id)
        if summary is None:
            summary = self._summaries[model_id] = AppliedSummary()
            for record in read_log(self._run_folder(model_id) / "applied.jsonl"):
                summary.add(record)
        return summary

    def applied(
        self,
        model_id: str,
        *,
        seq_id: int,
        operation: str,
        request_id: str,
        fingerprint: str,
        optimizer_steps: int,
        result: dict[str, Any] | None = None,
    ) -> None:
        """Record an applied request; it is on disk when this returns.

        Args:
            model_id: the run.
            seq_id: the client's number of the request.
            operation: its kind, for instance ``optim_step``.
            request_id: id of its promise.
            fingerprint: digest of its content.
            optimizer_steps: steps in the optimizer's state after it.
            result: the answer, where it outlives the model (saves).

        Raises:
            OSError: if the disk refuses.
        """
        record = {
            "seq_id": seq_id,
            "operation": operation,
            "request_id": request_id,
            "fingerprint": fingerprint,
            "optimizer_steps": optimizer_steps,
            "applied_at": self._clock().isoformat(),
            "result": result,
        }
        with self._lock:
            summary = self._summary(model_id)
            log = self._logs.get(model_id)
            if log is None:
                log = AppendLog(self._run_folder(model_id) / "applied.jsonl")
                self._logs[model_id] = log
            log.append(record)
            summary.add(record)

    def release(self, model_id: str) -> None:
        """Close a run's journal; it can still be read."""
        with self._lock:
            log = self._logs.pop(model_id, None)
        if log is not None:
            log.close()

    def close(self) -> None:
        """Close every journal."""
        with self._lock:
            logs = list(self._logs.values())
            self._logs.clear()
        for log in logs:
            log.close()


def result_of(book: RunBook, request_id: str) -> dict[str, Any] | None:
    """Return the answer of a finished save by its request id, whether or not its model lives."""
    model_id, _, _ = request_id.rpartition(":")
    if book.find(model_id) is None:
        return None
    return book.summary(model_id).results.get(request_id)
