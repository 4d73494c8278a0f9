"""One process per run on an S3 store: two that want it, and one that comes back from a pause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evidence.errors import ConflictError
from evidence.run import Run
from evidence.run_files import RESULT
from tests.chaos.world import s3_server, settle

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ROOT = Path(__file__).resolve().parents[3]
LEASE, SKEW = 3.0, 0.5
LONG_LEASE = "60"
Starter = Callable[[str, int], "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def s3_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a folder on a local S3 server, whose address is in the environment."""
    before = dict(os.environ)
    with s3_server(tmp_path_factory.mktemp("s3")) as (root, environment):
        times = {"GATED_RL_LEASE_SECONDS": str(LEASE), "GATED_RL_CLOCK_SKEW_SECONDS": str(SKEW)}
        settle(environment | times)
        yield root
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def run(s3_root: str, request: pytest.FixtureRequest) -> Run:
    """An empty run on the store."""
    name = request.node.name.removeprefix("test_")
    return Run.create(s3_root, run_id=name, spec={"title": "t"})


@pytest.fixture
def start(run: Run) -> Iterator[Starter]:
    """Starts processes that want to write so many lines to the run."""
    started: list[subprocess.Popen[str]] = []

    def starting(name: str, lines: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.evidence.run_directory.holder", run.path, name]
        process = subprocess.Popen(
            [*command, str(lines)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield starting
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _writers(run: Run) -> list[str]:
    return [event["by"] for event in run.events("line")]


def test_of_two_processes_one_writes(
    run: Run, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started together: one has the lease, the other names it and ends.

    The lease outlasts any stall of a busy machine: this is about claims at one moment.
    """
    monkeypatch.setenv("GATED_RL_LEASE_SECONDS", LONG_LEASE)
    both = [start(name, 100_000) for name in ("a", "b")]

    said = {name: _said(process) for name, process in zip("ab", both, strict=True)}

    (holder,) = [name for name, words in said.items() if words == "held"]
    (refused,) = [process for name, process in zip("ab", both, strict=True) if name != holder]
    assert refused.wait(timeout=60) == 3
    assert "no other process" in " ".join(said.values())
    assert set(_writers(run)) <= {holder}


def test_paused_process_writes_nothing_once_another_has_taken_over(
    run: Run, start: Starter
) -> None:
    """Stopped past its lease, then let go on: its next write is refused, the ledger is the other's."""
    paused = start("paused", 100_000)
    assert _said(paused) == "held"
    time.sleep(0.3)
    os.kill(paused.pid, signal.SIGSTOP)
    before = len(_writers(run))
    time.sleep(LEASE + SKEW + 0.3)
    other = start("other", 10)
    assert _said(other) == "held"
    assert other.wait(timeout=60) == 0

    os.kill(paused.pid, signal.SIGCONT)

    assert _said(paused).startswith("refused: ")
    assert paused.wait(timeout=60) == 3
    writers = _writers(run)
    assert writers[before:] in (["other"] * 10, ["paused", *["other"] * 10])
    assert (run.result() or {})["by"] == "other"
    tokens = [event["token"] for event in run.events("line")]
    assert tokens == sorted(tokens)


def test_killed_process_is_passed_over_when_its_lease_has_run_out(run: Run, start: Starter) -> None:
    """At once the run is refused, naming the holder; after the lease and the skew it is free."""
    killed = start("killed", 100_000)
    assert _said(killed) == "held"
    killed.kill()
    killed.wait()

    with pytest.raises(ConflictError, match="no other process"), run.lock():
        pass
    time.sleep(LEASE + SKEW + 0.3)
    late = start("late", 1)

    assert _said(late) == "held"
    assert late.wait(timeout=60) == 0


def test_result_that_a_paused_process_put_back_is_not_believed(run: Run) -> None:
    """Paused between its line in the ledger and the file: the ledger tells, and the file is mended."""
    with run.lock():
        run.replace_result({"status": "running", "number": 1})
        early = run.read_bytes(RESULT)
        run.replace_result({"status": "running", "number": 2})
    run.store.replace(RESULT, early)

    again = Run.open(run.path)

    assert again.result() == {"status": "running", "number": 2}
    with again.lock():
        assert again.read_json(RESULT) == {"status": "running", "number": 2}
