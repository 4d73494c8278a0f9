"""Only flow runs whose process is proved dead go on, once, and not for ever."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType

from deploy.ui.sweeper import Sweeper
from evidence.errors import StoreError
from evidence.run import Run
from flows.flow_lock import FlowRunTaken, carrying_out, is_carried_out
from tests.chaos.world import s3_server, settle
from tests.evidence.finished_run import execution, spec

ROOT = Path(__file__).resolve().parents[2]
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
PROVED_DEAD = 130


class Server:
    """One flow run on a server that only remembers."""

    def __init__(self, run_dir: Path | str, state_type: StateType = StateType.RUNNING) -> None:
        self.history: list[State[Any]] = []
        self.flow_run = FlowRun(
            id=uuid4(),
            flow_id=uuid4(),
            name="brave-fox",
            deployment_id=uuid4(),
            parameters={"run_dir": str(run_dir), "run_id": "one"},
        )
        self.put(State(type=state_type))

    def put(self, state: State[Any]) -> None:
        state = state.model_copy(update={"id": uuid4()})
        self.history.append(state)
        self.flow_run = self.flow_run.model_copy(
            update={"state": state, "state_id": state.id, "state_type": state.type}
        )

    async def read_flow_runs(self, **asked: Any) -> list[FlowRun]:
        wanted = asked["flow_run_filter"].state.type.any_
        assert asked["flow_run_filter"].deployment_id.is_null_ is False
        return [self.flow_run] if self.flow_run.state_type in wanted else []

    async def read_flow_run(self, flow_run_id: UUID) -> FlowRun:
        return self.flow_run

    async def read_flow_run_states(self, flow_run_id: UUID) -> list[State[Any]]:
        return self.history

    async def set_flow_run_state(
        self, flow_run_id: UUID, state: State[Any], *, force: bool
    ) -> None:
        assert force
        self.put(state)

    @property
    def names(self) -> list[str | None]:
        return [state.name for state in self.history]


def sweeping(server: Server) -> Callable[[float], list[str]]:
    """Sweeps at so many seconds after the start."""
    now = [START]
    sweeper = Sweeper(server, clock=lambda: now[0])  # type: ignore[arg-type]

    def sweep(at: float) -> list[str]:
        now[0] = START + timedelta(seconds=at)
        return asyncio.run(sweeper.sweep())

    return sweep


@pytest.mark.parametrize(
    ("state_type", "patience"),
    [(StateType.CRASHED, 8), (StateType.RUNNING, 20), (StateType.PENDING, 120)],
)
def test_dead_flow_run_goes_on_after_its_grace(
    state_type: StateType, patience: int, tmp_path: Path
) -> None:
    server = Server(tmp_path, state_type)
    sweep = sweeping(server)

    assert sweep(0) == []
    assert sweep(patience - 0.1) == []
    assert len(sweep(patience)) == 1

    assert server.names[-1] == "AwaitingRetry"
    assert server.flow_run.state is not None
    due = server.flow_run.state.state_details.scheduled_time
    assert due == START + timedelta(seconds=patience + 3)
    assert server.history[-2].type == StateType.CRASHED


@pytest.mark.parametrize("state_type", [StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED])
def test_flow_run_that_has_ended_is_left_alone(state_type: StateType, tmp_path: Path) -> None:
    server = Server(tmp_path, state_type)
    sweep = sweeping(server)

    assert sweep(0) == sweep(PROVED_DEAD) == []


def test_flow_run_with_a_living_process_is_left_alone(tmp_path: Path) -> None:
    server = Server(tmp_path)
    sweep = sweeping(server)

    with carrying_out(str(tmp_path), server.flow_run.id):
        assert sweep(0) == sweep(PROVED_DEAD) == []

    assert sweep(PROVED_DEAD) == []
    assert len(sweep(PROVED_DEAD + 20)) == 1


def test_flow_run_whose_run_somebody_works_on_is_left_alone(tmp_path: Path) -> None:
    run = Run.create(str(tmp_path), run_id="one", spec=spec(), execution=execution())
    server = Server(tmp_path)
    sweep = sweeping(server)

    with run.lock():
        assert sweep(0) == sweep(PROVED_DEAD) == []


def test_store_that_does_not_answer_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is out of reach the process may be well; when it is back, the proof begins anew."""
    Run.create(str(tmp_path), run_id="one", spec=spec(), execution=execution())
    server = Server(tmp_path)
    sweep = sweeping(server)

    def silent(*_: object, **__: object) -> Run:
        raise StoreError("ledger", "timeout", "an object store that answers")

    assert sweep(0) == []
    with monkeypatch.context() as out_of_reach:
        out_of_reach.setattr(Run, "open", silent)
        assert sweep(21) == sweep(PROVED_DEAD) == []

    assert sweep(PROVED_DEAD) == []
    assert len(sweep(PROVED_DEAD + 20)) == 1


