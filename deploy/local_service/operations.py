"""What a training request does to a model, on the engine's thread.

Every function takes the live model's entry and the request, and returns what was done. The caller
(`training`) records it in the journal and resolves the promise; nothing here knows of HTTP.
"""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local_service import requests
from deploy.local_service.checkpoint_store import (
    SAMPLER,
    TRAINING,
    CheckpointContent,
    CheckpointPath,
    CheckpointRecord,
    CheckpointStore,
)
from deploy.local_service.errors import ApiError, invalid_request
from deploy.local_service.faults import SemanticFaults
from deploy.local_service.futures import Outcome
from deploy.local_service.live import LiveModel, ModelEntry, Numerics
from deploy.local_service.samplers import WeightsCache, WeightsSource
from deploy.local_service.wire import TrainRequest, encode_train_result


@dataclass(frozen=True, slots=True)
class Applied:
    """What an operation did."""

    outcome: Outcome
    changed: bool = True
    """Whether the model, or what is stored, is different now (a forward alone changes nothing)."""
    lasting_result: dict[str, Any] | None = None
    """The answer, where it outlives the model."""


Operation = Callable[[ModelEntry], Applied]


class Operations:
    """The operations, with what they need."""

    def __init__(
        self,
        *,
        numerics: Numerics,
        checkpoints: CheckpointStore,
        faults: SemanticFaults,
        cache: WeightsCache,
    ) -> None:
        self._numerics = numerics
        self._cache = cache
        self._checkpoints = checkpoints
        self._faults = faults

    # ---- making models

    def create(self, entry: ModelEntry, config: requests.LoraConfig) -> Applied:
        """Make a fresh adapter."""
        entry.model = self._numerics.create(entry.record.base_model, config)
        return Applied(Outcome(body={"model_id": entry.model_id, "type": "create_model"}))

    def load(self, entry: ModelEntry, record: CheckpointRecord, *, optimizer: bool) -> Applied:
        """Put a checkpoint's adapter, and its optimizer if asked, in the place of what there is."""
        if optimizer and not record.with_optimizer:
            raise invalid_request(f"path {record.path}: holds no optimizer state")
        folder = self._checkpoints.folder(record)
        if not folder.is_dir():
            raise invalid_request(f"path {record.path}: was deleted meanwhile")
        with_optimizer = optimizer or self._faults.on("restore_ignores_weights_only")
        with_optimizer = with_optimizer and record.with_optimizer
        if self._faults.on("cold_adam_after_restore"):
            with_optimizer = False
        entry.model = self._numerics.load(
            entry.record.base_model, folder, with_optimizer=with_optimizer
        )
        entry.restored_from, entry.restored_optimizer = record.path, optimizer
        entry.restores += 1
        entry.broken_gradient = None
        if optimizer:
            entry.fixed = dict(record.optimizer["fixed"])
            entry.last_step = record.optimizer["last_step"]
        body = {"path": record.path, "model_id": entry.model_id, "type": "load_weights"}
        return Applied(Outcome(body=body))

    # ---- training

    def forward_backward(self, entry: ModelEntry, request: TrainRequest) -> Applied:
        """Compute log-probabilities, and add to the gradient unless it is a forward alone."""
        model = entry.live()
        backward = not request.forward_only
        if backward and self._faults.on("gradient_erased_between_chunks"):
            model.discard_gradient()
        try:
            logprobs_D, metrics = model.forward_backward(
                self._faults.train_data(request.data_D),
                loss_fn=request.loss_fn,
                config=request.config,
                backward=backward or self._faults.on("forward_accumulates"),
            )
            bad = sorted(name for name, value in metrics.items() if not math.isfinite(value))
            if bad:
                raise invalid_request(f"loss: {', '.join(bad)} not finite, expected finite numbers")
        except Exception as error:
            if backward:
                entry.broken_gradient = f"request {request.seq_id} failed ({error})"
            raise
        logprobs_D = list(self._faults.train_logprobs(request.data_D, logprobs_D))
        reported = self._faults.train_metrics(metrics)
        return Applied(Outcome(proto=encode_train_result(logprobs_D, reported)), changed=backward)

    def optim_step(self, entry: ModelEntry, params: requests.AdamParams) -> Applied:
        """Take one optimizer step, unless part of its gradient is missing."""
        model = entry.live()
        if entry.broken_gradient is not None:
            reason, entry.broken_gradient = entry.broken_gradient, None
            model.discard_gradient()
            raise invalid_request(
                f"optim_step: not applied, its gradient is incomplete: {reason}; the gradient is cleared"
            )
        used = self._faults.optimizer(params)
        metrics = model.optim_step(used)
        if self._faults.on("step_applied_twice"):
            model.optim_step(used)
        entry.last_step = params.model_dump()
        return Applied(Outcome(body={"metrics": metrics}))

    # ---- saving

    def content(self, entry: ModelEntry, *, with_optimizer: bool) -> CheckpointContent:
        """Describe a model as it is now."""
        model = entry.live()
        return CheckpointContent(
            base_model=entry.record.base_model,
            base_sha256=entry.record.base_sha256,
            lora=model.lora,
            with_optimizer=with_optimizer,
            optimizer_steps=model.optimizer_steps,
            adapter_sha256=model.adapter_sha256(),
            optimizer_sha256=model.optimizer_sha256() if with_optimizer else None,
            optimizer={"type": "adamw", "fixed": entry.fixed, "last_step": entry.last_step},
            restored_from=entry.restored_from,
        )

    def save_state(self, entry: ModelEntry, request: requests.SaveWeights, name: str) -> Applied:
        """Write a training checkpoint."""
        model = entry.live()
        record = self._checkpoints.save(
            CheckpointPath(entry.model_id, TRAINING, name),
            self.content(entry, with_optimizer=True),
            lambda folder: model.save(folder, with_optimizer=True),
            overwrite=request.overwrite,
            ttl_seconds=request.ttl_seconds,
            user_metadata=request.user_metadata,
        )
        if self._faults.on("save_resets_optimizer"):
            folder = self._checkpoints.folder(record)
            entry.model = self._numerics.load(entry.record.base_model, folder, with_optimizer=False)
        body = {"path": record.path, "type": "save_weights"}
        return Applied(Outcome(body=body), lasting_result=body)

    def save_sampler(
        self, entry: ModelEntry, request: requests.SaveWeightsForSampler, name: str
    ) -> Applied:
        """Write a named sampler checkpoint; it is immutable while it exists."""
        path = CheckpointPath(entry.model_id, SAMPLER, name)
        if self._faults.on("sampler_overwrites_training"):
            self._delete_training_namesake(path)
        record = self._checkpoints.save(
            path,
            self.content(entry, with_optimizer=False),
            self._sampler_writer(entry),
            ttl_seconds=request.ttl_seconds,
            user_metadata=request.user_metadata,
        )
        self._remember_publication(entry, self._checkpoints.folder(record))
        body = {"path": record.path, "type": "save_weights_for_sampler"}
        return Applied(Outcome(body=body), lasting_result=body)

    def publish(self, entry: ModelEntry, folder: Path) -> None:
        """Write an adapter for sampling into a new folder, without a checkpoint of that name."""
        temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
        temporary.mkdir(parents=True)
        self._sampler_writer(entry)(temporary)
        temporary.rename(folder)
        self._remember_publication(entry, folder)

    def _sampler_writer(self, entry: ModelEntry) -> Callable[[Path], None]:
        model: LiveModel = entry.live()
        if self._faults.on("stale_sampler") and entry.published:
            stale = Path(entry.published[-1])
            return lambda folder: _copy_files(stale, folder)
        return lambda folder: model.save(folder, with_optimizer=False)

    def _remember_publication(self, entry: ModelEntry, folder: Path) -> None:
        if not self._faults.on("stale_sampler"):
            source = WeightsSource(entry.record.base_model, folder)
            self._cache.put(source, entry.live().sampling_weights())
        entry.published = [*entry.published[-1:], str(folder)]

    def _delete_training_namesake(self, path: CheckpointPath) -> None:
        try:
            self._checkpoints.delete(CheckpointPath(path.model_id, TRAINING, path.name))
        except ApiError:
            return


def _copy_files(source: Path, target: Path) -> None:
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
