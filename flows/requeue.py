"""Set the same flow run to start again later, in place.

A flow cannot do that by returning a state: the engine takes a scheduled state for a crash. The
state is set through the API instead, by force, and the process ends without reporting one. The
flow run keeps its id, its parameters and its place in the list, and nothing runs while it waits.

A server that cannot be reached is asked again for some minutes. After that the process ends all
the same: the flow run's state stays as it was, and the sweeper, which finds no process behind it,
sets it to start again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Never
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort, ObjectNotFound, PrefectException
from prefect.states import Scheduled

from evidence.errors import InputError
from tasks.patience import RetryPolicy

AWAITING_CAPACITY = "AwaitingCapacity"
AWAITING_SERVICE = "AwaitingService"
REQUEUE_VARIABLE = "GATED_RL_REQUEUE_SECONDS"
"""Environment variable: seconds until the next attempt, whatever the service asks for."""
PATIENCE_VARIABLE = "GATED_RL_PATIENCE_SECONDS"
"""Environment variable: how long a process of a flow run waits before it leaves and is started
again later. By default as long as a plain run waits: 10 minutes before the first step, then 30."""
SHORTEST_SECONDS = 30.0
"""A worker takes runs up to 10 s before they are due: sooner, two processes could meet."""
USUAL_SECONDS = 900.0
LONGEST_SECONDS = 6 * 3600.0
TRIES = 31
"""How often the server is asked to set the state: for five minutes, beside its client's own tries."""
BETWEEN_TRIES_SECONDS = 10.0
Sleep = Callable[[float], Awaitable[None]]
_LOG = logging.getLogger(__name__)


def seconds_until_next_attempt(retry_after: float | None) -> float:
    """How long to wait before the service is asked again.

    Args:
        retry_after: seconds that the service asked to wait, if it said.

    Raises:
        InputError: if the setting is no number of seconds above 0.
    """
    given = _seconds_from(REQUEUE_VARIABLE)
    if given is not None:
        return given
    wanted = USUAL_SECONDS if retry_after is None else retry_after
    return min(max(wanted, SHORTEST_SECONDS), LONGEST_SECONDS)


def patience_in_process() -> RetryPolicy:
    """How long the service is asked again before the process leaves.

    Raises:
        InputError: if the setting is no number of seconds above 0.
    """
    given, usual = _seconds_from(PATIENCE_VARIABLE), RetryPolicy()
    if given is None:
        return usual
    return replace(
        usual,
        before_first_step=min(given, usual.before_first_step),
        after_first_step=min(given, usual.after_first_step),
    )


def _seconds_from(variable: str) -> float | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= LONGEST_SECONDS:
        raise InputError(variable, text, f"seconds above 0, at most {LONGEST_SECONDS:.0f}")
    return seconds


async def start_again_later(
    flow_run_id: UUID,
    *,
    seconds: float,
    state_name: str,
    reason: str,
    sleep: Sleep = asyncio.sleep,
) -> Never:
    """Schedule the flow run that this process carries out, and leave it.

    Args:
        flow_run_id: the flow run of this process; it must be one of a deployment.
        seconds: how much later.
        state_name: what it is shown as while it waits.
        reason: one sentence, shown with the state.
        sleep: waits some seconds.

    Raises:
        Abort: always; the engine ends the process with status 0 and reports no state of its own.
    """
    for left in reversed(range(TRIES)):
        try:
            await _schedule(flow_run_id, seconds=seconds, state_name=state_name, reason=reason)
            break
        except (httpx.HTTPError, PrefectException) as error:
            _LOG.warning("the state %s was not set: %r", state_name, error)
            if isinstance(error, ObjectNotFound) or not left:
                break  # it was deleted, or the sweeper will see that no process is left
            await sleep(BETWEEN_TRIES_SECONDS)
    raise Abort(reason)


async def _schedule(flow_run_id: UUID, *, seconds: float, state_name: str, reason: str) -> None:
    due = datetime.now(UTC) + timedelta(seconds=seconds)
    state: State[Any] = Scheduled(name=state_name, message=reason, scheduled_time=due)
    async with get_client() as client:
        await client.set_flow_run_state(flow_run_id, state, force=True)
