"""The conformance kit on the embedded service: no false alarm, and every fault caught by name."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from deploy.local_service.faults import FAULTS
from deploy.local_service.launch import LocalService
from evidence.conformance import ConformanceRecord, Scope, record_of
from evidence.conformance_probes import NEEDS, PROBES
from tasks import sdk
from tasks.conformance import chosen, measure, parts
from tasks.conformance_bench import Bench
from tasks.conformance_state import capacity_answer
from tasks.failures import CapacityBlocked
from tasks.patience import RetryPolicy
from tasks.service import Service
from tasks.service_settings import ServiceSettings
from tasks.trainer import Trainer

pytestmark = pytest.mark.anyio

POLICY = RetryPolicy(capacity_delays=(0.05,), outage_delays=(0.05,), before_first_step=2.0)
UNITS = "repeatable"
WHERE_SEEN = {
    "mean_instead_of_sum": ("sum_over_request", "learning_rate"),
    "mean_over_data": ("sum_over_request", "custom_loss"),
    "negative_weights_blown_up": ("sum_over_request", "custom_loss"),
    "normalised_by_weight_sum": ("sum_over_request", "weights_are_factors", "custom_loss"),
    "no_loss_metric": ("custom_loss", "weights_are_factors"),
    "forward_accumulates": ("forward_adds_nothing", "custom_loss"),
    "gradient_erased_between_chunks": ("gradients_accumulate",),
    "scrambled_order": ("result_order",),
    "logprobs_off_by_one": ("trainer_against_sampler",),
    "zero_logprobs_where_unweighted": ("result_order",),
    "step_applied_twice": ("gradient_cleared", "weight_decay"),
    "replay_executes_again": ("replayed_request",),
    "learning_rate_halved": ("learning_rate", "weight_decay"),
    "learning_rate_1000_times": ("learning_rate",),
    "gradient_clip_ignored": ("learning_rate",),
    "weight_decay_ignored": ("weight_decay",),
    "cold_adam_after_restore": ("optimizer_restored",),
    "restore_ignores_weights_only": ("optimizer_restored",),
    "save_resets_optimizer": ("optimizer_restored",),
    "stale_sampler": ("published_sampler",),
    "sampler_overwrites_training": ("published_sampler", "checkpoint_kinds"),
    "temperature_scaled_logprobs": ("logprobs_under_temperature",),
    "top_p_renormalised_logprobs": ("logprobs_under_top_p",),
    "sampler_disagrees_with_trainer": ("trainer_against_sampler", "logprobs_under_temperature"),
    "ignored_seed": ("seed",),
    "duplicate_samples": ("seed",),
    "stop_token_missing": ("seed",),
    "prompt_logprobs_shifted": ("trainer_against_sampler", "logprobs_under_temperature"),
    "lost_optimizer_report": ("reported_base_model",),
    "wrong_base_model_report": ("reported_base_model",),
}
"""For each fault of the embedded service a probe of every part of the kit that is asked here."""
STOPS_NOTHING = {
    "gradient_clip_ignored",
    "weight_decay_ignored",
    "restore_ignores_weights_only",
    "temperature_scaled_logprobs",
    "top_p_renormalised_logprobs",
    "sampler_disagrees_with_trainer",
    "ignored_seed",
    "duplicate_samples",
    "stop_token_missing",
    "prompt_logprobs_shifted",
    "lost_optimizer_report",
}
"""Faults that a comparison without clipping, decay, temperature and top_p does not rely on."""


async def _examined(
    url: str, *probes: str, scope: Scope = "whole", seed: int = 0
) -> ConformanceRecord:
    service = Service(ServiceSettings(url=url), policy=POLICY)
    wanted = chosen(scope, NEEDS)
    if probes:
        names = {*probes, UNITS} if _moves(probes) else {*probes}
        wanted = tuple(part for part in parts() if names.intersection(part.probes))
    bench = Bench(service, base_model="tiny", rank=4, seed=seed)
    found = await measure(bench, wanted)
    assert await service.release_all()
    return record_of(found, scope=scope, service={}, base_model="tiny", versions={})


def _moves(probes: tuple[str, ...]) -> bool:
    return any(part.moves for part in parts() if set(probes).intersection(part.probes))


def _unlike(record: ConformanceRecord) -> list[str | None]:
    """Reasons of every row that does not conform, but for what this SDK does not read."""
    unread = () if sdk.reads_optimizer() else ("reported_optimizer",)
    return [
        row.reason for row in record.probes if row.verdict != "conforms" and row.probe not in unread
    ]


def _switch(service: LocalService, *faults: str) -> None:
    control = f"{service.url}/api/v1/local/faults"
    httpx.post(control, json={"faults": list(faults)}, trust_env=False).raise_for_status()


def test_every_fault_has_its_place_and_every_probe_is_measured() -> None:
    assert WHERE_SEEN.keys() == FAULTS.keys()
    measured = {name for part in parts(capacity_clients=1) for name in part.probes}
    assert measured == PROBES.keys()


async def test_short_kit_has_no_finding_on_a_healthy_service(local_service: LocalService) -> None:
    record = await _examined(local_service.url, scope="short")

    assert _unlike(record) == []
    assert (record.faults, record.blocking) == ((), ())
    assert {"custom_loss", "replayed_request", "optimizer_restored"} <= {
        row.probe for row in record.probes
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4])
async def test_whole_kit_has_no_finding_on_a_healthy_service(
    local_service: LocalService, seed: int
) -> None:
    """Another adapter and other samples each time; no false alarm in any of them."""
    record = await _examined(local_service.url, seed=seed)

    assert _unlike(record) == []
    assert len(record.probes) == len(PROBES) - 1


@pytest.mark.parametrize(
    "fault",
    [
        *("negative_weights_blown_up", "logprobs_off_by_one", "ignored_seed"),
        "learning_rate_1000_times",
    ],
)
async def test_some_faults_are_caught_and_named(faulty_service: LocalService, fault: str) -> None:
    _switch(faulty_service, fault)

    record = await _examined(faulty_service.url, *WHERE_SEEN[fault])

    assert record.faults == (fault,)


@pytest.mark.slow
@pytest.mark.parametrize("fault", sorted(FAULTS))
async def test_every_fault_is_caught_and_named(faulty_service: LocalService, fault: str) -> None:
    """That name and no other, and a comparison is stopped where it relies on what is wrong."""
    _switch(faulty_service, fault)

    record = await _examined(faulty_service.url, *WHERE_SEEN[fault])

    assert record.verdict == "differs"
    assert record.faults == (fault,)
    assert bool(record.blocking) == (fault not in STOPS_NOTHING)


@pytest.fixture
def rounded_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every score is off by up to 0.02 nats, another time otherwise: 0.0133 nats in the mean."""
    forward, random = Trainer.forward, np.random.Generator(np.random.PCG64(0))

    async def rounded(self: Trainer, datums: Any) -> Any:
        found = await forward(self, datums)
        off = [random.uniform(-0.02, 0.02, len(values)) for values in found]
        return [
            np.where(values == 0.0, 0.0, values + more)  # a made-up 0 is not a score
            for values, more in zip(found, off, strict=True)
        ]

    monkeypatch.setattr(Trainer, "forward", rounded)


