"""A served partner that the service forgets is replaced, and its session is not left open."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tasks.failures import Failure, FailureKind, ModelLost, PermanentServiceError
from tasks.partners import ServedPartner
from tasks.service import Service
from tests.tasks.fake_runs import FakeService

pytestmark = pytest.mark.anyio


class Sampler:
    """Answers with its name, or raises; `slow` requests come back when they are let go."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self.error, self.closed = name, error, 0
        self.let_go = asyncio.Event()

    async def sample(self, prompt_tokens: Any, *, seed: int, **_: Any) -> list[Any]:
        if seed:
            await self.let_go.wait()
            return [f"{self.name}, closed {self.closed} times"]
        if self.error is not None:
            raise self.error
        return [self.name]

    async def close(self) -> bool:
        self.closed += 1
        return True


class Opening(FakeService):
    """Opens the given samplers one after the other."""

    def __init__(self, *samplers: Sampler) -> None:
        super().__init__()
        self.waiting = list(samplers)

    async def open_sampler(self, *, base_model: str, label: str) -> Sampler:
        return self.waiting.pop(0)


def _partner(*samplers: Sampler) -> ServedPartner:
    return ServedPartner(cast(Service, Opening(*samplers)), "tiny", label="judge")


async def _ask(partner: ServedPartner, *, seed: int = 0) -> list[Any]:
    return await partner.sample(
        [1],
        num_samples=1,
        max_tokens=1,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        seed=seed,
        stop=[],
    )


def _lost() -> ModelLost:
    return ModelLost("gone", failure=Failure(FailureKind.LOST_MODEL, "gone"))


async def test_forgotten_partner_is_closed_and_its_successor_stays_open() -> None:
    first, second = Sampler("first", _lost()), Sampler("second")
    partner = _partner(first, second)

    answers = [await _ask(partner), await _ask(partner)]

    assert answers == [["second"], ["second"]]
    assert (first.closed, second.closed) == (1, 0)


async def test_forgotten_partner_is_closed_after_its_last_request_has_come_back() -> None:
    """A request that was sent before it was found out may still be answered."""
    first, second = Sampler("first", _lost()), Sampler("second")
    partner = _partner(first, second)
    slow = asyncio.ensure_future(_ask(partner, seed=1))
    await asyncio.sleep(0)

    assert await _ask(partner) == ["second"]
    assert first.closed == 0
    first.let_go.set()

    assert await slow == ["first, closed 0 times"]
    assert (first.closed, second.closed) == (1, 0)


async def test_partner_that_refuses_stays_open() -> None:
    refusing = Sampler("first", PermanentServiceError("no"))
    partner = _partner(refusing)

    with pytest.raises(PermanentServiceError):
        await _ask(partner)

    assert refusing.closed == 0
