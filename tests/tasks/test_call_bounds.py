"""How many calls the real client makes, and for how long, when a service never stops refusing.

Deadlines and waits are shortened; the long ones are `test_patience`'s, on a clock of its own.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from deploy.local_service.launch import LocalService
from tasks.failures import (
    CapacityBlocked,
    PermanentServiceError,
    ServiceError,
    ServiceOutage,
    UnknownOutcome,
)
from tasks.patience import RetryPolicy
from tasks.sampling import ServiceSampler
from tasks.service import LoraSettings, Service
from tasks.service_settings import Deadlines, ServiceSettings
from tasks.trainer import Trainer
from tests.tasks.test_service import ADAM, _datum, _nll

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LORA = LoraSettings(base_model="tiny", rank=4, seed=0)
POLICY = RetryPolicy(
    capacity_delays=(0.2, 0.4, 0.8),
    outage_delays=(0.2, 0.4, 0.8),
    before_first_step=4.0,
    after_first_step=8.0,
)
DEADLINES = Deadlines(
    reach=1.0, create=1.5, train=5.0, decide=1.0, save=3.0, sample=20.0, sample_progress=2.0
)
EXHAUSTED = "engine refused work: trainer capacity exhausted"
SLOTS = "Maximum number of LoRA adapters (1) reached"


def _service(url: str, *, steps: int = 0) -> Service:
    settings = ServiceSettings(url=url, deadlines=DEADLINES)
    return Service(settings, policy=POLICY, steps_completed=lambda: steps)


def _refuse(service: LocalService, path: str, **action: Any) -> None:
    """Answer every such call like this from now on."""
    rule = {"path": path, "count": None, "actions": [action]}
    httpx.post(f"{service.url}/api/v1/local/faults", json={"rules": [rule]}).raise_for_status()


def _calls(service: LocalService) -> int:
    """How many of the refused calls have arrived."""
    return int(httpx.get(f"{service.url}/api/v1/local/faults").json()["rules"][0]["hits"])


async def _trainer(service: Service) -> Trainer:
    patient = ServiceSettings(
        url=service.settings.url, deadlines=Deadlines(create=30.0, train=5.0, decide=1.0, close=2.0)
    )
    return await Service(patient).create_trainer(LORA, label="x")


async def _sample(sampler: ServiceSampler) -> Any:
    return await sampler.sample(
        [1, 10], num_samples=1, max_tokens=2, temperature=1.0, top_p=1.0, top_k=-1, seed=0, stop=[2]
    )


@pytest.mark.parametrize(
    ("steps", "action", "kind", "calls"),
    [
        (0, {"kind": "status", "status": 429}, ServiceError, 12),
        (0, {"kind": "status", "status": 503}, ServiceError, 12),
        (0, {"kind": "status", "status": 400, "error": SLOTS}, CapacityBlocked, 9),
        (0, {"kind": "fail_future", "error": EXHAUSTED}, CapacityBlocked, 9),
        (3, {"kind": "fail_future", "error": EXHAUSTED}, CapacityBlocked, 14),
        (0, {"kind": "status", "status": 402}, PermanentServiceError, 1),
        (0, {"kind": "status", "status": 401}, PermanentServiceError, 1),
        (0, {"kind": "drop_before"}, ServiceOutage, 12),
        (0, {"kind": "hang", "seconds": 30.0}, ServiceError, 4),
    ],
    ids=["429", "503", "400_slots", "failed_future", "after_steps", "402", "401", "drop", "hang"],
)
async def test_creation_that_never_works_is_given_up(
    steps: int, action: dict[str, Any], kind: type, calls: int, faulty_service: LocalService
) -> None:
    """4 s of waiting (8 after steps) and one deadline of 1.5 s; then nothing is sent any more."""
    service = _service(faulty_service.url, steps=steps)
    _refuse(faulty_service, "create_model", **action)
    started = time.monotonic()

    with pytest.raises(kind) as error:
        await service.create_trainer(LORA, label="x")

    assert isinstance(error.value, ServiceError)
    assert error.value.final
    limit = POLICY.after_first_step if steps else POLICY.before_first_step
    assert time.monotonic() - started < limit + DEADLINES.create + 2.0
    made = _calls(faulty_service)
    assert 1 <= made <= calls
    await asyncio.sleep(1.5)
    assert _calls(faulty_service) <= made + 1


async def test_poll_that_always_fails_is_asked_in_growing_steps(
    faulty_service: LocalService,
) -> None:
    """1 + 2 s: three polls of the step fit 5 s. Left alone, the client would poll a thousand times."""
    trainer = await _trainer(_service(faulty_service.url))
    _refuse(faulty_service, "optim_step", kind="poll_status", status=503)
    polls = {"path": "retrieve_future", "count": None, "actions": [{"kind": "status"}]}
    control = f"{faulty_service.url}/api/v1/local/faults"
    httpx.post(control, json={"rules": [polls]}).raise_for_status()
    started = time.monotonic()

    with pytest.raises(UnknownOutcome):
        await trainer.optim_step(ADAM)

    assert 4.5 < time.monotonic() - started < 7.0
    assert 2 <= _calls(faulty_service) <= 4


async def test_billing_refusal_is_not_slept_on(faulty_service: LocalService) -> None:
    """The client's own pause would be an hour."""
    trainer = await _trainer(_service(faulty_service.url))
    _refuse(faulty_service, "optim_step", kind="status", status=402, error="no funds")
    started = time.monotonic()

    with pytest.raises(PermanentServiceError, match="402"):
        await trainer.optim_step(ADAM)

    assert time.monotonic() - started < 3.0
    assert _calls(faulty_service) == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_step_that_is_always_refused_is_abandoned(
    status: int, faulty_service: LocalService
) -> None:
    """The client would retry for five minutes; the deadline is 5 s, and dropping it ends its calls."""
    trainer = await _trainer(_service(faulty_service.url))
    _refuse(faulty_service, "optim_step", kind="status", status=status)
    started = time.monotonic()

    answer = await trainer.step([_datum()], _nll, ADAM)

    assert 4.5 < time.monotonic() - started < 7.0
    assert answer.loss_error is None
    assert isinstance(answer.step_error, UnknownOutcome)
    assert answer.abandoned
    await trainer.close()
    made = _calls(faulty_service)
    assert made <= 8
    await asyncio.sleep(2.0)
    assert _calls(faulty_service) <= made + 1