@pytest.mark.usefixtures("rounded_scores")
async def test_rounding_of_scores_is_measured_and_no_finding(local_service: LocalService) -> None:
    record = await _examined(local_service.url, "result_order", "forward_adds_nothing")

    assert _unlike(record) == []
    rows = {row.probe: row.observed for row in record.probes}
    for name in ("result_order", "unweighted_tokens", "forward_adds_nothing"):
        assert 0.005 < (rows[name]["rounding"] or 0.0) < 0.03


@pytest.mark.slow
@pytest.mark.usefixtures("rounded_scores")
@pytest.mark.parametrize(
    ("fault", "probe"),
    [
        ("scrambled_order", "result_order"),
        ("zero_logprobs_where_unweighted", "result_order"),
        ("forward_accumulates", "forward_adds_nothing"),
    ],
)
async def test_rounding_of_scores_hides_no_fault(
    faulty_service: LocalService, fault: str, probe: str
) -> None:
    _switch(faulty_service, fault)

    record = await _examined(faulty_service.url, probe)

    assert record.faults == (fault,)
    assert record.blocking != ()


async def test_capacity_answer_is_recognised_and_room_is_there_again(
    faulty_service: LocalService,
) -> None:
    service = Service(ServiceSettings(url=faulty_service.url), policy=POLICY)
    bench = Bench(service, base_model="tiny", rank=4)
    fault = {"path": "create_model", "skip": 1, "count": 1}
    action = {"kind": "fail_future", "error": "trainer capacity exhausted"}
    control = f"{service.settings.url}/api/v1/local/faults"
    httpx.post(control, json={"rules": [fault | {"actions": [action]}]}, trust_env=False)

    (measured,) = await capacity_answer(bench, most=3)

    assert measured.values == {
        "clients": 1.0,
        "refused": 1.0,
        "recognised": 1.0,
        "room_again": 1.0,
    }


async def test_service_without_capacity_ends_the_kit_as_it_ends_a_run(
    faulty_service: LocalService,
) -> None:
    """A refusal is no finding: it is waited out, and then says so."""
    action = {"kind": "fail_future", "error": "trainer capacity exhausted"}
    rule = {"path": "create_model", "count": None, "actions": [action]}
    control = f"{faulty_service.url}/api/v1/local/faults"
    httpx.post(control, json={"rules": [rule]}, trust_env=False).raise_for_status()

    with pytest.raises(CapacityBlocked, match="trainer capacity exhausted"):
        await _examined(faulty_service.url, "sum_over_request")
