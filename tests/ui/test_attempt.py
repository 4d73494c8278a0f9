"""What follows an attempt: start again while the wall-time budget lasts, else its result stands."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import Abort

from evidence.errors import ConflictError, StoreError
from evidence.lease import utc_now
from evidence.ledger import Ledger, Shared
from evidence.object_store import open_store
from evidence.result import StructuredResult
from evidence.run import Run
from evidence.store import Store
from flows import attempt as attempt_module
from flows import requeue
from flows.attempt import Attempt
from flows.catalog import find_spec
from flows.flow_lock import carrying_out
from flows.inputs import read_json
from flows.launch import LaunchRequest
from flows.outcome import Outcome
from tasks.failures import ServiceOutage
from tasks.progress import silent
from tasks.service_settings import ServiceSettings

BUDGET_MINUTES = 10  # of the spec `tiny`
BLOCKED = Outcome(
    exit_kind="capacity",
    verdict="inconclusive",
    outcome_reason="incomplete_execution",
    reason="slots are taken",
    run_path="runs/one",
    steps_completed=3,
)
Carried = Callable[..., Any]


@dataclasses.dataclass
class World:
    """What an attempt did to the world around it."""

    run_dir: Path | str
    told: list[tuple[Outcome, str]] = dataclasses.field(default_factory=list)
    again: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    worked: int = 0

    def attempt(self, *, run_count: int = 1, ends: Outcome | Exception = BLOCKED) -> Any:
        """Carry out one attempt of a deployment's flow run that ends like this."""
        request = LaunchRequest("tiny", "one", run_dir=str(self.run_dir))
        made = Attempt(
            request,
            ServiceSettings(url="http://127.0.0.1:1"),
            logger=logging.getLogger("test"),
            progress=silent,
        )

        async def work(policy: object = None) -> Outcome:
            self.worked += 1
            if isinstance(ends, Exception):
                raise ends
            return ends

        made._work = work  # type: ignore[method-assign]
        now = datetime.now(UTC)
        flow_run = FlowRun(
            id=uuid4(), flow_id=uuid4(), deployment_id=uuid4(), run_count=run_count, start_time=now
        )
        return asyncio.run(made.carried_out_as(flow_run))

    def run(self, *, minutes_ago: float, capacity: bool = True, ended: bool = True) -> Run:
        """A run that was started so long ago and blocked since."""
        at = datetime.now(UTC) - timedelta(minutes=minutes_ago)
        files = find_spec("tiny")
        assert files.execution is not None
        run = Run.create(
            str(self.run_dir),
            run_id="one",
            spec=read_json(files.spec, field="spec"),
            execution=read_json(files.execution, field="execution"),
            clock=lambda: at,
        )
        run.append("started", attempt=1)
        result = StructuredResult(run)
        result.start("Started.")
        if ended:
            block = {
                "error": "slots are taken",
                "comparison_steps_completed": 0,
                "released_clients": True,
            }
            result.finish(
                status="failed",
                verdict="inconclusive",
                outcome_reason="incomplete_execution",
                summary="No capacity.",
                capacity_block=block if capacity else None,
            )
            run.append("ended", outcome=BLOCKED.to_record(), final=False)
        return run


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)

    async def tell(outcome: Outcome, *, run_id: str, logger: object, more: str = "") -> bool:
        made.told.append((outcome, more))
        return True

    async def again(flow_run_id: object, **asked: Any) -> None:
        made.again.append(asked)
        raise Abort("later")

    async def quiet(self: object, *args: object) -> None:
        return None

    monkeypatch.setattr(attempt_module.notices, "tell", tell)
    monkeypatch.setattr(attempt_module, "start_again_later", again)
    monkeypatch.setattr(attempt_module.Noticeboard, "show", quiet)
    monkeypatch.setenv(requeue.REQUEUE_VARIABLE, "60")
    return made


def test_block_is_followed_by_another_attempt_while_the_budget_lasts(world: World) -> None:
    world.run(minutes_ago=BUDGET_MINUTES - 2)

    with pytest.raises(Abort):
        world.attempt()

    [asked] = world.again
    assert (asked["seconds"], asked["state_name"]) == (60.0, "AwaitingCapacity")
    assert "slots are taken" in asked["reason"]
    assert [more for _, more in world.told] == ["The next attempt is in 60 s."]


def test_outage_is_named_as_such(world: World) -> None:
    world.run(minutes_ago=1, capacity=False)

    with pytest.raises(Abort):
        world.attempt()

    assert world.again[0]["state_name"] == "AwaitingService"


def test_service_that_is_not_there_at_the_start_is_waited_for(world: World) -> None:
    with pytest.raises(Abort):
        world.attempt(ends=ServiceOutage("nobody answers", what="look-up"))

    assert world.again[0]["state_name"] == "AwaitingService"


