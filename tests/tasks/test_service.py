"""The service layer against the real client and the embedded service, with short deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch

from deploy.local_service.launch import LocalService
from tasks.failures import (
    CapacityBlocked,
    ModelLost,
    PermanentServiceError,
    ServiceOutage,
    UnknownOutcome,
)
from tasks.patience import RetryPolicy
from tasks.service import LoraSettings, Service
from tasks.service_settings import Deadlines, ServiceSettings

pytestmark = pytest.mark.anyio

LORA = LoraSettings(base_model="tiny", rank=4, seed=0)
POLICY = RetryPolicy(
    capacity_delays=(0.1, 0.2, 0.4), outage_delays=(0.1, 0.2, 0.4), before_first_step=1.5
)
SHORT = Deadlines(reach=1.0, create=20.0, train=20.0, sample=20.0, sample_progress=3.0)


def _service(url: str, *, deadlines: Deadlines = SHORT, steps: int = 0) -> Service:
    waits: list[Any] = []
    service = Service(
        ServiceSettings(url=url, deadlines=deadlines),
        policy=POLICY,
        steps_completed=lambda: steps,
        on_wait=lambda what, failure, seconds: waits.append((what, failure.kind, seconds)),
    )
    service.waits = waits  # type: ignore[attr-defined]
    return service


def _faults(service: LocalService, *rules: dict[str, Any]) -> None:
    control = f"{service.url}/api/v1/local/faults"
    httpx.post(control, json={"rules": list(rules)}).raise_for_status()


def _datum() -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([10, 11, 12, 13]),
        loss_fn_inputs={"target_tokens": torch.tensor([11, 12, 13, 14])},  # type: ignore[dict-item]
    )


def _nll(
    data: list[tinker.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    return -torch.stack([values.sum() for values in logprobs]).sum(), {}


ADAM = tinker.AdamParams(learning_rate=0.01, eps=1e-8)


async def test_service_that_is_not_there_is_known_at_once() -> None:
    started = time.monotonic()

    with pytest.raises(ServiceOutage) as error:
        await _service("http://127.0.0.1:1").reach()

    assert time.monotonic() - started < 5.0
    assert error.value.final


async def test_default_deadline_to_reach_a_service_is_below_half_a_minute() -> None:
    assert Deadlines().reach <= 25.0


async def test_trainer_takes_steps_and_saves_and_is_loaded_with_its_optimizer(
    local_service: LocalService,
) -> None:
    """A step after a restore equals the step of the client that went on, bit for bit."""
    service = _service(local_service.url)
    live = await service.create_trainer(LORA, label="live")
    await live.step([_datum()], _nll, ADAM)
    uri = await live.save("one")
    resumed = await service.load_trainer(uri, label="resumed")
    before = (await live.forward([_datum()]))[0]
    for trainer in (live, resumed):
        answer = await trainer.step([_datum()], _nll, ADAM)
        assert answer.loss_error is None
        assert answer.step_error is None
    scores = [(await trainer.forward([_datum()]))[0] for trainer in (live, resumed)]

    assert np.array_equal(scores[0], scores[1])
    assert not np.array_equal(scores[0], before)
    assert await service.release_all()


async def test_sampler_repeats_itself_by_seed(local_service: LocalService) -> None:
    service = _service(local_service.url)
    sampler = await service.open_sampler(base_model="tiny", label="base")

    async def draw(seed: int) -> list[int]:
        sequences = await sampler.sample(
            [1, 10, 11],
            num_samples=1,
            max_tokens=8,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            seed=seed,
            stop=[2],
        )
        assert len(sequences[0].tokens) == len(sequences[0].logprobs)
        return list(sequences[0].tokens)

    assert await draw(1) == await draw(1)
    assert await draw(1) != await draw(2)
    assert await sampler.close()


async def test_capacity_in_a_failed_future_is_waited_out(faulty_service: LocalService) -> None:
    """Refused twice by a future without a status; the third try gets its client."""
    _faults(
        faulty_service,
        {
            "path": "create_model",
            "count": 2,
            "actions": [
                {
                    "kind": "fail_future",
                    "message": "engine refused work: trainer capacity exhausted",
                    "error": "engine refused work: trainer capacity exhausted",
                }
            ],
        },
    )
    service = _service(faulty_service.url)

    trainer = await service.create_trainer(LORA, label="x")

    assert trainer.info.base_model == "tiny"
    assert len(service.waits) == 2  # type: ignore[attr-defined]
    assert await trainer.close()


async def test_capacity_for_ever_ends_in_a_block_with_the_exact_words(
    faulty_service: LocalService,
) -> None:
    """Waits of about 0.1 + 0.2 + 0.4 + 0.4 s fit 1.5 s; the SDK itself asks once each time."""
    _faults(
        faulty_service,
        {
            "path": "create_model",
            "count": None,
            "actions": [
                {
                    "kind": "fail_future",
                    "error": "trainer capacity exhausted",
                    "message": "trainer capacity exhausted",
                }
            ],
        },
    )
    service = _service(faulty_service.url)
    started = time.monotonic()

    with pytest.raises(CapacityBlocked, match="trainer capacity exhausted") as error:
        await service.create_trainer(LORA, label="x")

    assert error.value.final
    assert error.value.steps_completed == 0
    assert time.monotonic() - started < 30.0
    hits = httpx.get(f"{faulty_service.url}/api/v1/local/faults").json()["rules"][0]["hits"]
    assert 2 <= hits <= 8


@pytest.mark.parametrize("kind", ["status", "poll_status"])
async def test_taken_adapter_slots_count_as_capacity(
    kind: str, faulty_service: LocalService
) -> None:
    """Some services say 400, at once or when polled, and mean that all slots are taken."""
    text = "Maximum number of LoRA adapters (1) reached"
    action = {"kind": kind, "status": 400, "error": text, "message": text}
    _faults(faulty_service, {"path": "create_model", "actions": [action]})
    service = _service(faulty_service.url)

    trainer = await service.create_trainer(LORA, label="x")

    assert [wait[1].value for wait in service.waits] == ["capacity"]  # type: ignore[attr-defined]
    assert await trainer.close()


async def test_refused_key_is_not_asked_again(start_service: Callable[..., LocalService]) -> None:
    service = _service(start_service(api_key="tml-the-right-one").url)
    started = time.monotonic()

    with pytest.raises(PermanentServiceError):
        await service.reach()

    assert time.monotonic() - started < 5.0


async def test_lost_model_is_told_apart(faulty_service: LocalService) -> None:
    service = _service(faulty_service.url)
    trainer = await service.create_trainer(LORA, label="x")
    _faults(
        faulty_service,
        {
            "path": "forward_backward",
            "actions": [{"kind": "status", "status": 410, "error": "model_lost"}],
        },
    )

    with pytest.raises(ModelLost):
        await trainer.forward([_datum()])


async def test_call_that_hangs_is_abandoned_and_its_outcome_unknown(
    faulty_service: LocalService,
) -> None:
    service = _service(faulty_service.url, deadlines=Deadlines(train=1.0, create=20.0))
    trainer = await service.create_trainer(LORA, label="x")
    _faults(faulty_service, {"path": "optim_step", "actions": [{"kind": "hang", "seconds": 5.0}]})
    started = time.monotonic()

    answer = await trainer.step([_datum()], _nll, ADAM)

    assert time.monotonic() - started < 4.0
    assert isinstance(answer.step_error, UnknownOutcome)


async def test_lost_answer_of_a_step_is_applied_once(faulty_service: LocalService) -> None:
    """The client sends it again under the same number, and the service knows it."""
    service = _service(faulty_service.url)
    plain = await service.create_trainer(LORA, label="plain")
    await plain.step([_datum()], _nll, ADAM)
    disturbed = await service.create_trainer(LORA, label="disturbed")
    _faults(faulty_service, {"path": "optim_step", "actions": [{"kind": "drop_after"}]})
    await disturbed.step([_datum()], _nll, ADAM)

    one, other = await plain.forward([_datum()]), await disturbed.forward([_datum()])

    assert np.array_equal(one[0], other[0])


async def test_loss_that_raises_is_our_own_error(local_service: LocalService) -> None:
    service = _service(local_service.url)
    trainer = await service.create_trainer(LORA, label="x")

    def broken(data: Any, logprobs: Any) -> Any:
        raise ZeroDivisionError("our fault")

    with pytest.raises(ZeroDivisionError, match="our fault"):
        await trainer.step([_datum()], broken, ADAM)


async def test_sampling_refused_for_ever_ends_in_a_block(faulty_service: LocalService) -> None:
    """Left alone, the client would ask again every second without end."""
    service = _service(
        faulty_service.url, deadlines=Deadlines(sample_progress=1.0, sample=20.0, create=20.0)
    )
    sampler = await service.open_sampler(base_model="tiny", label="base")
    _faults(
        faulty_service,
        {"path": "asample", "count": None, "actions": [{"kind": "status", "status": 429}]},
    )
    started = time.monotonic()

    with pytest.raises(ServiceOutage) as error:
        await sampler.sample(
            [1, 10],
            num_samples=1,
            max_tokens=2,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            seed=0,
            stop=[2],
        )

    assert error.value.final
    assert time.monotonic() - started < 20.0


async def test_headers_come_from_the_environment_and_appear_in_no_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MODAL_TOKEN", "secret-value")
    settings = ServiceSettings(
        url="https://example.invalid", header_env={"Modal-Key": "MODAL_TOKEN"}
    )

    assert settings.headers() == {"Modal-Key": "secret-value"}
    assert "secret-value" not in str(settings.describe())
    assert "secret-value" not in repr(settings)
