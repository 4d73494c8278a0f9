"""A log of what reached the service: which sample was asked for, and when.

One JSON object a line: ``{"at", "path", "seed"?, "seq_id"?, "owner"?}``. It is written before a
request is carried out and outlives a kill of the service, so that a client's claims about what it
asked for can be held against it. Prompts, weights and keys are never written.
"""

from __future__ import annotations

import json
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from deploy.local_service.asgi import App, Receive, Send, read_body, replaying

PREFIX = "/api/v1/"
QUIET = ("retrieve_future", "session_heartbeat", "client/", "telemetry", "local/", "healthz")
"""Paths that are not logged: they ask for nothing to be done."""
_OWNERS = ("sampling_session_id", "model_id", "session_id")


class RequestLog:
    """ASGI middleware inside the gate: what was refused or never arrived is not logged."""

    def __init__(self, app: App, path: Path) -> None:
        self._app, self._path = app, path
        path.parent.mkdir(parents=True, exist_ok=True)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Log a request and let it through."""
        path = str(scope.get("path", "")).removeprefix(PREFIX)
        if scope["type"] != "http" or path.startswith(QUIET):
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        line = {"at": time.time(), "path": path, **_asked(body)}
        with self._path.open("a", encoding="ascii") as stream:
            stream.write(json.dumps(line) + "\n")
        await self._app(scope, replaying(body, receive), send)


def read_request_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log; one that a kill cut short is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="ascii")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _asked(body: bytes) -> dict[str, Any]:
    """What identifies a JSON request; nothing of a body in another form."""
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    if not isinstance(document, dict):
        return {}
    found = {"seq_id": document.get("seq_id")}
    found["owner"] = next((document[name] for name in _OWNERS if document.get(name)), None)
    params = document.get("sampling_params")
    found["seed"] = params.get("seed") if isinstance(params, dict) else None
    return {name: value for name, value in found.items() if value is not None}
