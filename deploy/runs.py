"""Find runs on disk and say how far each is."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.errors import InputError
from evidence.run import Run


@dataclass(frozen=True, slots=True)
class RunState:
    """One line about a run.

    Attributes:
        run_id: its name.
        path: its folder.
        state: ``working`` (a process holds it), ``ended`` (closed for good) or ``stopped``
            (nobody works on it; the same command goes on).
        verdict: the verdict posted last, if there is one.
        attempt: number of the current or last attempt.
        gates: status of each gate that has answered.
        completed_arms: arms that are trained and evaluated.
        summary: what was posted last, in words.
    """

    run_id: str
    path: str
    state: str
    verdict: str | None
    attempt: int
    gates: Mapping[str, str]
    completed_arms: tuple[str, ...]
    summary: str

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return {
            "run_id": self.run_id,
            "path": self.path,
            "state": self.state,
            "verdict": self.verdict,
            "attempt": self.attempt,
            "gates": dict(self.gates),
            "completed_arms": list(self.completed_arms),
            "summary": self.summary,
        }


def find_run(run: str, *, run_dir: str) -> Run:
    """Open a run by its folder, or by its id under the folder of runs.

    Raises:
        InputError: if there is no run.
    """
    for candidate in (Path(run), Path(run_dir) / run):
        if (candidate / "identity.json").is_file():
            return Run.open(str(candidate))
    raise InputError("RUN", run, f"a run's folder, or the id of a run in {run_dir}")


def list_runs(run_dir: str) -> list[Run]:
    """Open every run in a folder of runs, sorted by name."""
    root = Path(run_dir)
    found = sorted(path.parent for path in root.glob("*/identity.json")) if root.is_dir() else []
    return [Run.open(str(path)) for path in found]


def describe(run: Run) -> RunState:
    """Say how far a run is, from its files alone."""
    result = run.result() or {}
    ended = bool(run.events("finished"))
    state = "working" if run.lock_holder() else "ended" if ended else "stopped"
    return RunState(
        run_id=run.run_id,
        path=run.path,
        state=state,
        verdict=result.get("verdict"),
        attempt=max(1, len(run.events("attempt_closed")) if ended else run.attempt),
        gates={name: gate.status for name, gate in run.gates().items()},
        completed_arms=tuple(result.get("completed_arms", ())),
        summary=str(result.get("summary", "")),
    )
