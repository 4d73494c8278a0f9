"""How far a run is, told from what it writes: the phase in which a kill finds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PHASES = (
    "probe",
    "gates",
    "base evaluation",
    "pilot",
    "feasibility",
    "training",
    "evaluation",
    "decision",
    "bundle",
)
_AFTER_GATE = {"service_probe": 1, "evaluator": 2, "activation": 4, "feasibility": 5}
_DECIDING = ("tables/observations/", "tables/decision/")


class Progress:
    """The furthest phase that a run has reached."""

    def __init__(self) -> None:
        self.phase = 0

    def event(self, event: Mapping[str, Any]) -> None:
        """Take note of a line of the ledger."""
        kind = event.get("event")
        reached = 0
        if kind == "gate":
            reached = _AFTER_GATE.get(str(event["gate"]), 0)
        elif kind == "timing" and (event["arm"], event["phase"]) == ("base", "eval"):
            reached = 3
        elif kind == "published":
            reached = 6
        elif kind == "ending" and event["final"]:
            reached = 8
        self.phase = max(self.phase, reached)

    def path(self, path: str) -> None:
        """Take note of a file that is about to be written."""
        if path.startswith(_DECIDING):
            self.phase = max(self.phase, 7)
