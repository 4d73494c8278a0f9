"""Endpoints about what is kept: training runs and checkpoints."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from deploy.local_service import records, requests
from deploy.local_service.checkpoint_store import KINDS, CheckpointPath, check_name, describe
from deploy.local_service.errors import not_found
from deploy.local_service.service import Service


def router(service: Service) -> APIRouter:
    """Return the endpoints over a service."""
    api = APIRouter()
    context = service.context

    @api.get("/training_runs")
    async def training_runs(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        page, cursor = _page(context.runs.all(), limit=limit, offset=offset)
        runs = [records.training_run(service, record) for record in page]
        return {"training_runs": runs, "cursor": cursor}

    @api.get("/training_runs/{model_id}")
    async def training_run(model_id: str) -> dict[str, Any]:
        record = context.runs.find(model_id)
        if record is None:
            raise not_found(f"training run {model_id!r}: no such run")
        return records.training_run(service, record)

    @api.get("/training_runs/{model_id}/checkpoints")
    async def checkpoints_of_run(model_id: str) -> dict[str, Any]:
        return {"checkpoints": [describe(c) for c in context.checkpoints.all(model_id)]}

    @api.delete("/training_runs/{model_id}/checkpoints/{kind}/{name}")
    async def delete_checkpoint(model_id: str, kind: str, name: str) -> Response:
        context.checkpoints.delete(_path(model_id, kind, name))
        return Response(status_code=204)

    @api.put("/training_runs/{model_id}/checkpoints/{kind}/{name}/ttl")
    async def set_ttl(model_id: str, kind: str, name: str, body: requests.SetTtl) -> Response:
        context.checkpoints.set_ttl(_path(model_id, kind, name), body.ttl_seconds)
        return Response(status_code=204)

    @api.get("/checkpoints")
    async def all_checkpoints(limit: int = 100, offset: int = 0) -> dict[str, Any]:
        page, cursor = _page(context.checkpoints.all(), limit=limit, offset=offset)
        return {"checkpoints": [describe(record) for record in page], "cursor": cursor}

    @api.post("/weights_info")
    async def weights_info(body: requests.WeightsInfo) -> dict[str, Any]:
        return records.weights_info(service, body.tinker_path)

    return api


def _path(model_id: str, kind: str, name: str) -> CheckpointPath:
    if kind not in KINDS:
        raise not_found(f"checkpoint {kind}/{name}: no such kind, expected one of {sorted(KINDS)}")
    return CheckpointPath(model_id, kind, check_name(name))


def _page(items: list[Any], *, limit: int, offset: int) -> tuple[list[Any], dict[str, int]]:
    limit, offset = max(0, min(limit, 1000)), max(0, offset)
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[offset : offset + limit], cursor
