"""A restored state is compared with the live one that was lost, and with one without moments."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from deploy.local_service.launch import LocalService
from evidence import restoration
from evidence.run import Run
from flows.outcome import Outcome
from flows.run import run_comparison
from tasks.failures import Failure, FailureKind, ModelLost
from tasks.patience import RetryPolicy
from tasks.sampling import ServiceSampler
from tasks.service import Service
from tasks.trainer import Trainer
from tests.flows.conftest import PlanMaker

QUICK = RetryPolicy(outage_delays=(0.1,))


@pytest.fixture
def lost_at_the_last_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each arm's client is lost when version 4 is to be saved; versions 2 and 3 are in the tables."""
    save, lost = Trainer.save, set[str]()

    async def losing(self: Trainer, name: str) -> str:
        session = str(self.info.model_id).partition(":")[0]
        if name == "train-000004" and len(lost) < 2 and session not in lost:
            lost.add(session)
            raise ModelLost("gone", failure=Failure(FailureKind.LOST_MODEL, "gone"))
        return await save(self, name)

    monkeypatch.setattr(Trainer, "save", losing)


@pytest.mark.usefixtures("lost_at_the_last_save")
def test_restores_are_compared_three_ways_and_enter_the_provenance(
    plan_of: PlanMaker, whole_run: tuple[Run, Outcome]
) -> None:
    """The resumed client scores like the live one to the last bit; one without moments does not."""
    plan = plan_of(policy=QUICK)

    outcome = run_comparison(plan)

    run = Run.open(outcome.run_path)
    assert run.content_digests() == whole_run[0].content_digests()
    compared = run.events("restore_three_way")
    assert sorted(event["arm"] for event in compared) == ["dppo", "grpo"]
    assert {event["verdict"] for event in compared} == {"kept"}
    assert {event["live_resumed"] for event in compared} == {0.0}
    assert all(event["live_cold"] > 1e-5 for event in compared)
    result: dict[str, Any] = run.result() or {}
    for arm in result["initialization_provenance"]["arms"]:
        assert arm["restore_count"] == 1
        (check,) = arm["restore_checks"]
        assert (check["after_restore"], check["policy_version"]) == (1, 2)
        assert check["live_resumed"] == [0.0, 0.0]
        assert check["optimizer"] == "kept"
    judged = restoration.validate(run.spec, result["initialization_provenance"])
    assert judged.to_record()["status"] == "passed"


@pytest.mark.usefixtures("lost_at_the_last_save")
def test_run_goes_on_from_an_older_checkpoint_where_the_newest_has_expired(
    plan_of: PlanMaker,
    whole_run: tuple[Run, Outcome],
    local_service: LocalService,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Version 2 of each arm is deleted as soon as it is saved; its restore replays from version 0."""
    save = Trainer.save

    async def expiring(self: Trainer, name: str) -> str:
        uri = await save(self, name)
        if name == "train-000002":
            model = uri.removeprefix("tinker://").partition("/")[0]
            path = f"/api/v1/training_runs/{model}/checkpoints/weights/{name}"
            httpx.delete(local_service.url + path).raise_for_status()
        return uri

    monkeypatch.setattr(Trainer, "save", expiring)

    outcome = run_comparison(plan_of(policy=QUICK))

    run = Run.open(outcome.run_path)
    assert run.content_digests() == whole_run[0].content_digests()
    gone = sorted(
        (event["arm"], event["policy_version"]) for event in run.events("checkpoint_gone")
    )
    assert gone == [("dppo", 2), ("grpo", 2)]
    restores = [event for event in run.events("client_opened") if event["restore"] > 0]
    assert {(event["policy_version"], event["replayed_updates"]) for event in restores} == {(0, 4)}
    assert {event["difference"] for event in run.events("replay_compared")} == {0.0}


def test_weights_that_were_forgotten_as_soon_as_they_were_published_are_published_again(
    plan_of: PlanMaker, whole_run: tuple[Run, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times per arm, while the client that they came from is alive: names never collide."""
    opening, forgotten = Service.open_sampler, dict.fromkeys(("grpo@4", "dppo@4"), 3)

    async def forgetting(self: Service, *, label: str, **options: Any) -> ServiceSampler:
        if forgotten.get(label):
            forgotten[label] -= 1
            raise ModelLost("gone", failure=Failure(FailureKind.LOST_MODEL, "gone"))
        return await opening(self, label=label, **options)

    monkeypatch.setattr(Service, "open_sampler", forgetting)

    outcome = run_comparison(plan_of(policy=QUICK))

    run = Run.open(outcome.run_path)
    assert forgotten == {"grpo@4": 0, "dppo@4": 0}
    assert run.content_digests() == whole_run[0].content_digests()
    names = sorted(event["uri"].rpartition("/")[2] for event in run.events("published"))
    assert len(names) > 2
    assert set(names) >= {"train-sampler-000004", "train-sampler-000004-2"}


@pytest.fixture
def silent_about_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service says everything about a loaded model, except how many steps it has taken."""
    observe = Trainer.observe

    async def observing(self: Trainer) -> dict[str, Any] | None:
        found = await observe(self)
        if found and found.get("optimizer"):
            found["optimizer"].pop("steps", None)
        return found

    monkeypatch.setattr(Trainer, "observe", observing)


@pytest.mark.slow
@pytest.mark.usefixtures("lost_at_the_last_save", "silent_about_steps")
def test_run_ends_on_a_service_that_restores_without_the_moments(
    faulty_service: LocalService, plan_of: PlanMaker
) -> None:
    """Its reports say that all is well; the scores one step later say that it is not."""
    control = f"{faulty_service.url}/api/v1/local/faults"
    httpx.post(control, json={"faults": ["cold_adam_after_restore"]}).raise_for_status()

    outcome = run_comparison(plan_of(policy=QUICK))

    assert outcome.exit_kind == "service_refused"
    assert "moments were not restored" in outcome.reason
    assert Run.open(outcome.run_path).events("load_refused")
