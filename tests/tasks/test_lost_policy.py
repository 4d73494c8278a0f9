"""An evaluation waits for a policy that the service has lost, wherever it finds that out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local_service.launch import LocalService
from tasks.evaluation import Subject, evaluate
from tasks.failures import Failure, FailureKind, ModelLost
from tasks.patience import RetryPolicy
from tasks.service import LoraSettings, Service
from tasks.service_settings import ServiceSettings
from tests.tasks.fake_runs import context, open_fake

pytestmark = pytest.mark.anyio


async def test_evaluation_whose_policy_is_lost_when_it_is_opened_goes_on(tmp_path: Path) -> None:
    """Twice lost, then there: all ten items are scored."""
    ctx = context(tmp_path)
    opened = 0

    async def open_it() -> Any:
        nonlocal opened
        opened += 1
        if opened < 3:
            raise ModelLost("gone", failure=Failure(FailureKind.LOST_MODEL, "gone"))
        return await open_fake()

    await evaluate(ctx, Subject(arm="dppo", seed=0, policy_version=4, open=open_it), "final")

    assert opened == 3
    assert len(ctx.run.read_table("evaluations", key=("dppo", "final"))) == 10


async def test_sampler_of_the_base_model_is_opened_anew_when_its_session_is_lost(
    faulty_service: LocalService,
) -> None:
    """Nothing has to be restored for it; 410 twice in the middle of opening is waited out."""
    lost = {"kind": "status", "status": 410, "error": "model_lost"}
    rule = {"path": "create_sampling_session", "count": 2, "actions": [lost]}
    control = f"{faulty_service.url}/api/v1/local/faults"
    httpx.post(control, json={"rules": [rule]}).raise_for_status()
    policy = RetryPolicy(outage_delays=(0.1,))
    service = Service(ServiceSettings(url=faulty_service.url), policy=policy)

    sampler = await service.open_sampler(base_model="tiny", label="base")

    assert await sampler.close()


def _faults(service: LocalService, path: str, action: dict[str, Any], *, count: int | None) -> None:
    rule = {"path": path, "count": count, "actions": [action]}
    control = f"{service.url}/api/v1/local/faults"
    httpx.post(control, json={"rules": [rule]}).raise_for_status()


def _hits(service: LocalService) -> int:
    return int(httpx.get(f"{service.url}/api/v1/local/faults").json()["rules"][0]["hits"])


def _service(url: str) -> Service:
    return Service(ServiceSettings(url=url), policy=RetryPolicy(outage_delays=(0.1,)))


@pytest.mark.parametrize(
    ("action", "count"),
    [
        ({"kind": "status", "status": 403, "message": "session_id 's': no such session"}, 3),
        ({"kind": "poll_status", "status": 404, "message": "Future not found"}, 3),
        ({"kind": "status", "status": 404, "message": "model not found"}, 1),
    ],
    ids=["session", "future", "model"],
)
async def test_client_is_made_anew_where_the_service_was_started_again_in_between(
    action: dict[str, Any], count: int, faulty_service: LocalService
) -> None:
    """A forgotten session or answer as often as it comes; a model that is not there, once."""
    _faults(faulty_service, "create_model", action, count=count)

    trainer = await _service(faulty_service.url).create_trainer(
        LoraSettings(base_model="tiny", rank=4, seed=0), label="x"
    )

    assert _hits(faulty_service) == count
    assert await trainer.close()


async def test_model_that_is_never_there_is_asked_for_twice(faulty_service: LocalService) -> None:
    refused = {"kind": "status", "status": 404, "message": "model not found"}
    _faults(faulty_service, "create_model", refused, count=None)

    with pytest.raises(ModelLost, match="model not found"):
        await _service(faulty_service.url).create_trainer(
            LoraSettings(base_model="tiny", rank=4, seed=0), label="x"
        )

    assert _hits(faulty_service) == 2