def test_store_that_does_not_answer_is_waited_for(world: World) -> None:
    with pytest.raises(Abort):
        world.attempt(ends=StoreError("ledger", "timeout", "an object store that answers"))

    assert world.again[0]["state_name"] == "AwaitingService"


def test_store_that_goes_away_for_good_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the run's start can be read: the budget counts from the flow run's."""
    world.run(minutes_ago=BUDGET_MINUTES + 60)

    def unreachable(self: Run, event: str | None = None) -> list[dict[str, Any]]:
        raise StoreError("ledger", "timeout", "an object store that answers")

    monkeypatch.setattr(Run, "events", unreachable)

    with pytest.raises(Abort):
        world.attempt()

    assert world.again[0]["state_name"] == "AwaitingService"


def test_wait_that_would_pass_the_budget_leaves_the_attempts_result(world: World) -> None:
    """9.5 of 10 minutes are used, waiting included, and the next attempt would be in 1."""
    world.run(minutes_ago=BUDGET_MINUTES - 0.5)

    state = world.attempt()

    assert world.again == []
    assert (state.type, state.name) == (StateType.COMPLETED, "OutOfTime")
    assert state.data == BLOCKED.to_record()
    assert len(world.told) == 1


def test_process_that_comes_after_the_budget_does_no_more_work(world: World) -> None:
    """The machine slept while the flow run waited: the last attempt's result stands."""
    world.run(minutes_ago=BUDGET_MINUTES + 60)

    state = world.attempt(run_count=2)

    assert world.worked == 0
    assert (state.name, state.data) == ("OutOfTime", BLOCKED.to_record())


def test_person_who_asks_anew_after_the_budget_is_obeyed(world: World) -> None:
    world.run(minutes_ago=BUDGET_MINUTES + 60)

    world.attempt(run_count=1)

    assert world.worked == 1


def test_attempt_that_was_interrupted_goes_on_after_the_budget(world: World) -> None:
    world.run(minutes_ago=BUDGET_MINUTES + 60, ended=False)

    world.attempt(run_count=2)

    assert world.worked == 1


@pytest.mark.parametrize(
    ("change", "state_type", "name"),
    [
        ({"exit_kind": "supported", "verdict": "supported"}, StateType.COMPLETED, "Supported"),
        ({"exit_kind": "refuted", "verdict": "refuted"}, StateType.COMPLETED, "Refuted"),
        ({"exit_kind": "inconclusive"}, StateType.COMPLETED, "Inconclusive"),
        ({"exit_kind": "stopped_by_gate"}, StateType.COMPLETED, "StoppedByGate"),
        ({"exit_kind": "service_refused"}, StateType.FAILED, "ServiceRefused"),
    ],
)
def test_state_says_how_the_run_ended(
    change: dict[str, Any], state_type: StateType, name: str, world: World
) -> None:
    state = world.attempt(ends=dataclasses.replace(BLOCKED, **change))

    assert (state.type, state.name) == (state_type, name)
    assert len(world.told) == 1


def test_second_process_of_the_same_flow_run_leaves(world: World, monkeypatch: Any) -> None:
    real = carrying_out

    def twice(run_dir: str, flow_run_id: Any) -> Any:
        held = real(run_dir, flow_run_id)
        held.__enter__()
        monkeypatch.setattr(attempt_module, "held", held, raising=False)
        return real(run_dir, flow_run_id)

    monkeypatch.setattr(attempt_module, "carrying_out", twice)

    with pytest.raises(Abort):
        world.attempt()

    assert (world.worked, world.told) == (0, [])


def _a_line_of_another(store: Store) -> None:
    store.append_line("ledger.jsonl", b'{"n":1,"event":"x","token":2}', number=1)
    Ledger(store, clock=utc_now, token=lambda: 1, shared=Shared()).append("y", {})


def _a_line_that_is_missing(store: Store) -> None:
    store.append_line("ledger.jsonl", b'{"n":2,"event":"x"}', number=2)
    store.read_lines("ledger.jsonl")


@pytest.mark.parametrize(
    ("happens", "ends"),
    [(_a_line_of_another, Abort), (_a_line_that_is_missing, ConflictError)],
)
def test_process_that_was_passed_over_on_an_object_store_leaves(
    happens: Callable[[Store], None], ends: type[BaseException], world: World
) -> None:
    """Another one of the flow run has written since; a ledger with a gap is an error instead."""
    fsspec.filesystem("memory").store.clear()
    with pytest.raises(ConflictError) as conflict:
        happens(open_store("memory://bucket/runs/one"))
    world.run_dir = "memory://bucket/runs"

    with pytest.raises(ends):
        world.attempt(ends=conflict.value)


def test_run_that_another_program_works_on_is_an_error(world: World) -> None:
    taken = ConflictError("lock", "pid 7", "no other process")

    with pytest.raises(ConflictError):
        world.attempt(ends=taken)
