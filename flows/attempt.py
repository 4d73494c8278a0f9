"""One attempt of a comparison as a flow run: carry it out, show it, say how it ended.

A flow run of a deployment that the service stopped is set to start again later, while something is
left of the spec's wall-time budget; waiting counts. When the budget is spent, the last attempt's
result stands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Failed

from evidence.errors import ConflictError, InputError, StoreError
from evidence.ledger import LEDGER
from evidence.run import Run
from evidence.spec import Spec
from flows import notices
from flows.flow_lock import FlowRunTaken, carrying_out
from flows.launch import LaunchRequest, make_plan, read_request
from flows.noticeboard import Logger, Noticeboard
from flows.outcome import ExitKind, Outcome
from flows.requeue import (
    AWAITING_CAPACITY,
    AWAITING_SERVICE,
    patience_in_process,
    seconds_until_next_attempt,
    start_again_later,
)
from flows.run import carry_out
from tasks.clocks import run_seconds_left
from tasks.failures import ServiceOutage
from tasks.patience import RetryPolicy
from tasks.progress import Progress
from tasks.service_settings import ServiceSettings

OUT_OF_TIME = "OutOfTime"
_STATE_NAMES: Mapping[ExitKind, str] = {
    "supported": "Supported",
    "refuted": "Refuted",
    "inconclusive": "Inconclusive",
    "stopped_by_gate": "StoppedByGate",
    "capacity": OUT_OF_TIME,
    "service_refused": "ServiceRefused",
}
_HELD_FIELDS = ("lock", "lease", LEDGER)
"""What a conflict is about when another process holds the run, or has written to it since."""


async def flow_run_of_deployment() -> FlowRun | None:
    """The flow run of this process, if it is one of a deployment: only such can start again."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context is not None else None
    return flow_run if flow_run is not None and flow_run.deployment_id is not None else None


@contextlib.contextmanager
def only_process(run_dir: str, flow_run: FlowRun) -> Iterator[None]:
    """Carry out a flow run of a deployment, unless another process does.

    Raises:
        Abort: if another one does; the engine then ends this process without a word.
    """
    try:
        with carrying_out(run_dir, flow_run.id):
            yield
    except FlowRunTaken as taken:
        raise Abort(str(taken)) from None


class Attempt:
    """One attempt.

    Args:
        request: what is asked for.
        service: where models are trained and sampled.
        logger: of the flow run.
        progress: who else listens.
    """

    def __init__(
        self,
        request: LaunchRequest,
        service: ServiceSettings,
        *,
        logger: Logger,
        progress: Progress,
    ) -> None:
        self._request, self._service, self._progress = request, service, progress
        self._logger = logger
        self._path = f"{request.run_dir.rstrip('/')}/{request.run_id}"
        self._board = Noticeboard(self._path, run_id=request.run_id, logger=self._logger)

    async def carried_out(self) -> Outcome:
        """Carry the attempt out and return how it ended; a service that is not there is an error.

        Raises:
            InputError: if the request cannot be carried out.
            ServiceOutage: if the service is not there when the run is started.
        """
        if not PREFECT_API_URL.value():  # the server ends with this call: nobody could look
            return await self._work()
        async with self._board.kept():
            return await self._work()

    async def carried_out_as(self, flow_run: FlowRun) -> State[Any]:
        """Carry the attempt out as a flow run of a deployment, and return its final state.

        Raises:
            Abort: if the flow run starts again later, or another process carries it out.
            InputError: if the request cannot be carried out.
        """
        try:
            with only_process(self._request.run_dir, flow_run):
                async with self._board.kept():
                    outcome = await self._outcome(flow_run)
                return await self._end(outcome, flow_run)
        except ConflictError as conflict:
            if conflict.field in _HELD_FIELDS and "://" in self._request.run_dir:
                # The lease of an object store: most likely another process of this flow run.
                raise Abort(str(conflict)) from None
            raise

    async def _work(self, policy: RetryPolicy | None = None) -> Outcome:
        progress = self._board.listener(self._progress)
        plan = await make_plan(self._request, self._service, progress=progress, policy=policy)
        return await carry_out(plan)

    async def _outcome(self, flow_run: FlowRun) -> Outcome:
        """How the attempt ended; a service or a store that is out of reach is no defect."""
        try:
            return self._standing(flow_run) or await self._work(patience_in_process())
        except ServiceOutage as error:
            return self._interrupted(error, error.failure.retry_after if error.failure else None)
        except StoreError as error:
            return self._interrupted(error)

    def _interrupted(self, error: Exception, retry_after: float | None = None) -> Outcome:
        return Outcome(
            exit_kind="capacity",
            verdict="inconclusive",
            outcome_reason="incomplete_execution",
            reason=str(error),
            run_path=self._path,
            retry_after_seconds=retry_after,
        )

    def _standing(self, flow_run: FlowRun) -> Outcome | None:
        """The last attempt's outcome, where this process comes after the budget was spent."""
        run = self._run()
        if run is None or flow_run.run_count <= 1:
            return None
        left = self._seconds_left(flow_run)
        last = [event for event in run.events() if event["event"] in ("started", "ended")]
        if left is None or left > 0 or not last or last[-1]["event"] != "ended":
            return None
        return Outcome.from_record(last[-1]["outcome"])

    async def _end(self, outcome: Outcome, flow_run: FlowRun) -> State[Any]:
        if outcome.exit_kind == "capacity":
            await self._start_again_if_time_is_left(outcome, flow_run)
        await notices.tell(outcome, run_id=self._request.run_id, logger=self._logger)
        name = _STATE_NAMES[outcome.exit_kind]
        record, message = outcome.to_record(), f"{outcome.verdict}: {outcome.reason}"
        if outcome.exit_kind == "service_refused":
            return Failed(name=name, message=message, data=record)
        return Completed(name=name, message=message, data=record)

    async def _start_again_if_time_is_left(self, outcome: Outcome, flow_run: FlowRun) -> None:
        seconds = seconds_until_next_attempt(outcome.retry_after_seconds)
        left = self._seconds_left(flow_run)
        if left is not None and seconds >= left:
            return
        more = f"The next attempt is in {seconds:.0f} s."
        await notices.tell(outcome, run_id=self._request.run_id, logger=self._logger, more=more)
        await start_again_later(
            flow_run.id,
            seconds=seconds,
            state_name=AWAITING_CAPACITY if self._was_refused() else AWAITING_SERVICE,
            reason=f"{outcome.reason}. {more} {outcome.steps_completed} steps are done.",
        )

    def _was_refused(self) -> bool:
        """Whether the attempt ended with a capacity block, and not because nobody answered."""
        try:
            run = self._run()
            return run is not None and "capacity_block" in (run.result() or {})
        except StoreError:
            return False

    def _seconds_left(self, flow_run: FlowRun) -> float | None:
        """Of the wall-time budget, from the run's first start or, where none is known, the flow run's."""
        with contextlib.suppress(StoreError):  # what the run's start was is not to be had
            run = self._run()
            if run is not None and run.events("started"):
                return run_seconds_left(run, Spec.parse(run.spec))
        budget = read_request(self._request).spec.budget.max_wall_minutes
        if budget is None:
            return None
        now = datetime.now(UTC)
        return 60.0 * budget - (now - (flow_run.start_time or now)).total_seconds()

    def _run(self) -> Run | None:
        try:
            return Run.open(self._path)
        except (InputError, OSError):
            return None
