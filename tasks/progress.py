"""What a run says while it works; whoever starts it shows it as bars, lines or artifacts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """One thing that happened.

    Attributes:
        phase: part of the run: a gate's name, ``base_evaluation``, ``pilot``, ``train``, ``eval``,
            ``waiting`` or ``decision``.
        arm: the arm it belongs to, if it belongs to one.
        done: units finished.
        total: units in all; 0 where there is nothing to count.
        message: one short line for a person.
    """

    phase: str
    arm: str | None = None
    done: int = 0
    total: int = 0
    message: str = ""


class Progress(Protocol):
    """Listens to progress. It must return quickly and must not raise."""

    def __call__(self, event: ProgressEvent) -> None:
        """Take note of one event."""
        ...


def silent(event: ProgressEvent) -> None:
    """A listener that shows nothing."""
    del event


_LISTENER: ContextVar[Progress] = ContextVar("progress listener", default=silent)


@contextmanager
def listening(progress: Progress) -> Iterator[None]:
    """Let what is started inside find its listener: a flow's parameters are plain JSON."""
    token = _LISTENER.set(progress)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def current_listener() -> Progress:
    """The listener of whoever started this, or `silent`."""
    return _LISTENER.get()
