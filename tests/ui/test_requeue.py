"""After a block the same flow run is scheduled again, and this process leaves without a word."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect.exceptions import Abort, ObjectNotFound

from evidence.errors import InputError
from flows import requeue
from flows.requeue import patience_in_process, seconds_until_next_attempt, start_again_later

FLOW_RUN = UUID("12345678-1234-5678-1234-567812345678")


class FakeClient:
    """Takes note of the states that are set."""

    def __init__(self, *errors: Exception) -> None:
        self.states: list[tuple[UUID, Any, bool]] = []
        self.errors = list(errors)

    async def __aenter__(self) -> FakeClient:
        return self

    async def __aexit__(self, *args: object) -> None:
        return None

    async def set_flow_run_state(self, flow_run_id: UUID, state: Any, *, force: bool) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.states.append((flow_run_id, state, force))


async def _again(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Start again later through this client; return the seconds that were waited."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(requeue, "get_client", lambda: client)
    with pytest.raises(Abort):
        await start_again_later(
            FLOW_RUN, seconds=60.0, state_name="AwaitingCapacity", reason="full", sleep=sleep
        )
    return slept


def test_flow_run_is_scheduled_by_force_and_the_process_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeClient()
    monkeypatch.setattr(requeue, "get_client", lambda: client)
    before = datetime.now(UTC)

    with pytest.raises(Abort):
        asyncio.run(
            start_again_later(FLOW_RUN, seconds=60.0, state_name="AwaitingCapacity", reason="full")
        )

    [(flow_run_id, state, force)] = client.states
    assert (flow_run_id, force) == (FLOW_RUN, True)
    assert (state.type.value, state.name, state.message) == (
        "SCHEDULED",
        "AwaitingCapacity",
        "full",
    )
    delay = (state.state_details.scheduled_time - before).total_seconds()
    assert 60.0 <= delay < 70.0


def test_server_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tries fail, 10 s apart; the delay counts from the one that gets through."""
    client = FakeClient(httpx.ConnectError("refused"), httpx.ReadTimeout(""), _answer(503))

    slept = asyncio.run(_again(client, monkeypatch))

    assert slept == [10.0, 10.0, 10.0]
    assert [state.name for _, state, _ in client.states] == ["AwaitingCapacity"]


def test_process_leaves_a_server_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """31 tries in 300 s; the state stays as it was, which the sweeper takes up."""
    client = FakeClient(*[httpx.ConnectError("refused")] * 40)

    slept = asyncio.run(_again(client, monkeypatch))

    assert (sum(slept), len(client.errors), client.states) == (300.0, 9, [])


def test_flow_run_that_was_deleted_is_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ObjectNotFound(_answer(404))

    assert asyncio.run(_again(FakeClient(gone), monkeypatch)) == []


def _answer(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://127.0.0.1:1/api")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status))


def test_leaving_is_no_error_that_a_flow_could_catch() -> None:
    """A task that catches `Exception` must not keep the process from leaving."""
    assert not issubclass(Abort, Exception)


@pytest.mark.parametrize(
    ("retry_after", "seconds"),
    [(None, 900.0), (5.0, 30.0), (30.0, 30.0), (31.0, 31.0), (1e9, 21600.0)],
)
def test_wait_is_what_the_service_asks_for_within_bounds(
    retry_after: float | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(requeue.REQUEUE_VARIABLE, raising=False)

    assert seconds_until_next_attempt(retry_after) == seconds


def test_setting_counts_whatever_the_service_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(requeue.REQUEUE_VARIABLE, "12")

    assert seconds_until_next_attempt(3600.0) == 12.0


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "1e9"])
def test_setting_that_is_no_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(requeue.REQUEUE_VARIABLE, text)

    with pytest.raises(InputError, match=requeue.REQUEUE_VARIABLE):
        seconds_until_next_attempt(None)


def test_patience_in_a_process_can_only_be_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(requeue.PATIENCE_VARIABLE, "700")
    assert patience_in_process().before_first_step == 600.0
    assert patience_in_process().after_first_step == 700.0

    monkeypatch.delenv(requeue.PATIENCE_VARIABLE)
    assert patience_in_process().after_first_step == 1800.0
