"""The HTTP application over a service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from deploy.local_service import (
    replies,
    routes_clients,
    routes_local,
    routes_promises,
    routes_records,
    routes_sampling,
    routes_sessions,
    routes_training,
)
from deploy.local_service.asgi import App
from deploy.local_service.errors import ApiError
from deploy.local_service.gate import Gate
from deploy.local_service.request_log import RequestLog
from deploy.local_service.service import Service
from deploy.local_service.transport_faults import TransportFaults

PREFIX = "/api/v1"


def build_app(service: Service) -> App:
    """Return the ASGI application; its lifespan starts and stops the engine.

    From the outside in: faults on the wire (only where they are allowed), the gate with API key and
    size limit, the log of requests (only where one is kept), the endpoints.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    api = FastAPI(lifespan=lifespan, title="gated-rl local service", docs_url=None, redoc_url=None)
    logged = service.settings.request_log
    inner: App = api if logged is None else RequestLog(api, logged)
    gate = Gate(
        inner, api_key=service.settings.api_key, max_body_bytes=service.settings.max_body_bytes
    )
    transport = TransportFaults(gate) if service.settings.allow_faults else None
    for router in (
        routes_clients.router(service),
        routes_sessions.router(service),
        routes_promises.router(service),
        routes_training.router(service),
        routes_sampling.router(service),
        routes_records.router(service),
        routes_local.router(service, transport),
    ):
        api.include_router(router, prefix=PREFIX)
    api.add_exception_handler(ApiError, replies.on_api_error)
    api.add_exception_handler(RequestValidationError, replies.on_invalid_body)
    api.add_exception_handler(HTTPException, replies.on_http_error)
    api.add_exception_handler(OSError, replies.on_disk_error)
    api.add_exception_handler(Exception, replies.on_defect)
    return gate if transport is None else transport
