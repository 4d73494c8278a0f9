"""Live models and the queue of their requests: accepted once, applied once, in order.

A request is known by (session, model_seq_id) if it makes a model and by (model, seq_id) otherwise.
Sent again, it gets the promise of the first one. A number at or below the last accepted one that
is not known is refused with 409: it belongs to a request that can no longer be told from another.
Missing numbers are not waited for, because a refused request has used its number up.

An operation is applied in memory, then written to the journal, and only then answered.
"""

from __future__ import annotations

import logging
from typing import Any

from deploy.local_service.context import Context
from deploy.local_service.errors import ApiError, conflict, model_lost, not_found, saturated
from deploy.local_service.futures import Outcome, Promise, failed
from deploy.local_service.live import ModelEntry
from deploy.local_service.operations import Applied, Operation
from deploy.local_service.runs import RunRecord
from deploy.local_service.sessions import Session
from evidence.errors import InputError

logger = logging.getLogger(__name__)


class TrainingQueue:
    """All live models, and what is to be done to them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.models: dict[str, ModelEntry] = {}
        """Live models, by id. Entries are made on the event loop."""

    # ---- finding models

    def entry(self, model_id: str) -> ModelEntry:
        """Return a live model, and note that it was heard of.

        Raises:
            ApiError: 410 if it was lost or released, 404 if it never was.
        """
        entry = self.models.get(model_id)
        if entry is None:
            raise self.absent(model_id)
        self._context.sessions.touch(entry.record.session_id)
        entry.last_request_at = self._context.clock().isoformat()
        return entry

    def absent(self, model_id: str) -> ApiError:
        """Return the answer for a model that is not live."""
        if self._context.runs.find(model_id) is None:
            return not_found(f"model_id {model_id!r}: no such model")
        steps = self._context.runs.summary(model_id).optimizer_steps
        return model_lost(
            f"model_id {model_id}: not live any more (the service was restarted, or its session "
            f"ended) after {steps} optimizer steps; load a checkpoint into a new client"
        )

    def open_creation(self, session: Session, model_id: str, key: str) -> tuple[Promise, bool]:
        """Return the promise of a model's creation, and whether it is new.

        Raises:
            ApiError: 410 if the model existed and is gone, 409 if other content was sent under the
                same number, the capacity answer if all adapter slots are taken.
        """
        request_id = f"{model_id}:create"
        if (
            self._context.futures.find(request_id) is None
            and self._context.runs.find(model_id) is not None
        ):
            raise (
                self.absent(model_id)
                if model_id not in self.models
                else conflict(f"model_id {model_id}: exists already")
            )
        promise, is_new = self._context.futures.open(
            request_id, session_id=session.session_id, fingerprint=key
        )
        if is_new and len(self.models) >= self._context.settings.max_adapters:
            self._context.futures.forget(promise)
            raise saturated(
                f"all {self._context.settings.max_adapters} adapter slots are taken",
                status=self._context.settings.capacity_status,
                retry_after_seconds=self._context.settings.retry_after_seconds,
            )
        return promise, is_new

    def new_entry(
        self, session: Session, record: RunRecord, fixed: dict[str, float], promise: Promise
    ) -> ModelEntry:
        """Write down a new run and make its entry; the model itself is made by its first job."""
        try:
            self._context.runs.create(record)
        except OSError:
            self._context.futures.forget(promise)
            raise
        entry = ModelEntry(record=record, fixed=fixed, last_request_at=record.created_at)
        self.models[record.model_id] = entry
        session.model_ids.append(record.model_id)
        return entry

    # ---- the queue

    def is_new(self, entry: ModelEntry, seq_id: int) -> bool:
        """Say whether a request of that number is not known yet."""
        return self._context.futures.find(f"{entry.model_id}:{seq_id}") is None

    def submit(
        self, entry: ModelEntry, seq_id: int, operation: str, key: str, apply: Operation
    ) -> dict[str, Any]:
        """Accept a request on a model, or find the promise it already has.

        Args:
            entry: the model.
            seq_id: the client's number of the request.
            operation: its kind, for the journal.
            key: digest of its content.
            apply: what to do, on the engine's thread.

        Returns:
            The answer to the submission.

        Raises:
            ApiError: 409 for a number that stands for something else, or the capacity answer.
        """
        request_id = f"{entry.model_id}:{seq_id}"
        answer = {"request_id": request_id, "model_id": entry.model_id}
        known = self._context.futures.find(request_id)
        if known is not None and self._context.faults.on("replay_executes_again"):
            self.queue(entry, seq_id, operation, known, apply)
            return answer
        if known is None:
            self._check_order(entry, seq_id)
        promise, is_new = self._context.futures.open(
            request_id, session_id=entry.record.session_id, fingerprint=key
        )
        if is_new:
            try:
                self._context.check_queue(status=self._context.settings.capacity_status)
            except ApiError:
                self._context.futures.forget(promise)
                raise
            entry.last_seq_id = seq_id
            self.queue(entry, seq_id, operation, promise, apply)
        return answer

    def _check_order(self, entry: ModelEntry, seq_id: int) -> None:
        if seq_id <= entry.last_seq_id:
            raise conflict(
                f"seq_id {seq_id} of model {entry.model_id}: used or passed over already, expected "
                f"more than {entry.last_seq_id}"
            )

    def queue(
        self, entry: ModelEntry, seq_id: int, operation: str, promise: Promise, apply: Operation
    ) -> None:
        """Put an accepted request behind the model's earlier ones."""
        self._context.engine.submit_train(
            entry.model_id, lambda: self._execute(entry, seq_id, operation, promise, apply)
        )

    # ---- on the engine's thread

    def _execute(
        self, entry: ModelEntry, seq_id: int, operation: str, promise: Promise, apply: Operation
    ) -> None:
        if promise.cancelled:
            return
        try:
            applied = apply(entry)
        except (ApiError, InputError) as error:
            self._give_up(entry, promise, seq_id, failed(str(error), category="user"))
            return
        except Exception as error:
            logger.exception("%s %s failed", operation, promise.request_id)
            message = f"{operation}: {type(error).__name__}: {error}"
            self._give_up(entry, promise, seq_id, failed(message, category="server"))
            return
        outcome = applied.outcome
        if applied.changed:
            try:
                self._record(entry, seq_id, operation, promise, applied)
            except OSError as error:
                outcome = self._lose(entry, operation, error)
        self._context.futures.resolve(promise, outcome)

    def _record(
        self,
        entry: ModelEntry,
        seq_id: int,
        operation: str,
        promise: Promise,
        applied: Applied,
    ) -> None:
        self._context.runs.applied(
            entry.model_id,
            seq_id=seq_id,
            operation=operation,
            request_id=promise.request_id,
            fingerprint=promise.fingerprint,
            optimizer_steps=entry.live().optimizer_steps,
            result=applied.lasting_result,
        )

    def _give_up(self, entry: ModelEntry, promise: Promise, seq_id: int, outcome: Outcome) -> None:
        if seq_id == 0:
            # A model that could not be made does not keep an adapter slot.
            self.models.pop(entry.model_id, None)
        self._context.futures.resolve(promise, outcome)

    def _lose(self, entry: ModelEntry, operation: str, error: OSError) -> Outcome:
        """Release a model whose history can no longer be written: what cannot be recorded is void."""
        logger.error("the journal of %s cannot be written: %s", entry.model_id, error)
        self.models.pop(entry.model_id, None)
        lost = model_lost(
            f"{operation}: applied, but its journal cannot be written ({error}); the model is "
            "released, load a checkpoint into a new client"
        )
        return Outcome(body=lost.body(), status=lost.status)

    # ---- release

    def release(self, session: Session) -> list[str]:
        """Drop a session's models; return their ids."""
        released = [
            model_id
            for model_id, entry in list(self.models.items())
            if entry.record.session_id == session.session_id
        ]
        for model_id in released:
            self.models.pop(model_id, None)
            self._context.runs.release(model_id)
        return released
