"""Endpoints that a client asks before it does anything: health, flags, models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from deploy.local_service.service import Service

CLIENT_CONFIG: dict[str, Any] = {
    # Chunks arrive one after the other, so that they can be applied in the order of arrival and
    # no missing number is ever waited for.
    "parallel_fwdbwd_chunks": False,
    # Older clients then make and load a model in one request, which can be told from a repeat.
    "create_model_via_load_weights": True,
    # There is no billing here; a stray 402 must not pause a client for an hour.
    "billing_exception_max_pause_duration_sec": 5,
}
DYNAMIC_CONFIG: dict[str, Any] = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


def router(service: Service) -> APIRouter:
    """Return the endpoints over a service."""
    api = APIRouter()
    context = service.context

    @api.get("/healthz")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok"}

    @api.post("/client/config")
    async def client_config() -> dict[str, Any]:
        return CLIENT_CONFIG

    @api.post("/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        return DYNAMIC_CONFIG

    @api.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        models = []
        for name in context.bases.names:
            facts = context.bases.loaded(name)
            models.append(
                {
                    "model_name": name,
                    "max_context_length": None if facts is None else facts.context_length,
                    "trainable": True,
                    "sampleable": True,
                }
            )
        return {"supported_models": models}

    @api.post("/telemetry")
    async def telemetry(request: Request) -> dict[str, Any]:
        await request.body()
        return {"status": "accepted"}

    return api
