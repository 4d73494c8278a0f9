"""A step whose answer is lost is decided by scores alone, against the real client and service.

The service's own count of steps is left out throughout, as on a service that has none.
"""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
import tinker

from deploy.local_service.launch import LocalService
from tasks.service import LoraSettings, Service
from tasks.service_settings import Deadlines, ServiceSettings
from tasks.trainer import StepAnswer, Trainer
from tasks.witness import Witness
from tests.tasks.test_service import ADAM, _datum, _nll

pytestmark = pytest.mark.anyio

LORA = LoraSettings(base_model="tiny", rank=4, seed=0)
DEADLINES = Deadlines(create=20.0, train=3.0, decide=3.0, close=2.0)
FIRST_STEP = 4
"""Number of the first optimizer step on a client: after one forward and the two of the loss."""


async def _trainer(url: str) -> Trainer:
    return await Service(ServiceSettings(url=url, deadlines=DEADLINES)).create_trainer(
        LORA, label="x"
    )


def _fault(service: LocalService, rule: dict[str, Any]) -> None:
    url = f"{service.url}/api/v1/local/faults"
    httpx.post(url, json={"rules": [{"count": None, **rule}]}).raise_for_status()


class Kept:
    """A loss that keeps the scores it was given, as that of a minibatch does."""

    def __init__(self) -> None:
        self.logprobs: list[Any] = []

    def __call__(self, data: Any, logprobs: Any) -> Any:
        self.logprobs = [values.detach().numpy() for values in logprobs]
        return _nll(data, logprobs)


async def _step_in_doubt(
    trainer: Trainer, adam: tinker.AdamParams = ADAM
) -> tuple[StepAnswer, str]:
    """The first step of a client, and what is decided about it; it moves scores by 1.9 nats."""
    witness, loss = Witness(counts=False), Kept()
    await witness.look(trainer, [_datum()])
    answer = await trainer.step([_datum()], loss, adam)
    witness.compare(loss.logprobs)
    assert witness.repeats
    assert answer.loss_error is None
    assert answer.step_error is not None
    return answer, await witness.decide(trainer, [_datum()], 0, answer.step_error)


async def test_step_that_landed_and_whose_answer_is_gone_counts_once(
    faulty_service: LocalService,
) -> None:
    """Every poll of the step says that its promise has expired; the client goes on as it is."""
    undisturbed, disturbed = [await _trainer(faulty_service.url) for _ in range(2)]
    await undisturbed.step([_datum()], _nll, ADAM)
    request = f"{disturbed.info.model_id}:{FIRST_STEP}"
    gone = {"kind": "status", "status": 410, "error": "gone", "message": "no longer kept"}
    _fault(faulty_service, {"path": "retrieve_future", "model": request, "actions": [gone]})

    answer, decision = await _step_in_doubt(disturbed)

    assert decision == "applied, by the fingerprint"
    assert not answer.abandoned
    scores = [(await trainer.forward([_datum()]))[0] for trainer in (undisturbed, disturbed)]
    assert np.array_equal(*scores)


async def test_step_that_landed_and_hardly_moved_the_scores_stays_unknown(
    faulty_service: LocalService,
) -> None:
    """Other scores to the last bit, on a service that repeats them: a replica's look the same."""
    trainer = await _trainer(faulty_service.url)
    request = f"{trainer.info.model_id}:{FIRST_STEP}"
    gone = {"kind": "status", "status": 410, "error": "gone", "message": "no longer kept"}
    _fault(faulty_service, {"path": "retrieve_future", "model": request, "actions": [gone]})

    _, decision = await _step_in_doubt(trainer, tinker.AdamParams(learning_rate=1e-5, eps=1e-8))

    assert decision == "unknown"


async def test_step_that_failed_at_the_service_is_known_not_to_have_landed(
    faulty_service: LocalService,
) -> None:
    lost = {"kind": "fail_future", "error": "worker died"}
    _fault(faulty_service, {"path": "optim_step", "actions": [lost]})

    _, decision = await _step_in_doubt(await _trainer(faulty_service.url))

    assert decision == "not applied, by the fingerprint"


async def test_step_that_is_abandoned_at_the_deadline_is_decided_too(
    faulty_service: LocalService,
) -> None:
    """Its polls hang: after 3 s it is abandoned, and scores of the same client tell that it landed."""
    trainer = await _trainer(faulty_service.url)
    request = f"{trainer.info.model_id}:{FIRST_STEP}"
    hang = {"kind": "hang", "seconds": 20.0}
    _fault(faulty_service, {"path": "retrieve_future", "model": request, "actions": [hang]})

    answer, decision = await _step_in_doubt(trainer)

    assert answer.abandoned
    assert decision == "applied, by the fingerprint"


async def test_step_that_blocks_its_client_stays_unknown(faulty_service: LocalService) -> None:
    """Its submission hangs, and nothing that is sent behind it gets through."""
    _fault(faulty_service, {"path": "optim_step", "actions": [{"kind": "hang", "seconds": 20.0}]})

    answer, decision = await _step_in_doubt(await _trainer(faulty_service.url))

    assert answer.abandoned
    assert decision == "unknown"