@pytest.mark.slow
def test_run_on_s3_goes_on_when_its_lease_has_run_out_for_long_enough(tmp_path: Path) -> None:
    """The lease says who is alive where there are no file locks; then 120 s without anybody."""
    before = dict(os.environ)
    try:
        with s3_server(tmp_path) as (root, environment):
            times = {"GATED_RL_LEASE_SECONDS": "1", "GATED_RL_CLOCK_SKEW_SECONDS": "0.1"}
            settle(environment | times)
            run = Run.create(root, run_id="one", spec=spec(), execution=execution())
            server = Server(root)
            sweep = sweeping(server)
            module = "tests.evidence.run_directory.holder"
            command = [sys.executable, "-m", module, run.path, "a", "100000"]
            holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            assert holder.stdout is not None
            with holder.stdout:
                assert holder.stdout.readline() == "held\n"

                assert sweep(0) == sweep(PROVED_DEAD) == []
                holder.kill()
                holder.wait()
                while Run.open(run.path).lock_holder() is not None:
                    time.sleep(0.1)

                assert sweep(PROVED_DEAD) == sweep(PROVED_DEAD + 119) == []
                assert len(sweep(PROVED_DEAD + 120)) == 1
                assert server.names[-1] == "AwaitingRetry"
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_lock_must_be_free_without_a_break(tmp_path: Path) -> None:
    server = Server(tmp_path)
    sweep = sweeping(server)

    assert sweep(0) == []
    with carrying_out(str(tmp_path), server.flow_run.id):
        assert sweep(19) == []
    assert sweep(21) == []
    assert len(sweep(41)) == 1


def test_new_state_starts_the_proof_anew(tmp_path: Path) -> None:
    server = Server(tmp_path)
    sweep = sweeping(server)

    assert sweep(0) == []
    server.put(State(type=StateType.RUNNING))
    assert sweep(25) == []


def test_flow_run_that_dies_again_and_again_is_given_up_unless_it_gets_on(tmp_path: Path) -> None:
    run = Run.create(str(tmp_path), run_id="one", spec=spec(), execution=execution())
    server = Server(tmp_path, StateType.CRASHED)
    sweep = sweeping(server)

    def die_and_sweep(at: float) -> int:
        if server.names[-1] == "AwaitingRetry":
            server.put(State(type=StateType.CRASHED))
        return len(sweep(at)) + len(sweep(at + 10))

    assert [die_and_sweep(100 * n) for n in range(7)] == [1, 1, 1, 1, 1, 0, 0]

    run.append("started", attempt=1)
    fresh = sweeping(server)
    assert len(fresh(800)) + len(fresh(820)) == 1


def test_second_process_of_a_flow_run_finds_the_lock_taken(tmp_path: Path) -> None:
    flow_run_id = uuid4()

    with carrying_out(str(tmp_path), flow_run_id):
        assert is_carried_out(str(tmp_path), flow_run_id)
        with pytest.raises(FlowRunTaken), carrying_out(str(tmp_path), flow_run_id):
            pass
        assert is_carried_out(str(tmp_path), flow_run_id)

    assert not is_carried_out(str(tmp_path), flow_run_id)
