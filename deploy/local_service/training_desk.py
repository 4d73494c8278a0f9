"""Training requests as they are submitted: checked, made into an operation, and queued."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

from deploy.local_service import requests, validation
from deploy.local_service.checkpoint_store import (
    SAMPLER,
    TRAINING,
    CheckpointPath,
    CheckpointRecord,
    check_name,
)
from deploy.local_service.context import Context
from deploy.local_service.errors import invalid_request
from deploy.local_service.futures import Outcome
from deploy.local_service.live import ModelEntry
from deploy.local_service.operations import Applied, Operation, Operations
from deploy.local_service.runs import RunRecord
from deploy.local_service.sampling_desk import SamplingDesk
from deploy.local_service.training_queue import TrainingQueue
from deploy.local_service.wire import TrainRequest


def fingerprint(operation: str, body: Any) -> str:
    """Return the digest by which a request that is sent again is told from another one."""
    text = json.dumps(body, sort_keys=True, default=str)
    return hashlib.sha256(f"{operation}\0{text}".encode()).hexdigest()


class TrainingDesk:
    """Takes training requests in, on the event loop."""

    def __init__(
        self,
        context: Context,
        *,
        queue: TrainingQueue,
        operations: Operations,
        sampling: SamplingDesk,
    ) -> None:
        self._context = context
        self._queue = queue
        self._operations = operations
        self._sampling = sampling

    # ---- making models

    async def create_model(self, request: requests.CreateModel) -> dict[str, Any]:
        """Accept the creation of a fresh adapter."""
        session = self._context.sessions.live(request.session_id)
        validation.check_optimizer_config(request.optimizer_config)
        base = await self._context.bases.ensure(request.base_model)
        config = request.lora_config or requests.LoraConfig()
        if not (config.train_attn or config.train_mlp or config.train_unembed):
            raise invalid_request("lora_config: trains nothing, expected at least one part")
        key = fingerprint("create_model", request.model_dump())
        model_id = f"{session.session_id}:train:{request.model_seq_id}"
        promise, is_new = self._queue.open_creation(session, model_id, key)
        if is_new:
            if config.seed is None:
                config = config.model_copy(update={"seed": secrets.randbits(31)})
            record = RunRecord(
                model_id=model_id,
                session_id=session.session_id,
                base_model=base.name,
                base_sha256=base.base_sha256,
                lora=config.model_dump(),
                user_metadata=request.user_metadata,
                created_at=self._context.clock().isoformat(),
                restored_from=None,
                restored_optimizer=False,
            )
            fixed = request.optimizer_config.fixed()
            entry = self._queue.new_entry(session, record, fixed, promise)
            self._queue.queue(
                entry, 0, "create_model", promise, lambda e: self._operations.create(e, config)
            )
        return {"request_id": promise.request_id, "model_id": model_id}

    async def load_weights(self, request: requests.LoadWeights) -> dict[str, Any]:
        """Accept the loading of a checkpoint into a new model, or into a live one."""
        checkpoint = self._context.checkpoints.get(request.path)
        if request.optimizer and not checkpoint.with_optimizer:
            raise invalid_request(f"path {request.path}: holds no optimizer state, load it without")
        if request.base_model not in (None, checkpoint.base_model):
            raise invalid_request(
                f"base_model {request.base_model!r}: the checkpoint's is {checkpoint.base_model!r}"
            )
        if request.model_id is not None:
            return self._load_into(request, checkpoint)
        if request.session_id is None or request.model_seq_id is None:
            raise invalid_request("load_weights: expected session_id and model_seq_id, or model_id")
        session = self._context.sessions.live(request.session_id)
        optimizer_config = request.optimizer_config or requests.OptimizerConfig()
        validation.check_optimizer_config(optimizer_config)
        base = await self._context.bases.ensure(checkpoint.base_model)
        self._check_same_base(checkpoint, base.base_sha256)
        key = fingerprint("load_weights", request.model_dump())
        model_id = f"{session.session_id}:train:{request.model_seq_id}"
        promise, is_new = self._queue.open_creation(session, model_id, key)
        if is_new:
            record = RunRecord(
                model_id=model_id,
                session_id=session.session_id,
                base_model=base.name,
                base_sha256=base.base_sha256,
                lora=checkpoint.lora,
                user_metadata=request.user_metadata,
                created_at=self._context.clock().isoformat(),
                restored_from=checkpoint.path,
                restored_optimizer=request.optimizer,
            )
            entry = self._queue.new_entry(session, record, optimizer_config.fixed(), promise)
            self._queue.queue(entry, 0, "load_weights", promise, self._loading(request, checkpoint))
        return {"request_id": promise.request_id, "model_id": model_id}

    def _load_into(
        self, request: requests.LoadWeights, checkpoint: CheckpointRecord
    ) -> dict[str, Any]:
        if request.model_id is None or request.seq_id is None:
            raise invalid_request("load_weights: model_id without seq_id")
        entry = self._queue.entry(request.model_id)
        if checkpoint.base_model != entry.record.base_model:
            raise invalid_request(
                f"path {checkpoint.path}: made from {checkpoint.base_model!r}, the model from "
                f"{entry.record.base_model!r}"
            )
        self._check_same_base(checkpoint, entry.record.base_sha256)
        key = fingerprint("load_weights", request.model_dump())
        loading = self._loading(request, checkpoint)
        return self._queue.submit(entry, request.seq_id, "load_weights", key, loading)

    def _loading(self, request: requests.LoadWeights, checkpoint: CheckpointRecord) -> Operation:
        return lambda e: self._operations.load(e, checkpoint, optimizer=request.optimizer)

    def _check_same_base(self, checkpoint: CheckpointRecord, base_sha256: str) -> None:
        if checkpoint.base_sha256 != base_sha256:
            raise invalid_request(
                f"path {checkpoint.path}: made from base {checkpoint.base_sha256[:16]}, the one "
                f"served is {base_sha256[:16]}; the same name, but other weights"
            )

    # ---- work on models

    def forward_backward(self, request: TrainRequest) -> dict[str, Any]:
        """Accept a forward or forward_backward."""
        entry = self._queue.entry(request.model_id)
        validation.check_train_request(request, self._context.bases.facts(entry.record.base_model))
        operation = "forward" if request.forward_only else "forward_backward"
        key = request.fingerprint()
        return self._queue.submit(
            entry,
            request.seq_id,
            operation,
            key,
            lambda e: self._operations.forward_backward(e, request),
        )

    def optim_step(self, request: requests.OptimStep) -> dict[str, Any]:
        """Accept an optimizer step."""
        entry = self._queue.entry(request.model_id)
        params = validation.adam_params(request, entry.fixed)
        key = fingerprint("optim_step", request.model_dump())
        return self._queue.submit(
            entry,
            request.seq_id,
            "optim_step",
            key,
            lambda e: self._operations.optim_step(e, params),
        )

    def save_weights(self, request: requests.SaveWeights) -> dict[str, Any]:
        """Accept the saving of a training checkpoint."""
        entry = self._queue.entry(request.model_id)
        name = check_name(request.path or f"step-{secrets.token_hex(4)}")
        key = fingerprint("save_weights", request.model_dump())
        self._check_name(entry, request.seq_id, TRAINING, name, overwrite=request.overwrite)
        return self._queue.submit(
            entry,
            request.seq_id,
            "save_weights",
            key,
            lambda e: self._operations.save_state(e, request, name),
        )

    def save_weights_for_sampler(self, request: requests.SaveWeightsForSampler) -> dict[str, Any]:
        """Accept the publication of weights for sampling: by name, or as a sampling session."""
        entry = self._queue.entry(request.model_id)
        key = fingerprint("save_weights_for_sampler", request.model_dump())
        if request.path is not None:
            name = check_name(request.path)
            self._check_name(entry, request.seq_id, SAMPLER, name)
            operation: Operation = lambda e: self._operations.save_sampler(e, request, name)  # noqa: E731
        else:
            operation = self._publication(entry, request)
        return self._queue.submit(entry, request.seq_id, "save_weights_for_sampler", key, operation)

    def _check_name(
        self, entry: ModelEntry, seq_id: int, kind: str, name: str, *, overwrite: bool = False
    ) -> None:
        # A request that is sent again meets its own checkpoint.
        if self._queue.is_new(entry, seq_id):
            path = CheckpointPath(entry.model_id, kind, name)
            self._context.checkpoints.check_free(path, overwrite=overwrite)

    def _publication(self, entry: ModelEntry, request: requests.SaveWeightsForSampler) -> Operation:
        if request.sampling_session_seq_id is None:
            raise invalid_request(
                "save_weights_for_sampler: neither path nor sampling_session_seq_id"
            )
        session = self._context.sessions.live(entry.record.session_id)
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
        folder = self._sampling.publication_folder(session.session_id)

        def publish(live: ModelEntry) -> Applied:
            self._operations.publish(live, folder)
            self._sampling.add_published(
                session, sampler_id, live, folder, inflight=request.kind == "inflight"
            )
            body = {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}
            return Applied(Outcome(body=body))

        return publish
