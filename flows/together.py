"""Arms side by side, and what happens to one when the other cannot go on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from tasks.failures import CapacityBlocked, ServiceOutage

_WAIT_FOR_OTHERS = (CapacityBlocked, ServiceOutage)


async def side_by_side(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all of them; raise what went wrong in the first that failed.

    When the service refuses one, the others go on until they are done or are refused themselves:
    what they finish is kept. Any other failure stops the others at once; what they had finished is
    kept too.
    """
    running = [asyncio.ensure_future(one) for one in work]
    try:
        pending = set(running)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
            errors = [task.exception() for task in done if task.exception() is not None]
            if any(not isinstance(error, _WAIT_FOR_OTHERS) for error in errors):
                break
        grave = [
            error for task in running if task.done() and (error := task.exception()) is not None
        ]
        if grave:
            raise min(grave, key=lambda error: isinstance(error, _WAIT_FOR_OTHERS))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
