"""Base models, loaded when they are first asked for and never on the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from deploy.local_service.errors import ApiError, invalid_request
from deploy.local_service.live import BaseFacts, Numerics
from evidence.errors import InputError

_PATIENCE_SECONDS = 30.0
"""How long a request waits for a model that is being loaded or fetched."""
_RETRY_AFTER_SECONDS = 5.0


class Bases:
    """The served base models."""

    def __init__(self, numerics: Numerics, names: Sequence[str]) -> None:
        self._numerics = numerics
        self._names = tuple(names)
        self._tasks: dict[str, asyncio.Task[BaseFacts]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the served models."""
        return self._names

    def loaded(self, name: str) -> BaseFacts | None:
        """Return the facts of a model that is loaded."""
        task = self._tasks.get(name)
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    def facts(self, name: str) -> BaseFacts:
        """Return the facts of a model that something was made from, and so is loaded.

        Raises:
            ApiError: 503 if it is not (the service was restarted and is loading it).
        """
        facts = self.loaded(name)
        if facts is None:
            raise self._still_loading(name)
        return facts

    def check_served(self, name: str) -> None:
        """Refuse a name that is not served.

        Raises:
            ApiError: 400.
        """
        if name not in self._names:
            raise invalid_request(
                f"base_model {name!r}: not served here, expected one of {list(self._names)}"
            )

    async def ensure(self, name: str) -> BaseFacts:
        """Return the facts of a served model, loading it first if need be.

        Raises:
            ApiError: 400 if it is not served; 503 with ``Retry-After`` if loading takes long, or
                if it cannot be had.
        """
        self.check_served(name)
        task = self._tasks.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(asyncio.to_thread(self._numerics.load_base, name))
            self._tasks[name] = task
        try:
            return await asyncio.wait_for(asyncio.shield(task), _PATIENCE_SECONDS)
        except TimeoutError:
            raise self._still_loading(name) from None
        except (InputError, OSError) as error:
            raise ApiError(
                503,
                "engine_unreachable",
                f"base_model {name!r}: {error}",
                headers={"Retry-After": f"{_RETRY_AFTER_SECONDS:g}"},
            ) from error

    def _still_loading(self, name: str) -> ApiError:
        return ApiError(
            503,
            "engine_unreachable",
            f"base_model {name!r}: is still being loaded",
            headers={"Retry-After": f"{_RETRY_AFTER_SECONDS:g}"},
        )
