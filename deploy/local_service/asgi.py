"""The few ASGI pieces that the middlewares share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class BodyTooLargeError(Exception):
    """A request body went over its limit."""


async def read_body(receive: Receive, *, limit: int | None = None) -> bytes:
    """Return the whole body of a request.

    Raises:
        BodyTooLargeError: if there are more bytes than `limit`.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if limit is not None and size > limit:
            raise BodyTooLargeError
        if not message.get("more_body", False):
            return b"".join(parts)


def replaying(body: bytes, receive: Receive) -> Receive:
    """Return a receiver that gives a body that was read already, then goes on with the rest."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


async def send_json(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """Send a whole JSON response."""
    fields = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(key.encode(), value.encode()) for key, value in fields.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
