"""A step of a run: a Prefect task inside a flow, a plain call outside of one.

Nothing is cached and no result is persisted by Prefect: whether a step has been done is written in
the run directory. Prefect is imported by whoever starts a flow, never from here on a plain run.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class RunTask(Generic[P, T]):
    """An asynchronous step that can be run in either way.

    Args:
        step: the function; its module says what it reads, writes and repeats.
        name: how the task is shown.
    """

    def __init__(self, step: Callable[P, Awaitable[T]], *, name: str) -> None:
        self.step, self.name = step, name
        self._task: Any = None

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the step."""
        if not inside_flow():
            return await self.step(*args, **kwargs)
        if self._task is None:
            self._task = _prefect_task(self.step, self.name)
        return cast("T", await self._task(*args, **kwargs))


def inside_flow() -> bool:
    """Whether a Prefect flow run is going on in this context."""
    context = sys.modules.get("prefect.context")
    return context is not None and context.FlowRunContext.get() is not None


def _prefect_task(step: Callable[..., Awaitable[Any]], name: str) -> Any:
    from prefect import task  # noqa: PLC0415 - a plain run does not pay for it
    from prefect.cache_policies import NO_CACHE  # noqa: PLC0415

    # Retries are the service layer's alone, whatever Prefect's settings say.
    decorate = task(name=name, cache_policy=NO_CACHE, persist_result=False, retries=0)
    return decorate(step)
