"""What differs between the oldest and the newest SDK: these tests run at both ends (make test-sdks)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from deploy.local_service.launch import LocalService
from evidence.canonical import canonical_bytes
from evidence.run import Run
from flows.run import run_comparison
from tasks import sdk
from tasks.conformance_relay import Relay
from tasks.service import LoraSettings, Service
from tasks.service_settings import ServiceSettings, load_service_profile
from tests.flows.conftest import make_plan

pytestmark = pytest.mark.anyio

LORA = LoraSettings(base_model="tiny", rank=4, seed=0)
ADAM = tinker.AdamParams(learning_rate=0.01, eps=1e-8)
KEY, SECRET = "modal-key-0d2c", "modal-secret-77aa"


def _datum() -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([10, 11, 12, 13]),
        loss_fn_inputs={"target_tokens": torch.tensor([11, 12, 13, 14])},  # type: ignore[dict-item]
    )


def _nll(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> Any:
    return -torch.stack([values.sum() for values in logprobs]).sum(), {}


class _Spy(Relay):
    """A relay that keeps the headers of every request that passes."""

    def __init__(self, settings: ServiceSettings) -> None:
        super().__init__(settings)
        self.seen: list[tuple[str, dict[str, str]]] = []

    def forward(self, method: str, path: str, headers: Any, body: bytes) -> Any:
        self.seen.append((path, {name.lower(): value for name, value in headers}))
        return super().forward(method, path, headers, body)


async def _work(service: Service) -> None:
    """Create, train, save, restore, publish, sample and score."""
    trainer = await service.create_trainer(LORA, label="x")
    assert trainer.info.base_model == "tiny"
    answer = await trainer.step([_datum()], _nll, ADAM)
    assert (answer.loss_error, answer.step_error) == (None, None)
    uri = await trainer.save("one")
    resumed = await service.load_trainer(uri, label="y")
    assert np.array_equal(
        (await trainer.forward([_datum()]))[0], (await resumed.forward([_datum()]))[0]
    )
    sampler = await trainer.publish("x")
    drawn = await sampler.sample(
        [1, 10, 11],
        num_samples=1,
        max_tokens=4,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        seed=1,
        stop=[2],
    )
    scores = await sampler.compute_logprobs([1, 10, 11, *drawn[0].tokens])
    assert np.allclose(scores[3:], drawn[0].logprobs, atol=1e-4)
    await service.reach()
    assert await service.release_all()


def test_sdk_is_the_one_that_was_asked_for() -> None:
    """A run of the oldest end that silently imports the newest would prove nothing."""
    asked = os.environ.get("GATED_RL_SDK")

    assert asked in (None, tinker.__version__)


async def test_extra_headers_reach_every_request(
    local_service: LocalService, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """From the variables that a profile names, whatever the SDK calls the argument."""
    monkeypatch.setenv("PROXY_KEY", KEY)
    monkeypatch.setenv("PROXY_SECRET", SECRET)
    async with _Spy(ServiceSettings(url=local_service.url)) as spy:
        profile = tmp_path / "profile.json"
        headers = {"Modal-Key": "PROXY_KEY", "Modal-Secret": "PROXY_SECRET"}
        profile.write_bytes(canonical_bytes({"url": spy.url, "header_env": headers}))

        await _work(Service(load_service_profile(profile)))

    kinds = {path.partition("?")[0].rpartition("/")[2] for path, _ in spy.seen}
    expected = {"create_model", "forward_backward", "optim_step", "save_weights", "load_weights"}
    expected |= {"asample", "retrieve_future", "create_session", "config", "finish", "get_info"}
    assert expected <= kinds
    without = [
        path
        for path, sent in spy.seen
        if (sent.get("modal-key"), sent.get("modal-secret")) != (KEY, SECRET)
    ]
    assert without == []


def test_extra_headers_appear_in_no_file_of_a_run(
    local_service: LocalService, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A whole run, limited to one step: ledger, gates, tables, report and bundle.

    0.25 cannot have the service hold the optimizer's settings, so that nothing reports them before
    the first step: that gate is unverified then, and has to be accepted.
    """
    monkeypatch.setenv("PROXY_KEY", KEY)
    monkeypatch.setenv("PROXY_SECRET", SECRET)
    accepted = () if sdk.takes_optimizer() else ("restoration",)
    plan = make_plan(tmp_path, local_service.url, limit=1, accept_unverified=accepted)
    headers = {"Modal-Key": "PROXY_KEY", "Modal-Secret": "PROXY_SECRET"}
    object.__setattr__(plan, "service", ServiceSettings(url=local_service.url, header_env=headers))

    outcome = run_comparison(plan)

    assert outcome.steps_completed > 0, outcome.reason
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    leaks = [path for path in files if any(s.encode() in path.read_bytes() for s in (KEY, SECRET))]
    assert leaks == []
    started = Run.open(f"{tmp_path}/run").events("started")[0]
    assert started["service"]["header_env"] == [
        {"header": "Modal-Key", "variable": "PROXY_KEY"},
        {"header": "Modal-Secret", "variable": "PROXY_SECRET"},
    ]
    assert started["versions"]["tinker"] == tinker.__version__


async def test_released_client_frees_its_slot(start_service: Callable[..., LocalService]) -> None:
    """Two slots, five clients one after the other: none waits for room."""
    service = Service(ServiceSettings(url=start_service(max_adapters=2).url))

    for number in range(5):
        trainer = await service.try_trainer(LORA, label=str(number))
        assert await trainer.close()


async def test_silent_service_is_unverified_and_no_exception(faulty_service: LocalService) -> None:
    """What the SDK fills in for a silent service is nobody's report."""
    import httpx  # noqa: PLC0415 - only this test switches faults

    control = f"{faulty_service.url}/api/v1/local/faults"
    httpx.post(control, json={"faults": ["lost_optimizer_report"]}, trust_env=False)
    service = Service(ServiceSettings(url=faulty_service.url))

    trainer = await service.create_trainer(LORA, label="silent")

    assert trainer.info.optimizer is None
    assert (trainer.info.base_model, trainer.info.lora_rank) == ("tiny", 4)
    assert await trainer.close()


@pytest.mark.parametrize("headers", [{}, {"A": "b"}])
def test_header_argument_is_one_that_this_sdk_takes(headers: dict[str, str]) -> None:
    client = tinker.ServiceClient(
        base_url="http://127.0.0.1:1", api_key="tml-x", **sdk.header_arguments(headers)
    )

    assert sdk.session_left_open(client) is None


def test_optimizer_settings_are_sent_only_by_a_version_that_can() -> None:
    held = sdk.optimizer_arguments({"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8})

    assert sdk.optimizer_arguments(None) == {}
    assert bool(held) == sdk.takes_optimizer()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
