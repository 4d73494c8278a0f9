"""What every request passes first: the API key, and the limit on its size."""

from __future__ import annotations

import hmac
import json
from collections.abc import MutableMapping
from typing import Any

from deploy.local_service.errors import ApiError
from deploy.local_service.transport_faults import App, Message, Receive, Send

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
        await self._app(scope, self._limited(receive), send)

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

    def _limited(self, receive: Receive) -> Receive:
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body_bytes:
                raise self._too_large()
            return message

        return limited


async def _refuse(send: Send, error: ApiError) -> None:
    body = json.dumps(error.body()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
