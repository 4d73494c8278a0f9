"""A service without capacity ends an attempt, not the run; a service that is wrong ends the run."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import httpx
import pytest

from deploy.local_service.launch import LocalService
from evidence.run import Run
from flows import run as run_module
from flows.outcome import Outcome
from flows.run import run_comparison
from tasks.failures import ModelLost, ServiceError, ServiceOutage, UnknownOutcome
from tasks.patience import RetryPolicy
from tasks.progress import ProgressEvent
from tasks.service_settings import Deadlines, ServiceSettings
from tests.flows.conftest import PlanMaker

SHORT = RetryPolicy(
    capacity_delays=(0.1, 0.2),
    outage_delays=(0.1, 0.2),
    before_first_step=1.0,
    after_first_step=2.0,
)
EXHAUSTED = "engine refused work: trainer capacity exhausted"


def _faults(service: LocalService, **plan: Any) -> None:
    httpx.post(f"{service.url}/api/v1/local/faults", json=plan).raise_for_status()


def _refuse_creation(skip: int) -> dict[str, Any]:
    action = {"kind": "fail_future", "error": EXHAUSTED, "message": EXHAUSTED}
    return {"path": "load_weights", "skip": skip, "count": None, "actions": [action]}


def test_block_before_the_first_step_closes_the_attempt_and_the_run_goes_on_later(
    faulty_service: LocalService, plan_of: PlanMaker, whole_run: tuple[Run, Outcome]
) -> None:
    """Refused when the arms' clients are loaded; once there is capacity, the run ends as ever."""
    plan = plan_of(policy=SHORT)
    _faults(faulty_service, rules=[_refuse_creation(0)])

    blocked = run_comparison(plan)
    run = Run.open(f"{plan.run_dir}/run")
    record = run.read_json("attempts/1/result.json")
    _faults(faulty_service, rules=[])
    ended = run_comparison(plan)

    assert blocked.exit_kind == "capacity"
    assert (record["status"], record["verdict"]) == ("failed", "inconclusive")
    block = record["capacity_block"]
    assert EXHAUSTED in block["error"]
    assert block["comparison_steps_completed"] == 0
    assert block["released_clients"] is True
    assert "create training client probe-grpo" in [one["client"] for one in block["released"]]
    assert {one["confirmed"] for one in block["released"]} == {True}
    assert ended.verdict == whole_run[1].verdict
    assert run.content_digests() == whole_run[0].content_digests()
    assert "capacity_block" not in (run.result() or {})
    assert {event["gate"] for event in run.events("gate")} == set(run.gates())
    assert len(run.events("gate")) == len(run.gates())


@pytest.mark.parametrize("error", [ModelLost, UnknownOutcome])
def test_loss_that_nothing_made_good_ends_the_attempt_and_not_the_run(
    error: type[ServiceError], plan_of: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever let it through, the run is closed in order and can be carried on."""

    async def losing(*_: object) -> dict[str, Any]:
        raise error("gone")

    monkeypatch.setattr(run_module, "pass_gates", losing)

    outcome = run_comparison(plan_of(policy=SHORT))

    assert outcome.exit_kind == "capacity"
    run = Run.open(outcome.run_path)
    assert [event["final"] for event in run.events("ended")] == [False]
    assert "capacity_block" not in (run.result() or {})


def test_block_after_steps_reports_their_true_number(
    faulty_service: LocalService, plan_of: PlanMaker
) -> None:
    """Once an arm has finished a training step, the service loses every model and loads none."""
    lost = {"kind": "status", "status": 410, "error": "model_lost"}
    rules = [
        {"path": "optim_step", "count": None, "actions": [lost]},
        {"path": "save_weights", "count": None, "actions": [lost]},
        _refuse_creation(0),
    ]

    def lose(event: ProgressEvent) -> None:
        if event.phase == "train":
            _faults(faulty_service, rules=rules)

    plan = plan_of(policy=SHORT, progress=lose)

    blocked = run_comparison(plan)

    run = Run.open(f"{plan.run_dir}/run")
    done = len([key for key in run.keys("updates") if key[1] == "train"])
    assert blocked.exit_kind == "capacity"
    assert 1 <= done < 8
    assert blocked.steps_completed == done
    block = run.read_json("attempts/1/result.json")["capacity_block"]
    assert block["comparison_steps_completed"] == done


@pytest.mark.parametrize(
    "fault",
    [
        "mean_instead_of_sum",
        pytest.param("negative_weights_blown_up", marks=pytest.mark.slow),
        pytest.param("mean_over_data", marks=pytest.mark.slow),
        pytest.param("logprobs_off_by_one", marks=pytest.mark.slow),
        pytest.param("scrambled_order", marks=pytest.mark.slow),
    ],
)
def test_wrong_gradient_of_the_service_fails_the_correctness_gate(
    fault: str, faulty_service: LocalService, plan_of: PlanMaker
) -> None:
    plan = plan_of()
    _faults(faulty_service, faults=[fault])

    outcome = run_comparison(plan)

    assert (outcome.stopped_by, outcome.gate_status) == ("correctness", "failed")


def test_service_that_hides_its_optimizer_leaves_restoration_unverified(
    faulty_service: LocalService, plan_of: PlanMaker
) -> None:
    plan = plan_of()
    _faults(faulty_service, faults=["lost_optimizer_report"])

    outcome = run_comparison(plan)

    assert (outcome.stopped_by, outcome.gate_status) == ("restoration", "unverified")
    assert "was not read from a server response" in outcome.reason


def test_other_model_than_planned_fails_the_probe(
    faulty_service: LocalService, plan_of: PlanMaker
) -> None:
    plan = plan_of()
    _faults(faulty_service, faults=["wrong_base_model_report"])

    outcome = run_comparison(plan)

    assert (outcome.stopped_by, outcome.gate_status) == ("service_probe", "failed")
    assert "planned is 'tiny'" in outcome.reason


def test_service_that_is_not_there_is_known_within_half_a_minute(plan_of: PlanMaker) -> None:
    plan = plan_of()
    absent = ServiceSettings(url="http://127.0.0.1:1", deadlines=Deadlines(reach=1.0))
    started = time.monotonic()

    with pytest.raises(ServiceOutage):
        run_comparison(dataclasses.replace(plan, service=absent))

    assert time.monotonic() - started < 10.0
    assert Deadlines().reach < 30.0
