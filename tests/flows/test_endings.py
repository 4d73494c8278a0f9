"""An ending that was cut off is completed by the next process, whatever was done before."""

from __future__ import annotations

from pathlib import Path

import pytest

from evidence.result import StructuredResult
from evidence.run import Run
from flows.endings import complete_ending
from tests.tasks import recorded_runs

CLOSING = {
    "status": "failed",
    "verdict": "inconclusive",
    "outcome_reason": "incomplete_execution",
    "summary": "Stopped.",
    "capacity_block": None,
}


def _ending(folder: Path) -> Run:
    """A run that wrote down how its attempt ends, and one timing."""
    run, _, _ = recorded_runs.create(folder, recorded_runs.Plant())
    StructuredResult(run).start("Running.")
    place = {"attempt": 1, "arm": "dppo", "phase": "train", "step": 0}
    run.append("timing", **place, what="update", seconds=1.0, units=1, samples=0)
    run.append("ending", outcome={}, closing=CLOSING, final=False, attempt=1)
    return run


@pytest.mark.parametrize("done", ["nothing", "closed_without_its_file", "everything"])
def test_ending_that_was_cut_off_is_completed(done: str, tmp_path: Path) -> None:
    run = _ending(tmp_path)
    if done != "nothing":
        StructuredResult(run).finish(**CLOSING)
    if done == "closed_without_its_file":
        Path(f"{run.path}/attempts/1/result.json").unlink()

    complete_ending(run)
    complete_ending(run)

    assert run.read_json("attempts/1/result.json")["status"] == "failed"
    assert run.has_table("timings", key=(1, "dppo", "train", 0))
    assert [event["attempt"] for event in run.events("attempt_closed")] == [1]
    assert len(run.events("ended")) == 1
