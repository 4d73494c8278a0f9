"""Time as the retry policy sees it: replaceable, so that hours can pass in a test."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """The one source of time of the service layer."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Let that much time pass."""
        ...

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for the event, at most that long; return whether it was set."""
        ...


class SystemClock:
    """The real clock."""

    def now(self) -> float:
        """Seconds on the machine's monotonic clock."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep without blocking the event loop."""
        await asyncio.sleep(seconds)

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for the event, at most that long; return whether it was set."""
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return event.is_set()
        return True