@pytest.mark.parametrize("status", [429, 503])
async def test_sample_that_is_always_refused_is_given_up(
    status: int, faulty_service: LocalService
) -> None:
    """Twice 2 s without progress and the wait between fill 4 s. The client's own limit: none."""
    service = _service(faulty_service.url)
    patient = Service(ServiceSettings(url=faulty_service.url, deadlines=DEADLINES))
    sampler = await patient.open_sampler(base_model="tiny", label="base")
    bounded = ServiceSampler(service, sampler._client, label="base", session=sampler._session)
    _refuse(faulty_service, "asample", kind="status", status=status)
    started = time.monotonic()

    with pytest.raises(ServiceOutage) as error:
        await _sample(bounded)

    assert error.value.final
    assert time.monotonic() - started < POLICY.before_first_step + DEADLINES.sample_progress + 3.0
    made = _calls(faulty_service)
    assert made <= 10
    await bounded.close()
    await asyncio.sleep(1.5)
    assert _calls(faulty_service) <= made + 2


async def test_releases_name_what_was_let_go(local_service: LocalService) -> None:
    service = Service(ServiceSettings(url=local_service.url))
    trainer = await service.create_trainer(LORA, label="a")
    await service.open_sampler(base_model="tiny", label="b")
    await trainer.close()

    assert await service.release_all()

    named = [(release.client, release.confirmed) for release in service.releases]
    assert named == [("create training client a", True), ("open sampler b", True)]
