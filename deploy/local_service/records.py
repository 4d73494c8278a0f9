"""Views of runs, checkpoints and models, for the read-only endpoints."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from deploy.local_service.checkpoint_store import SAMPLER, TRAINING, describe
from deploy.local_service.context import Context
from deploy.local_service.errors import ApiError
from deploy.local_service.live import BaseFacts, ModelEntry
from deploy.local_service.runs import RunRecord
from deploy.local_service.service import Service


def training_run(service: Service, record: RunRecord) -> dict[str, Any]:
    """Return a run in the form the SDK's training-run type has."""
    context = service.context
    checkpoints = context.checkpoints.all(record.model_id)
    latest = {
        kind: next((describe(c) for c in checkpoints if c.address.kind == kind), None)
        for kind in (TRAINING, SAMPLER)
    }
    entry = service.queue.models.get(record.model_id)
    last = context.runs.summary(record.model_id).last_request_at or record.created_at
    metadata = record.user_metadata
    return {
        "training_run_id": record.model_id,
        "base_model": record.base_model,
        "model_owner": "local",
        "is_lora": True,
        "corrupted": False,
        "lora_rank": record.lora.get("rank"),
        "last_request_time": entry.last_request_at if entry is not None else last,
        "last_checkpoint": latest[TRAINING],
        "last_sampler_checkpoint": latest[SAMPLER],
        "user_metadata": None
        if metadata is None
        else {key: str(value) for key, value in metadata.items()},
    }


def model_info(entry: ModelEntry, base: BaseFacts, *, report_optimizer: bool) -> dict[str, Any]:
    """Return what the SDK's model-info type can hold.

    The optimizer's configuration names hyperparameters only where the client fixed them.
    """
    info = {
        "type": "get_info",
        "model_id": entry.model_id,
        "is_lora": True,
        "lora_rank": entry.live().lora["rank"],
        "model_name": base.name,
        "model_data": {
            "arch": base.architecture,
            "model_name": base.name,
            "tokenizer_id": base.tokenizer_id,
        },
    }
    if report_optimizer:
        info["optimizer_config"] = {"type": "adamw", **entry.fixed}
    return info


def look_at_model(service: Service, model_id: str) -> Future[dict[str, Any]] | dict[str, Any]:
    """Return the state of a run: a live one as the engine sees it, between two operations.

    Raises:
        ApiError: 404 if there never was such a run.
    """
    context = service.context
    entry = service.queue.models.get(model_id)
    record = context.runs.find(model_id)
    if record is None:
        raise service.queue.absent(model_id)
    if entry is None:
        return _gone(context, record)
    return context.engine.call(lambda: _live(context, entry))


def _common(context: Context, record: RunRecord) -> dict[str, Any]:
    summary = context.runs.summary(record.model_id)
    return {
        "model_id": record.model_id,
        "session_id": record.session_id,
        "base_model": record.base_model,
        "base_sha256": record.base_sha256,
        "created_at": record.created_at,
        "applied": {
            "last_seq_id": summary.last_seq_id,
            "optimizer_steps": summary.optimizer_steps,
            "requests": dict(sorted(summary.requests.items())),
            "last_request_at": summary.last_request_at,
        },
    }


def _live(context: Context, entry: ModelEntry) -> dict[str, Any]:
    ready = entry.model is not None
    hidden = context.faults.on("lost_optimizer_report")
    return {
        **_common(context, entry.record),
        "state": "live" if ready else "creating",
        "lora": entry.live().lora if ready else entry.record.lora,
        "optimizer": None if hidden else entry.optimizer_report(),
        "adapter_sha256": entry.live().adapter_sha256() if ready else None,
        "optimizer_sha256": entry.live().optimizer_sha256() if ready and not hidden else None,
        "restored_from": entry.restored_from,
        "restored_optimizer": entry.restored_optimizer,
        "restores": entry.restores,
        "waiting_requests": context.engine.waiting(entry.model_id),
    }


def _gone(context: Context, record: RunRecord) -> dict[str, Any]:
    session = context.sessions.find(record.session_id)
    ended = session is not None and session.finished is not None
    return {
        **_common(context, record),
        "state": "released" if ended else "lost",
        "lora": record.lora,
        "optimizer": None,
        "adapter_sha256": None,
        "optimizer_sha256": None,
        "restored_from": record.restored_from,
        "restored_optimizer": record.restored_optimizer,
        "restores": None,
        "waiting_requests": 0,
    }


def checkpoint_info(service: Service, uri: str) -> dict[str, Any]:
    """Return everything known about a checkpoint.

    Raises:
        ApiError: 400 for a malformed address, 404 if there is none.
    """
    record = service.context.checkpoints.get(uri)
    document = asdict(record)
    document["kind"] = describe(record)["checkpoint_type"]
    return document


def weights_info(service: Service, uri: str) -> dict[str, Any]:
    """Return the shape of a checkpoint's adapter, as the SDK's type has it."""
    record = service.context.checkpoints.get(uri)
    return {
        "base_model": record.base_model,
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "lora_rank": record.lora["rank"],
        "train_unembed": record.lora["train_unembed"],
        "train_mlp": record.lora["train_mlp"],
        "train_attn": record.lora["train_attn"],
    }


def lost_future(service: Service, request_id: str) -> ApiError:
    """Return the answer to a poll for a promise that is not kept."""
    model_id = request_id.rpartition(":")[0]
    known = service.context.runs.find(model_id) is not None
    if known and model_id not in service.queue.models:
        return service.queue.absent(model_id)
    text = f"request {request_id}: unknown request (expired, or lost in a restart)"
    return ApiError(410, "expired", text)
