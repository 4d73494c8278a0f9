"""Runs are found and described from their files alone, on a disk or on an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from deploy.runs import describe, find_run, list_runs
from evidence.errors import InputError
from evidence.run import Run


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder of runs: a local one, or a URL."""
    if request.param == "disk":
        yield str(tmp_path)
        return
    yield f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").store.clear()


def _run(root: str, name: str) -> Run:
    return Run.create(root, run_id=name, spec={"title": name})


def test_runs_are_listed_and_found_by_id_or_place(root: str) -> None:
    made = [_run(root, name) for name in ("b", "a")]

    assert [run.run_id for run in list_runs(root)] == ["a", "b"]
    assert find_run("a", run_dir=root).run_id == "a"
    assert find_run(made[0].path, run_dir="elsewhere").run_id == "b"
    with pytest.raises(InputError, match="the id of a run"):
        find_run("c", run_dir=root)


def test_folder_without_runs_is_an_empty_list(tmp_path: Path) -> None:
    assert list_runs(str(tmp_path / "none")) == []


def test_run_is_working_stopped_or_ended(root: str) -> None:
    """Stopped after a capacity block, which closes an attempt; ended after a final ending."""
    run = _run(root, "r")
    with run.lock():
        working = describe(run).state
    run.append("attempt_closed", attempt=1)
    run.append("ended", outcome={}, final=False)
    blocked = describe(run)
    run.append("attempt_closed", attempt=2)
    run.append("ended", outcome={}, final=True)
    ended = describe(run)

    assert (working, blocked.state, ended.state) == ("working", "stopped", "ended")
    assert (blocked.attempt, ended.attempt) == (2, 2)
