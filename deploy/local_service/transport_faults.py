"""Misbehaviour on the wire, told by rules: refusals, lost requests, lost answers, delays.

Only a service that was started with ``--allow-faults`` has this. A rule names the calls it is
about, which of them (the nth, so many, every nth, or a seeded fraction), and what happens to them.
``POST /api/v1/local/faults`` sets rules, ``GET`` shows them with their hits, ``DELETE`` clears them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import MutableMapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deploy.local_service import wire_schema
from deploy.local_service.asgi import App, Message, Receive, Send, read_body, replaying, send_json

PREFIX = "/api/v1/"
CONTROL_PATHS = ("local/", "healthz")
"""Paths that no rule touches unless it names them."""

CAPACITY_EXHAUSTED = "engine refused work: trainer capacity exhausted"
"""Text of a capacity answer that comes as a failed promise, without any status."""


class FaultAction(BaseModel):
    """What happens to a call."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal[
        "status", "drop_before", "drop_after", "delay", "hang", "fail_future", "poll_status"
    ]
    """``status``: this answer instead. ``drop_before``: the connection closes, nothing is applied.
    ``drop_after``: the call is applied, its answer is lost. ``delay``: it is applied late.
    ``hang``: nothing happens. ``fail_future``: a submission is accepted and its poll gives an error.
    ``poll_status``: a submission is accepted and its poll gives this status."""
    status: int = Field(default=503, ge=400, le=599)
    headers: dict[str, str] = {}
    error: str = "injected"
    """The body's ``error``."""
    message: str = "injected fault"
    category: Literal["user", "server", "unknown"] = "server"
    empty_body: bool = False
    """Send no body at all, as some proxies do."""
    seconds: float = Field(default=1.0, ge=0)
    """Of ``delay``, and the length of ``hang`` (0 hangs until the client gives up)."""

    def body(self) -> bytes:
        """Return the body of a refusal."""
        if self.empty_body:
            return b""
        text = {"error": self.error, "message": self.message, "detail": self.message}
        return json.dumps(text).encode()


class FaultRule(BaseModel):
    """Which calls misbehave, and how."""

    model_config = ConfigDict(extra="forbid")

    name: str = "rule"
    path: str = ""
    """Part of the path after ``/api/v1/``; empty means every call of the protocol."""
    model: str = ""
    """Part of the model's, sampler's or session's id; empty means all."""
    skip: int = Field(default=0, ge=0)
    """Matching calls that are let through first."""
    every: int = Field(default=1, ge=1)
    """Act on each nth matching call."""
    count: int | None = Field(default=1, ge=0)
    """How often to act; None is for ever, and the default where there is a `rate`."""
    rate: float | None = Field(default=None, ge=0, le=1)
    """Act on this fraction of the matching calls instead, chosen by `seed`."""
    seed: int = 0
    actions: list[FaultAction] = Field(min_length=1)
    """One of them happens, chosen by `seed` where there are several."""
    seen: int = 0
    """Matching calls so far."""
    hits: int = 0
    """Calls acted on so far."""

    @model_validator(mode="after")
    def _rates_go_on(self) -> Self:
        if self.rate is not None and "count" not in self.model_fields_set:
            self.count = None
        return self

    def matches(self, path: str, identity: str) -> bool:
        """Say whether the rule is about a call."""
        if not self.path and path.startswith(CONTROL_PATHS):
            return False
        return self.path in path and self.model in identity

    def decide(self) -> FaultAction | None:
        """Count a matching call and return what happens to it.

        The decision depends on the rule and the call's number alone, so that the same calls in the
        same order meet the same faults.
        """
        number = self.seen
        self.seen += 1
        if number < self.skip or (self.count is not None and self.hits >= self.count):
            return None
        draw = int.from_bytes(hashlib.sha256(f"{self.name}:{self.seed}:{number}".encode()).digest())
        if self.rate is None:
            if (number - self.skip) % self.every:
                return None
        elif draw % 1_000_000 >= self.rate * 1_000_000:
            return None
        self.hits += 1
        return self.actions[(draw // 1_000_000) % len(self.actions)]


def identity_of(path: str, body: bytes, content_type: str) -> str:
    """Return the ids a call names, for matching: of model, sampler, session and request."""
    if content_type.startswith("application/x-protobuf"):
        message = wire_schema.ForwardBackwardRequest()
        try:
            message.ParseFromString(body)
        except Exception:  # noqa: BLE001 - what is wrong with it is the application's to say
            return path
        return f"{path} {message.model_id}"
    try:
        document = json.loads(body) if body else {}
    except ValueError:
        return path
    if not isinstance(document, dict):
        return path
    names = ("model_id", "sampling_session_id", "session_id", "request_id", "path", "model_path")
    return " ".join([path, *(str(document[name]) for name in names if document.get(name))])


class TransportFaults:
    """ASGI middleware that applies the rules. It has to be the outermost one."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.rules: list[FaultRule] = []
        self._failing: dict[str, FaultAction] = {}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Let a call through, or make it misbehave."""
        if scope["type"] != "http" or not self.rules:
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        replay = replaying(body, receive)
        path = str(scope["path"]).removeprefix(PREFIX)
        if path == "retrieve_future" and await self._answer_failing(body, send):
            return
        headers = {key.decode().lower(): value.decode() for key, value in scope["headers"]}
        identity = identity_of(path, body, headers.get("content-type", ""))
        action = next(
            (
                chosen
                for rule in self.rules
                if rule.matches(path, identity) and (chosen := rule.decide()) is not None
            ),
            None,
        )
        if action is None:
            await self._app(scope, replay, send)
        else:
            await self._act(action, body, scope, replay, send)

    async def _act(
        self,
        action: FaultAction,
        body: bytes,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
    ) -> None:
        if action.kind == "status":
            await send_json(send, action.status, action.body(), action.headers)
        elif action.kind == "drop_before":
            await _drop(send)
        elif action.kind == "drop_after":
            await self._app(scope, receive, _swallow)
            await _drop(send)
        elif action.kind == "delay":
            await asyncio.sleep(action.seconds)
            await self._app(scope, receive, send)
        elif action.kind == "hang":
            await _hang(receive, seconds=action.seconds)
            await _drop(send)
        else:
            await self._accept_to_fail(action, body, send)

    async def _accept_to_fail(self, action: FaultAction, body: bytes, send: Send) -> None:
        request_id = f"fault:{len(self._failing)}"
        self._failing[request_id] = action
        answer: dict[str, Any] = {"request_id": request_id}
        try:
            samples = int(json.loads(body).get("num_samples", 1))
        except ValueError:
            samples = 1
        answer["sample_sequence_ids"] = [f"{request_id}:{index}" for index in range(samples)]
        await send_json(send, 200, json.dumps(answer).encode(), {})

    async def _answer_failing(self, body: bytes, send: Send) -> bool:
        try:
            action = self._failing.get(json.loads(body).get("request_id", ""))
        except (ValueError, AttributeError):
            return False
        if action is None:
            return False
        if action.kind == "poll_status":
            await send_json(send, action.status, action.body(), action.headers)
        else:
            text = {"error": action.error, "category": action.category}
            await send_json(send, 200, json.dumps(text).encode(), {})
        return True


async def _swallow(_: Message) -> None:
    return None


async def _hang(receive: Receive, *, seconds: float) -> None:
    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    try:
        await asyncio.wait_for(gone(), seconds or None)
    except TimeoutError:
        return


async def _drop(send: Send) -> None:
    """Close the connection without an answer."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is not None:
        transport.abort()
        return
    # Another server than uvicorn: an answer that stops short is as good as none.
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]}
    )
