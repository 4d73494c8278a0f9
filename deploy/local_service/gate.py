"""What every request passes first: the API key, and the limit on its size."""

from __future__ import annotations

import hmac
import json
from collections.abc import MutableMapping
from typing import Any

from deploy.local_service.asgi import (
    App,
    BodyTooLargeError,
    Receive,
    Send,
    read_body,
    replaying,
    send_json,
)
from deploy.local_service.errors import ApiError

OPEN_PATHS = frozenset({"/api/v1/healthz"})
"""Paths that need no key."""


class Gate:
    """ASGI middleware in front of the application."""

    def __init__(self, app: App, *, api_key: str | None, max_body_bytes: int) -> None:
        self._app = app
        self._api_key = api_key
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {key.lower(): value for key, value in scope["headers"]}
        error = self._refusal(scope["path"], headers)
        if error is not None:
            await _refuse(send, error)
            return
        try:
            body = await read_body(receive, limit=self._max_body_bytes)
        except BodyTooLargeError:
            await _refuse(send, self._too_large())
            return
        await self._app(scope, replaying(body, receive), send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        if self._api_key is not None and path not in OPEN_PATHS:
            given = headers.get(b"x-api-key", b"")
            if not hmac.compare_digest(given, self._api_key.encode()):
                return ApiError(401, "unauthorized", "X-API-Key: missing or wrong")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        return ApiError(413, "too_large", f"body: expected at most {self._max_body_bytes} bytes")


async def _refuse(send: Send, error: ApiError) -> None:
    body = json.dumps(error.body()).encode()
    await send_json(send, error.status, body, {"connection": "close"})
