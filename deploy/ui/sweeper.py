"""Find flow runs whose process is gone, and make them go on in a new one.

A worker that is killed or told to stop leaves its flow runs as they were: running, for ever. Death
is proved, not guessed: the locks that a living process holds are free (the flow run's own and the
run directory's), and stay free for longer than a process needs between them. The flow run is then
taken through ``Crashed``, which frees the slots that it held, and set to start again. Should two
processes meet all the same, the second one finds the locks taken and leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import Crashed, Scheduled

from evidence.errors import InputError, StoreError
from evidence.run import Run
from flows.flow_lock import is_carried_out

FLOWS = ("comparison", "diagnostic")
GOES_ON = "AwaitingRetry"
_RESTART_SECONDS = 3.0
_MOST_IN_VAIN = 5
_PAGE = 200
Clock = Callable[[], datetime]


@dataclass(frozen=True, slots=True)
class Grace:
    """How long locks must be seen free before a flow run counts as dead, seconds.

    ``crashed``: the worker reports a crash a second time about a second later, which would end a
    flow run that has been set to start again by then. ``running``: a flow run's last word may be
    late behind a busy server. ``pending``: Prefect and torch are loaded before a lock is taken.
    ``leased``: the same where runs lie on an object store, whose leases are given back late.
    """

    crashed: float = 8.0
    running: float = 20.0
    pending: float = 120.0
    leased: float = 120.0


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


class Sweeper:
    """Looks again and again; each look needs the ones before it.

    Args:
        client: of the Prefect server.
        grace: how long locks must be free.
        clock: current time with zone.
    """

    def __init__(
        self, client: PrefectClient, *, grace: Grace | None = None, clock: Clock = utc_now
    ) -> None:
        self._client, self._grace, self._clock = client, grace or Grace(), clock
        self._free_since: dict[tuple[UUID, str], datetime] = {}
        self._given_up: set[tuple[UUID, str]] = set()

    async def sweep(self) -> list[str]:
        """Look once, and make the dead go on.

        Returns:
            One line for each flow run that was acted on.
        """
        said = []
        candidates = await self._candidates()
        seen = {_state_key(flow_run) for flow_run in candidates}
        self._free_since = {key: at for key, at in self._free_since.items() if key in seen}
        for flow_run in candidates:
            if _state_key(flow_run) not in self._given_up and self._is_dead(flow_run):
                line = await self._make_go_on(flow_run)
                if line is not None:
                    said.append(line)
        return said

    @property
    def waiting(self) -> bool:
        """Whether the last look saw flow runs without a process that are not yet proved dead."""
        return not self._free_since.keys() <= self._given_up

    async def _candidates(self) -> list[FlowRun]:
        types = [StateType.RUNNING, StateType.PENDING, StateType.CRASHED]
        found: list[FlowRun] = []
        while True:
            page = await self._client.read_flow_runs(
                flow_filter=FlowFilter(name=FlowFilterName(any_=list(FLOWS))),
                flow_run_filter=FlowRunFilter(
                    state=FlowRunFilterState(type=FlowRunFilterStateType(any_=types)),
                    deployment_id=FlowRunFilterDeploymentId(is_null_=False),
                ),
                limit=_PAGE,
                offset=len(found),
            )
            found += page
            if len(page) < _PAGE:
                return found

    def _is_dead(self, flow_run: FlowRun) -> bool:
        now, key = self._clock(), _state_key(flow_run)
        if self._is_held(flow_run):
            self._free_since.pop(key, None)
            return False
        since = self._free_since.setdefault(key, now)
        return (now - since).total_seconds() >= self._patience(flow_run)

    def _is_held(self, flow_run: FlowRun) -> bool:
        run_dir, path = _place(flow_run)
        if is_carried_out(run_dir, flow_run.id):
            return True
        try:
            return Run.open(path).lock_holder() is not None
        except StoreError:
            return True  # the store does not answer: nothing is proved
        except (InputError, OSError):
            return False  # it was never created, or cannot be read: nobody can work on it

    def _patience(self, flow_run: FlowRun) -> float:
        if flow_run.state_type == StateType.CRASHED:
            return self._grace.crashed
        if "://" in _place(flow_run)[0]:
            return self._grace.leased
        pending = flow_run.state_type == StateType.PENDING
        return self._grace.pending if pending else self._grace.running

    async def _make_go_on(self, flow_run: FlowRun) -> str | None:
        """Set a dead flow run to start again, unless it died as often without getting anywhere."""
        fresh = await self._client.read_flow_run(flow_run.id)
        if _state_key(fresh) != _state_key(flow_run) or self._is_held(flow_run):
            return None
        events = _ledger_length(flow_run)
        mark = f"({events} events in its ledger)"
        if await self._in_vain(flow_run, mark):
            self._given_up.add(_state_key(flow_run))
            return None
        self._free_since.pop(_state_key(flow_run), None)
        reason = f"Its process is gone; it goes on in a new one {mark}"
        if flow_run.state_type != StateType.CRASHED:
            crashed: State[Any] = Crashed(message="Its process is gone")
            await self._client.set_flow_run_state(flow_run.id, crashed, force=True)
        due = self._clock() + timedelta(seconds=_RESTART_SECONDS)
        again: State[Any] = Scheduled(name=GOES_ON, message=reason, scheduled_time=due)
        await self._client.set_flow_run_state(flow_run.id, again, force=True)
        return f"{flow_run.name}: its process is gone, it goes on in a new one"

    async def _in_vain(self, flow_run: FlowRun, mark: str) -> bool:
        """Whether it was made to go on several times and got no further since."""
        states = await self._client.read_flow_run_states(flow_run.id)
        tries = sum(state.name == GOES_ON and mark in (state.message or "") for state in states)
        return tries >= _MOST_IN_VAIN


def _state_key(flow_run: FlowRun) -> tuple[UUID, str]:
    return flow_run.id, str(flow_run.state_id)


def _place(flow_run: FlowRun) -> tuple[str, str]:
    """The folder of runs and the run directory that a flow run's parameters name."""
    parameters: Mapping[str, Any] = flow_run.parameters
    run_dir = str(parameters.get("run_dir", "runs"))
    return run_dir, f"{run_dir.rstrip('/')}/{parameters.get('run_id')}"


def _ledger_length(flow_run: FlowRun) -> int:
    try:
        return len(Run.open(_place(flow_run)[1]).events())
    except (InputError, OSError):
        return 0
