"""A comparison asks its service first whether it does what the comparison relies on."""

from __future__ import annotations

import copy

import httpx
import pytest

from deploy.local_service.launch import LocalService
from evidence.bundle import build_bundle
from evidence.conformance import ConformanceRecord
from evidence.run import Run
from flows.outcome import Outcome
from flows.run import run_comparison
from tests.flows import tiny_spec
from tests.flows.conftest import PlanMaker


@pytest.mark.usefixtures("real_kit")
def test_service_with_a_wrong_loss_path_is_refused_before_anything_is_trained(
    plan_of: PlanMaker, faulty_service: LocalService
) -> None:
    """The reason names probe and mistake; the record is part of the evidence."""
    control = f"{faulty_service.url}/api/v1/local/faults"
    faults = {"faults": ["negative_weights_blown_up"]}
    httpx.post(control, json=faults, trust_env=False).raise_for_status()
    plan = plan_of()

    outcome = run_comparison(plan)

    run = Run.open(f"{plan.run_dir}/run")
    assert (outcome.exit_kind, outcome.stopped_by) == ("stopped_by_gate", "conformance")
    assert "custom_loss: expected first 1, second -1" in outcome.reason
    assert "looks like negative_weights_blown_up" in outcome.reason
    assert run.events("initialization") == []
    event = run.events("conformance")[0]
    record = ConformanceRecord.parse(run.read_bytes(event["path"]))
    assert record.faults == ("negative_weights_blown_up",)
    assert event["path"].removeprefix("files/") in build_bundle(run).files


def test_record_of_a_finished_run_names_what_was_relied_on(
    whole_run: tuple[Run, Outcome],
) -> None:
    run, _ = whole_run
    event = run.events("conformance")[0]

    record = ConformanceRecord.parse(run.read_bytes(event["path"]))

    assert record.needs == ("restore", "sampling", "training")
    assert (record.base_model, record.scope) == ("tiny", "short")
    assert run.gates()["conformance"].reads[0].sha256 == event["sha256"]


def test_missing_evidence_that_the_service_does_report_cannot_be_accepted(
    plan_of: PlanMaker,
) -> None:
    """A reference that nobody has is the spec's lack, not the service's."""
    preflight = copy.deepcopy(tiny_spec.SPEC["correctness_preflight"])
    preflight["paths"][0]["reference_revision"] = "someone/else@0123456"
    document = tiny_spec.spec(correctness_preflight=preflight)
    plan = plan_of(document=document, accept_unverified=("correctness",))

    outcome = run_comparison(plan)

    assert (outcome.stopped_by, outcome.gate_status) == ("correctness", "unverified")
    assert "not accepted: the service reports builtin_loss, loss" in outcome.reason
    assert Run.open(f"{plan.run_dir}/run").events("accepted_unverified") == []
