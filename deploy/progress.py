"""Show a run's progress: bars with time left on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tasks.progress import ProgressEvent

_Key = tuple[str, str | None]


class ProgressBars:
    """Listens to a run on a terminal; one bar for each phase and arm, messages above them."""

    def __init__(self, stream: TextIO) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(file=stream),
        )
        self._bars: dict[_Key, TaskID] = {}
        self._done: dict[_Key, int] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, event: ProgressEvent) -> None:
        """Move the bar of the event's phase and arm, and print its message."""
        if event.total:
            key = (event.phase, event.arm)
            if key not in self._bars:
                self._bars[key] = self._progress.add_task(_label(event), total=event.total)
            elif event.done < self._done[key]:
                self._progress.reset(self._bars[key])  # another step of the same arm
            self._done[key] = event.done
            self._progress.update(self._bars[key], completed=event.done, total=event.total)
        if event.message:
            self._progress.console.print(_line(event), markup=False, highlight=False)


class ProgressLines:
    """Listens to a run where nobody watches a terminal: one line for what matters.

    Args:
        stream: where the lines go.
        every_seconds: a phase and arm that only counts up is reported at most this often.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._every, self._clock = stream, every_seconds, clock
        self._started = clock()
        self._first: dict[_Key, tuple[float, int]] = {}
        self._last: dict[_Key, int] = {}
        self._said: dict[_Key, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.flush()

    def __call__(self, event: ProgressEvent) -> None:
        """Write one line, unless the same bar was reported a moment ago."""
        now, key = self._clock(), (event.phase, event.arm)
        if event.done <= self._last.get(key, 0):
            self._first.pop(key, None)  # the same bar counts again: another step of the arm
        self._last[key] = event.done
        first = self._first.setdefault(key, (now, event.done))
        due = now - self._said.get(key, float("-inf")) >= self._every
        finished = event.total > 0 and event.done >= event.total
        if not (event.message or finished or (event.total and due)):
            return
        self._said[key] = now
        counted = f" {event.done}/{event.total}" if event.total else ""
        left = "" if finished or not event.total else _left(first, now, event)
        text = f": {event.message}" if event.message else ""
        self._stream.write(f"[{now - self._started:6.1f} s] {_label(event)}{counted}{left}{text}\n")
        self._stream.flush()


def listener(stream: TextIO | None = None) -> ProgressBars | ProgressLines:
    """Bars if the stream (standard error by default) is a terminal, lines if not."""
    stream = stream or sys.stderr
    return ProgressBars(stream) if stream.isatty() else ProgressLines(stream)


def _label(event: ProgressEvent) -> str:
    phase = event.phase.replace("_", " ")
    return f"{phase} ({event.arm})" if event.arm else phase


def _line(event: ProgressEvent) -> str:
    return f"{_label(event)}: {event.message}"


def _left(first: tuple[float, int], now: float, event: ProgressEvent) -> str:
    since, done_then = first
    done = event.done - done_then
    if done <= 0:
        return ""
    seconds = (now - since) / done * (event.total - event.done)
    return f", about {seconds:.0f} s left"
