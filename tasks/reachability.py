"""Short plain requests beside the SDK: is the service there, what does it serve, what is loaded.

The SDK itself takes five minutes to say that nothing listens. These requests have their own
client and short timeouts, and read only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from tasks.clock import Clock
from tasks.failures import (
    GATEWAY_STATUS,
    Failure,
    FailureKind,
    PermanentServiceError,
    ServiceOutage,
)
from tasks.service_settings import ServiceSettings

_PREFIX = "/api/v1"
_HAS_IT_NOT = (403, 404, 405, 501)
"""The only answers that say that this is not the embedded service, or that it has no such thing."""
_REFUSED = frozenset(range(400, 500)) - {*_HAS_IT_NOT, 408, 425, 429}


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the service says about itself.

    Attributes:
        models: names of the models it serves; empty where it does not say.
        local: the embedded service's own description (base digests, threads, precision), or
            empty for any other service.
    """

    models: tuple[str, ...]
    local: Mapping[str, Any] = field(default_factory=dict)


class Reachability:
    """Plain HTTP requests to one service."""

    def __init__(self, settings: ServiceSettings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._base = settings.url.rstrip("/")

    async def alive(self) -> bool:
        """Whether the service answers.

        Any HTTP answer counts, because not every service has ``healthz``, except that of a proxy
        which does not get through to it.
        """
        try:
            answer = await self._get("/healthz", seconds=5.0)
        except httpx.HTTPError:
            return False
        return answer.status_code not in GATEWAY_STATUS

    async def reach(self) -> ServerInfo:
        """Find out within `deadlines.reach` seconds whether the service is there.

        Raises:
            ServiceOutage: if nothing answered.
            PermanentServiceError: if it refuses the credentials, or to say what it is.
        """
        deadline = self._clock.now() + self._settings.deadlines.reach
        delay, error = 0.5, "no answer"
        while True:
            try:
                answer = await self._get("/get_server_capabilities", seconds=5.0)
            except httpx.HTTPError as problem:
                error = f"{type(problem).__name__}: {problem}"
            else:
                if answer.status_code < 500 and answer.status_code != 429:
                    return await self._described(answer)
                error = f"HTTP {answer.status_code}: {answer.text[:200]}"
            if self._clock.now() + delay >= deadline:
                raise ServiceOutage(error, what=f"reach {self._settings.url}", final=True)
            await self._clock.sleep(delay)
            delay = min(2.0 * delay, 5.0)

    async def model(self, model_id: str) -> dict[str, Any] | None:
        """What the embedded service reports about a loaded model, None from any other service.

        Raises:
            ServiceOutage: if it could not be asked.
            PermanentServiceError: if it refuses to say.
        """
        return await self._json(f"/local/models/{model_id}")

    async def checkpoint(self, uri: str) -> dict[str, Any] | None:
        """What the embedded service reports about a checkpoint, None from any other service.

        Raises:
            ServiceOutage: if it could not be asked.
            PermanentServiceError: if it refuses to say.
        """
        return await self._json(f"/local/checkpoints?path={quote(uri, safe='')}")

    async def import_adapter(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Hand an adapter to the embedded service; returns its report about the checkpoint.

        Raises:
            ServiceOutage: if it could not be handed over.
            PermanentServiceError: if the service refuses it, with the reason.
        """
        answer = await self._answer("POST", "/local/adapters", document)
        if answer is None:
            text = "no endpoint for adapters"
            raise PermanentServiceError(text, what="POST /local/adapters", final=True)
        return answer

    async def finish(self, session_id: str, *, seconds: float) -> bool:
        """End a session that the SDK cannot end; whether the service confirmed it."""
        reason = {"reason": {"type": "success"}, "detail": None}
        path = f"/sessions/{quote(session_id, safe='')}/finish"
        try:
            return (await self._send("POST", path, reason, seconds=seconds)).is_success
        except httpx.HTTPError:
            return False

    async def _described(self, answer: httpx.Response) -> ServerInfo:
        if answer.status_code in (401, 403):
            raise PermanentServiceError(
                f"HTTP {answer.status_code}: {answer.text[:200]}",
                what=f"reach {self._settings.url} with the key in {self._settings.api_key_env}",
                final=True,
            )
        return ServerInfo(models=_model_names(answer), local=await self._json("/local/info") or {})

    async def _json(self, path: str) -> dict[str, Any] | None:
        return await self._answer("GET", path)

    async def _answer(
        self, method: str, path: str, document: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Ask until there is an answer, for `deadlines.reach` seconds; None only for "not here"."""
        deadline, delay = self._clock.now() + self._settings.deadlines.reach, 0.5
        while True:
            answer, error = await self._asked(method, path, document)
            if answer is not None and answer.status_code in _HAS_IT_NOT:
                return None
            if answer is not None and isinstance(body := _body(answer), dict):
                return body
            if answer is not None and answer.status_code in _REFUSED:
                raise PermanentServiceError(error, what=f"{method} {path}", final=True)
            if self._clock.now() + delay >= deadline:
                failure = Failure(FailureKind.OUTAGE, error)
                raise ServiceOutage(error, what=f"{method} {path}", failure=failure)
            await self._clock.sleep(delay)
            delay = min(2.0 * delay, 5.0)

    async def _asked(
        self, method: str, path: str, document: Mapping[str, Any] | None
    ) -> tuple[httpx.Response | None, str]:
        """The answer, if there is one, and what to say where it is no use."""
        try:
            answer = await self._send(method, path, document, seconds=15.0)
        except httpx.HTTPError as problem:
            return None, f"{type(problem).__name__}: {problem}"
        return answer, f"HTTP {answer.status_code}: {answer.text[:200]}"

    async def _get(self, path: str, *, seconds: float) -> httpx.Response:
        return await self._send("GET", path, None, seconds=seconds)

    async def _send(
        self, method: str, path: str, document: Mapping[str, Any] | None, *, seconds: float
    ) -> httpx.Response:
        headers = {"X-API-Key": self._settings.api_key(), **self._settings.headers()}
        secure = self._base.startswith("https://")
        async with httpx.AsyncClient(
            timeout=seconds,
            headers=headers,
            verify=secure,  # loading certificates takes longer than a request to this machine
            trust_env=not self._settings.is_loopback,
        ) as client:
            return await client.request(method, self._base + _PREFIX + path, json=document)


def _body(answer: httpx.Response) -> Any:
    """The JSON value of a successful answer, None where there is none."""
    if answer.status_code != 200:
        return None
    try:
        return answer.json()
    except ValueError:
        return None


def _model_names(answer: httpx.Response) -> tuple[str, ...]:
    try:
        listed = answer.json()["supported_models"]
        return tuple(str(entry["model_name"]) for entry in listed)
    except (ValueError, KeyError, TypeError):
        return ()
