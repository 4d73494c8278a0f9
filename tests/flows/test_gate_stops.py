"""A gate that does not pass stops the spending and says why; it is never loosened."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from evidence.run import Run
from flows.run import run_comparison
from tasks.trainer import Trainer
from tests.flows import tiny_spec
from tests.flows.conftest import PlanMaker


def _gate(**changes: object) -> tiny_spec.Document:
    gate = copy.deepcopy(tiny_spec.SPEC["activation_gate"])
    for check in gate["checks"]:
        check.update(changes.get(check["metric"], {}))
    return tiny_spec.spec(activation_gate=gate)


def test_failed_activation_stops_before_training(plan_of: PlanMaker) -> None:
    document = _gate(policy_drift_abs_p_q90={"min": 0.99})
    plan = plan_of(document=document)

    outcome = run_comparison(plan)

    run = Run.open(f"{plan.run_dir}/run")
    assert (outcome.exit_kind, outcome.stopped_by) == ("stopped_by_gate", "activation")
    assert outcome.gate_status == "failed"
    assert "policy_drift_abs_p_q90: outside its accepted range" in outcome.reason
    assert run.keys("updates", prefix=("dppo", "train")) == []
    assert len(run.keys("updates", prefix=("dppo", "pilot"))) == 4
    result = run.result()
    assert result is not None
    assert (result["status"], result["verdict"]) == ("failed", "inconclusive")


def test_unknown_activation_metric_stops_unless_accepted_and_then_withholds(
    plan_of: PlanMaker,
) -> None:
    """Without evidence the run stops; accepted by name it goes on, and claims nothing."""
    document = tiny_spec.spec(
        activation_gate={
            "applicable": True,
            "reason": "one known, one unknown",
            "checks": [
                {"metric": "executed_updates_per_batch", "min": 2, "max": 2},
                {"metric": "entropy", "min": 0.0},
            ],
        }
    )
    plan = plan_of(document=document, limit=1)

    stopped = run_comparison(plan)
    again = run_comparison(plan)
    accepted = run_comparison(
        plan_of(document=document, limit=1, accept_unverified=("activation",))
    )

    run = Run.open(f"{plan.run_dir}/run")
    assert (stopped.stopped_by, stopped.gate_status) == ("activation", "unverified")
    assert again == stopped
    assert accepted.exit_kind == "inconclusive"
    event = run.events("accepted_unverified")[0]
    first_step = next(
        event["n"] for event in run.events("step_intent") if event["phase"] == "train"
    )
    assert event["gate"] == "activation"
    assert event["n"] < first_step


@pytest.mark.parametrize("gate", ["evaluator", "spec_preflight", "everything"])
def test_only_gates_of_the_service_can_be_accepted(gate: str, plan_of: PlanMaker) -> None:
    with pytest.raises(ValueError, match="--accept-unverified"):
        plan_of(accept_unverified=(gate,))


def test_changed_tolerance_fails_the_correctness_gate(plan_of: PlanMaker) -> None:
    """Float32 cannot reach a tolerance of 0: the measured error is kept, and the run stops."""
    preflight = copy.deepcopy(tiny_spec.SPEC["correctness_preflight"])
    preflight["paths"][0]["tolerances"]["reference_gradient"] = {"atol": 0.0, "rtol": 0.0}
    plan = plan_of(document=tiny_spec.spec(correctness_preflight=preflight))

    outcome = run_comparison(plan)

    run = Run.open(f"{plan.run_dir}/run")
    assert (outcome.stopped_by, outcome.gate_status) == ("correctness", "failed")
    row = next(
        check for check in run.gates()["correctness"].checks if check.check == "reference_gradient"
    )
    assert 0.0 < row.measured["max_abs_error"] < 1e-5
    assert run.events("initialization") == []


def test_adapter_without_a_seed_has_the_same_gradient_on_both_paths(plan_of: PlanMaker) -> None:
    """Fresh adapters then differ; the steps that are compared start from one of them."""
    preflight = copy.deepcopy(tiny_spec.SPEC["correctness_preflight"])
    preflight["paths"][0]["tolerances"]["reference_gradient"] = {"atol": 0.0, "rtol": 0.0}
    document = tiny_spec.spec(correctness_preflight=preflight)
    lora = {"rank": 4, "seed": None, "train_attn": True, "train_mlp": True, "train_unembed": False}
    plan = plan_of(document=document, execution=tiny_spec.execution(document, lora=lora))

    run_comparison(plan)

    checks = Run.open(f"{plan.run_dir}/run").gates()["correctness"].checks
    row = next(check for check in checks if check.check == "baseline_gradient")
    assert row.status == "passed"
    assert row.measured["reference_max_abs"] > 0.05


@pytest.fixture
def shaken_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every score of every training client is off by up to 0.0005 nats, another time otherwise."""
    forward, custom = Trainer.forward, Trainer.forward_backward_custom
    random = np.random.Generator(np.random.PCG64(0))

    def off(count: int) -> Any:
        return random.uniform(-5e-4, 5e-4, count).astype(np.float32)

    async def shaken(self: Trainer, datums: Any) -> Any:
        return [values + off(len(values)) for values in await forward(self, datums)]

    async def shaken_custom(self: Trainer, datums: Any, loss: Any) -> dict[str, float]:
        def shaken_loss(data: Any, logprobs: Any) -> Any:
            return loss(data, [values + torch.from_numpy(off(len(values))) for values in logprobs])

        return await custom(self, datums, shaken_loss)

    monkeypatch.setattr(Trainer, "forward", shaken)
    monkeypatch.setattr(Trainer, "forward_backward_custom", shaken_custom)


@pytest.mark.usefixtures("shaken_scores")
def test_service_that_does_not_repeat_its_scores_leaves_correctness_unverified(
    plan_of: PlanMaker,
) -> None:
    """Its loss value and its surrogate sum belong to scores that nobody has seen."""
    plan = plan_of()

    outcome = run_comparison(plan)

    run = Run.open(f"{plan.run_dir}/run")
    assert (outcome.stopped_by, outcome.gate_status) == ("correctness", "unverified")
    assert "the service does not repeat its own scores" in outcome.reason
    checks = {row.check: row.status for row in run.gates()["correctness"].checks}
    assert checks == {
        "baseline_loss": "unverified",
        "baseline_gradient": "unverified",
        "reference_loss": "passed",
        "reference_gradient": "passed",
    }
    for name in ("builtin_not_compared", "served_sums_not_compared"):
        (event,) = run.events(name)
        assert event["reason"] == "the service does not repeat its own scores"


def test_unknown_revision_leaves_correctness_unverified(plan_of: PlanMaker) -> None:
    preflight = copy.deepcopy(tiny_spec.SPEC["correctness_preflight"])
    preflight["paths"][0]["reference_revision"] = "someone/else@0123456"
    plan = plan_of(document=tiny_spec.spec(correctness_preflight=preflight))

    outcome = run_comparison(plan)

    assert (outcome.stopped_by, outcome.gate_status) == ("correctness", "unverified")
    assert "losses: matching reference_revision" in outcome.reason


def test_projection_over_budget_stops(plan_of: PlanMaker) -> None:
    plan = plan_of(document=tiny_spec.spec(budget={"max_wall_minutes": 0.05}))

    outcome = run_comparison(plan)

    assert (outcome.stopped_by, outcome.gate_status) == ("feasibility", "failed")
