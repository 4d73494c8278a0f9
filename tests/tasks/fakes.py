"""A clock that passes by being waited for, and the SDK's errors as it raises them."""

from __future__ import annotations

import asyncio

import httpx
import tinker


class FakeClock:
    """Time stands still except while somebody waits."""

    def __init__(self) -> None:
        self.time = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds
        await asyncio.sleep(0)

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        await asyncio.sleep(0)
        if event.is_set():
            return True
        self.time += seconds
        return event.is_set()


class FixedRandom:
    """A source of jitter that always says the same."""

    def __init__(self, value: float = 0.5) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def status_error(
    status: int, body: object = None, headers: dict[str, str] | None = None
) -> tinker.APIStatusError:
    """An HTTP error as the SDK raises it."""
    request = httpx.Request("POST", "http://127.0.0.1:1/api/v1/x")
    response = httpx.Response(status, request=request, headers=headers or {}, json=body)
    kinds: dict[int, type[tinker.APIStatusError]] = {
        400: tinker.BadRequestError,
        401: tinker.AuthenticationError,
        403: tinker.PermissionDeniedError,
        404: tinker.NotFoundError,
        409: tinker.ConflictError,
        422: tinker.UnprocessableEntityError,
        429: tinker.RateLimitError,
    }
    kind = kinds.get(status, tinker.InternalServerError if status >= 500 else tinker.APIStatusError)
    return kind(f"Error code: {status} - {body}", response=response, body=body)


def failed_future(message: str, category: str = "server") -> tinker.RequestFailedError:
    """A future that completed in a failed state."""
    return tinker.RequestFailedError(
        message,
        request_id="m:1",
        category=tinker.types.RequestErrorCategory(category),
    )


def poll_error(status: int, body: object = None) -> ValueError:
    """What the SDK makes of a 4xx on a poll."""
    error = ValueError(f"Error retrieving result: {status}")
    error.__cause__ = status_error(status, body)
    return error
