"""Endpoints of client sessions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from deploy.local_service import requests
from deploy.local_service.errors import not_found
from deploy.local_service.service import Service


def router(service: Service) -> APIRouter:
    """Return the endpoints over a service."""
    api = APIRouter()
    context = service.context

    @api.post("/create_session")
    async def create_session(body: requests.CreateSession) -> dict[str, Any]:
        session = context.sessions.create(body.model_dump())
        return {"type": "create_session", "session_id": session.session_id}

    @api.post("/session_heartbeat")
    async def heartbeat(body: requests.SessionHeartbeat) -> dict[str, Any]:
        context.sessions.live(body.session_id)
        return {"type": "session_heartbeat"}

    @api.post("/sessions/{session_id}/finish")
    async def finish(session_id: str, body: requests.FinishSession) -> Response:
        if context.sessions.find(session_id) is None:
            raise not_found(f"session {session_id!r}: no such session")
        detail = None if body.detail is None else str(body.detail)
        service.finish_session(session_id, reason=body.reason.type, detail=detail)
        return Response(status_code=204)

    @api.get("/sessions")
    async def sessions(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        everything = [session.session_id for session in context.sessions.all()]
        return {"sessions": everything[max(0, offset) :][: max(0, limit)]}

    @api.get("/sessions/{session_id}")
    async def session(session_id: str) -> dict[str, Any]:
        found = context.sessions.find(session_id)
        if found is None:
            raise not_found(f"session {session_id!r}: no such session")
        runs = [run.model_id for run in context.runs.all() if run.session_id == session_id]
        metadata = found.request.get("user_metadata") or {}
        return {
            "training_run_ids": sorted(runs),
            "sampler_ids": sorted(found.samplers),
            "user_metadata": {key: str(value) for key, value in metadata.items()},
            "display_name": found.request.get("display_name"),
        }

    return api
