"""How outcomes and errors become HTTP responses."""

from __future__ import annotations

import logging
import secrets

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from deploy.local_service.errors import ApiError, invalid_request
from deploy.local_service.futures import Outcome
from deploy.local_service.requests import first_error

logger = logging.getLogger(__name__)

PROTOBUF = "application/x-protobuf"


def reply(outcome: Outcome) -> Response:
    """Return the response to a poll."""
    if outcome.proto is not None:
        return Response(outcome.proto, status_code=outcome.status, media_type=PROTOBUF)
    return JSONResponse(outcome.body, status_code=outcome.status)


async def on_api_error(request: Request, error: Exception) -> Response:
    """Answer with what the service decided."""
    del request
    known = error if isinstance(error, ApiError) else ApiError(500, "internal", str(error))
    return JSONResponse(known.body(), status_code=known.status, headers=known.headers)


async def on_invalid_body(request: Request, error: Exception) -> Response:
    """Answer 400 to a body of the wrong form, naming field, value and expectation."""
    errors = error.errors() if isinstance(error, RequestValidationError) else []
    return await on_api_error(request, invalid_request(first_error(list(errors))))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer to a path or method that is not served."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    text = f"{request.method} {request.url.path}: not served here"
    return await on_api_error(request, ApiError(status, "not_found", text))


async def on_defect(request: Request, error: Exception) -> Response:
    """Answer 500 with an id that stands in the log, and nothing of the error itself."""
    error_id = secrets.token_hex(6)
    logger.error("error %s on %s", error_id, request.url.path, exc_info=error)
    answer = ApiError(500, "internal", f"internal error {error_id}", fields={"error_id": error_id})
    return await on_api_error(request, answer)


async def on_disk_error(request: Request, error: Exception) -> Response:
    """Answer 503 when the store cannot be written: nothing was accepted."""
    logger.error("the store cannot be written: %s", error)
    answer = ApiError(503, "engine_unreachable", f"store cannot be written: {error}")
    return await on_api_error(request, answer)
