"""Server, worker and flow process are killed; the same flow run goes on and ends as ever.

On PostgreSQL, which a server for several machines needs; the walk uses SQLite.
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import psutil
import pytest

from evidence.run import Run
from tests.ui.needs import need
from tests.ui.postgres import find_postgres, running_postgres
from tests.ui.running_ui import RunningUi, no_capacity, running_ui

TIMES = {
    "GATED_RL_PATIENCE_SECONDS": "3",
    "GATED_RL_REQUEUE_SECONDS": "30",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
}


def kill(processes: list[psutil.Process]) -> int:
    """Kill at once, as a power cut would; return how many there were."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=10)
    return len(processes)


def await_event(run_path: Path, event: str, *, seconds: float = 120.0) -> None:
    """Wait until a run has got so far."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            if Run.open(str(run_path)).events(event):
                return
        time.sleep(0.05)
    raise TimeoutError(f"no event {event} in {run_path}")


def processes_of(ui: RunningUi) -> list[psutil.Process]:
    return ui.children("prefect server start") + ui.children("prefect worker start")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_flow_runs_survive_whatever_is_killed(tmp_path: Path) -> None:
    """One is killed with server and worker in mid-run, one while it waits for capacity."""
    programs = need(find_postgres(), "PostgreSQL (Debian's package postgresql)")
    with (
        running_postgres(programs) as database,
        running_ui(tmp_path, "--database", database, **TIMES) as ui,
    ):
        whole = ui.launch("whole")
        assert ui.await_state(whole, "Inconclusive") == "Inconclusive"

        killed = ui.launch("killed")
        await_event(ui.run_dir / "killed", "initialization")
        assert kill(processes_of(ui) + ui.children("prefect.engine")) >= 3

        ui.await_state(killed, "AwaitingRetry", "Inconclusive")
        ui.faults(no_capacity(skip=2))
        waiting = ui.launch("waiting")
        ui.await_state(waiting, "AwaitingCapacity")
        assert kill(processes_of(ui)) == 2
        ui.faults()

        assert ui.await_state(killed, "Inconclusive") == "Inconclusive"
        assert ui.await_state(waiting, "Inconclusive") == "Inconclusive"
        for flow_run in (killed, waiting):
            assert ui.flow_run(flow_run)["run_count"] >= 2
        assert "Crashed" in ui.state_names(killed)
        assert "prefect.db" not in {path.name for path in tmp_path.rglob("*.db")}
        below = ui.children("")
        assert ui.stop() == 0
        assert not [process for process in below if process.is_running()]

    runs = [Run.open(str(ui.run_dir / name)) for name in ("whole", "killed", "waiting")]
    digests = [run.content_digests() for run in runs]
    assert digests[0] == digests[1] == digests[2]
    verdicts = [(run.result() or {}).get("verdict") for run in runs]
    assert verdicts == ["inconclusive"] * 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_unfinished_run_goes_on_when_the_page_is_started_again(tmp_path: Path) -> None:
    """Ctrl-C in mid-run leaves no process behind; the next start carries the run to its end."""
    with running_ui(tmp_path, **TIMES) as ui:
        flow_run = ui.launch("stopped")
        await_event(ui.run_dir / "stopped", "initialization")
        below = ui.children("")
        assert len(below) >= 5
        assert ui.stop() == 0
        assert not [process for process in below if process.is_running()]

    with running_ui(tmp_path, **TIMES) as ui:
        assert ui.await_state(flow_run, "Inconclusive") == "Inconclusive"
        assert ui.flow_run(flow_run)["run_count"] >= 2
