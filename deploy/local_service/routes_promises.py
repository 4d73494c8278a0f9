"""Endpoints of promises: asking for a result, and giving a sampling request up."""

from __future__ import annotations

from fastapi import APIRouter, Response

from deploy.local_service import requests
from deploy.local_service.futures import Outcome, Promise
from deploy.local_service.records import lost_future
from deploy.local_service.replies import reply
from deploy.local_service.runs import result_of
from deploy.local_service.service import Service


def router(service: Service) -> APIRouter:
    """Return the endpoints over a service."""
    api = APIRouter()
    context = service.context

    @api.post("/retrieve_future")
    async def retrieve_future(body: requests.RetrieveFuture) -> Response:
        promise = context.futures.find(body.request_id)
        if promise is None:
            lasting = result_of(context.runs, body.request_id)
            if lasting is not None:
                return reply(Outcome(body=lasting))
            raise lost_future(service, body.request_id)
        context.sessions.touch(promise.session_id)
        seconds = service.settings.long_poll_seconds
        outcome = await context.futures.wait(promise, seconds=seconds)
        return reply(_try_again(promise) if outcome is None else outcome)

    @api.post("/cancel_future")
    async def cancel_future(body: requests.RetrieveFuture) -> Response:
        service.sampling.cancel(body.request_id)
        return Response(status_code=204)

    return api


def _try_again(promise: Promise) -> Outcome:
    body = {"type": "try_again", "request_id": promise.request_id, "queue_state": "active"}
    return Outcome(body=body, status=408)
