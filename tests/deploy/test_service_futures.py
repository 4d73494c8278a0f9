"""Promises: deduplication, long polls, and how long results are kept."""

import asyncio

import pytest

from deploy.local_service.errors import ApiError, model_lost
from deploy.local_service.futures import FutureTable, Outcome, failed


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(table, request_id="m:1", session="s", key="k"):
    return table.open(request_id, session_id=session, fingerprint=key)


def test_same_request_gets_the_same_promise():
    """The second submission of one id is not new."""

    async def run():
        table = FutureTable()
        first, first_is_new = opened(table)
        second, second_is_new = opened(table)

        assert (first_is_new, second_is_new) == (True, False)
        assert second is first

    asyncio.run(run())


def test_other_content_under_a_used_id_is_a_conflict():
    """One id stands for one content: 409, and a hint not to repeat it."""

    async def run():
        table = FutureTable()
        opened(table)

        with pytest.raises(ApiError) as caught:
            opened(table, key="other")
        assert caught.value.status == 409
        assert caught.value.headers == {"x-should-retry": "false"}

    asyncio.run(run())


def test_wait_returns_none_until_resolved_from_another_thread():
    """A poll that runs out of time has no outcome; the next one has."""

    async def run():
        table = FutureTable()
        table.attach(asyncio.get_running_loop())
        promise, _ = opened(table)
        assert await table.wait(promise, seconds=0.01) is None

        waiting = asyncio.create_task(table.wait(promise, seconds=30))
        await asyncio.to_thread(table.resolve, promise, Outcome(body={"a": 1}))
        outcome = await waiting

        assert outcome is not None
        assert outcome.body == {"a": 1}

    asyncio.run(run())


def test_first_outcome_stands():
    """A second outcome for the same promise is dropped."""

    async def run():
        table = FutureTable()
        promise, _ = opened(table)
        table.resolve(promise, Outcome(body={"a": 1}))
        table.resolve(promise, failed("late", category="server"))

        outcome = await table.wait(promise, seconds=1)
        assert outcome is not None
        assert outcome.body == {"a": 1}

    asyncio.run(run())


def test_sweep_forgets_old_outcomes_and_keeps_what_is_pending():
    """Results are kept for their time, unfinished promises always."""

    async def run():
        clock = Clock()
        table = FutureTable(clock=clock)
        done, _ = opened(table, "m:1")
        opened(table, "m:2")
        table.resolve(done, Outcome(body={}))
        clock.now = 159.0
        assert table.sweep(older_than_seconds=60) == 0
        clock.now = 160.0
        assert table.sweep(older_than_seconds=60) == 1

        assert table.find("m:1") is None
        assert table.find("m:2") is not None
        assert table.pending() == 1

    asyncio.run(run())


def test_end_of_a_session_wakes_its_polls_with_the_reason():
    """Unfinished work of an ended session answers 410, other sessions are untouched."""

    async def run():
        table = FutureTable()
        table.attach(asyncio.get_running_loop())
        mine, _ = opened(table, "m:1", session="mine")
        opened(table, "n:1", session="other")
        waiting = asyncio.create_task(table.wait(mine, seconds=30))
        await asyncio.sleep(0)
        unfinished = table.drop_session("mine", error=model_lost("ended"))
        outcome = await waiting

        assert unfinished == [mine]
        assert mine.cancelled
        assert outcome is not None
        assert (outcome.status, outcome.body["error"]) == (410, "model_lost")
        assert table.find("m:1") is None
        assert table.find("n:1") is not None

    asyncio.run(run())


def test_polls_return_when_the_service_goes_down():
    """No poll holds up a stop."""

    async def run():
        table = FutureTable()
        promise, _ = opened(table)
        waiting = asyncio.create_task(table.wait(promise, seconds=30))
        await asyncio.sleep(0)
        table.wake_all()

        assert await asyncio.wait_for(waiting, 1) is None
        assert await asyncio.wait_for(table.wait(promise, seconds=30), 1) is None

    asyncio.run(run())
