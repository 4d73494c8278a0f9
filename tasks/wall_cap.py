"""A hard wall-clock cap: what is left of it, and the stop when nothing is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class CapReached(Exception):
    """The cap is used up; `before` is what was not begun or not finished."""

    def __init__(self, before: str) -> None:
        self.before = before
        super().__init__(f"the wall-clock cap was reached before {before}")


class WallCap:
    """Seconds that may pass from the command to its end, set-up included.

    Args:
        seconds: the cap.
        elapsed: seconds that have passed, on a clock that counts set-up and earlier tries.
    """

    def __init__(self, seconds: float, elapsed: Callable[[], float]) -> None:
        self.seconds, self._elapsed = seconds, elapsed

    @property
    def elapsed(self) -> float:
        """Seconds that have passed."""
        return self._elapsed()

    @property
    def left(self) -> float:
        """Seconds that are left; negative once it is used up."""
        return self.seconds - self.elapsed

    def check(self, before: str) -> None:
        """Do nothing while something is left.

        Raises:
            CapReached: naming what was about to be begun.
        """
        if self.left <= 0:
            raise CapReached(before)

    @asynccontextmanager
    async def holding(self, what: str) -> AsyncIterator[None]:
        """Bound a block by what is left; whatever it waits for is abandoned then.

        Raises:
            CapReached: if the block did not end in time.
        """
        self.check(what)
        try:
            async with asyncio.timeout(self.left):
                yield
        except TimeoutError as error:
            if self.left > 0:
                raise
            raise CapReached(f"the end of {what}") from error
