"""Endpoints beside the protocol: what this service can prove, and how it is made to misbehave.

``GET  /api/v1/local/info``               base digests and their source, dtype, threads, versions
``GET  /api/v1/local/models/{model_id}``  optimizer family, configuration and steps, digests, journal
``GET  /api/v1/local/checkpoints?path=``  kind, scope, immutability, digests of one checkpoint
``POST /api/v1/local/adapters``           takes in an adapter that was trained elsewhere
``GET|POST|DELETE /api/v1/local/faults``  only with ``--allow-faults``
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from deploy.local_service import records
from deploy.local_service.adapter_import import ImportAdapter, import_adapter
from deploy.local_service.faults import FAULTS
from deploy.local_service.service import Service
from deploy.local_service.transport_faults import FaultRule, TransportFaults


class FaultPlan(BaseModel):
    """POST local/faults: replaces the rules, the named faults, or both."""

    model_config = ConfigDict(extra="forbid")

    rules: list[FaultRule] | None = None
    faults: list[str] | None = None


def router(service: Service, transport: TransportFaults | None) -> APIRouter:
    """Return the endpoints over a service; those on faults only where they are allowed."""
    api = APIRouter(prefix="/local")

    @api.get("/info")
    async def info() -> dict[str, Any]:
        return service.info()

    @api.get("/models/{model_id}")
    async def model(model_id: str) -> dict[str, Any]:
        found = records.look_at_model(service, model_id)
        return await asyncio.wrap_future(found) if isinstance(found, Future) else found

    @api.get("/checkpoints")
    async def checkpoint(path: str) -> dict[str, Any]:
        return records.checkpoint_info(service, path)

    @api.post("/adapters")
    async def adapter(body: ImportAdapter) -> dict[str, Any]:
        base = await service.context.bases.ensure(body.base_model)
        kept = service.context.engine.call(lambda: import_adapter(service, body, base))
        return records.checkpoint_info(service, await asyncio.wrap_future(kept))

    if transport is not None:
        _add_faults(api, service, transport)
    return api


def _add_faults(api: APIRouter, service: Service, transport: TransportFaults) -> None:
    def state() -> dict[str, Any]:
        return {
            "faults": service.context.faults.names(),
            "rules": [rule.model_dump() for rule in transport.rules],
            "available": dict(FAULTS),
        }

    @api.get("/faults")
    async def show() -> dict[str, Any]:
        return state()

    @api.post("/faults")
    async def change(plan: FaultPlan) -> dict[str, Any]:
        if plan.faults is not None:
            service.context.faults.switch(plan.faults)
        if plan.rules is not None:
            transport.rules = plan.rules
        return state()

    @api.delete("/faults")
    async def clear() -> dict[str, Any]:
        service.context.faults.switch(())
        transport.rules = []
        return state()
