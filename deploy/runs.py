"""Find runs on disk and say how far each is."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.errors import InputError
from evidence.object_store import open_store
from evidence.run import Run
from evidence.run_files import IDENTITY


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
    """Open a run by its folder, or by its id under the folder of runs; either may be a URL.

    Raises:
        InputError: if there is no run.
    """
    candidates = [run] if "://" in run else [run, f"{run_dir.rstrip('/')}/{run}"]
    for candidate in candidates:
        if open_store(candidate).exists(IDENTITY):
            return Run.open(candidate)
    raise InputError("RUN", run, f"a run's folder, or the id of a run in {run_dir}")


def list_runs(run_dir: str) -> list[Run]:
    """Open every run in a folder of runs, or under a URL, sorted by name."""
    if "://" not in run_dir:
        folders = sorted(path.parent for path in Path(run_dir).glob(f"*/{IDENTITY}"))
        return [Run.open(str(folder)) for folder in folders]
    paths = [path.split("/") for path in open_store(run_dir).paths()]
    names = sorted(parts[0] for parts in paths if parts[1:] == [IDENTITY])
    return [Run.open(f"{run_dir.rstrip('/')}/{name}") for name in names]


def describe(run: Run) -> RunState:
    """Say how far a run is, from its files alone."""
    result = run.result() or {}
    closed = any(event["final"] for event in run.events("ended"))
    ended = closed or bool(run.events("finished"))  # of a comparison, or of a diagnostic
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
