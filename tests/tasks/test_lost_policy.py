"""An evaluation waits for a policy that the service has lost, wherever it finds that out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from deploy.local_service.launch import LocalService
from tasks.arms import ArmPlan
from tasks.context import RunContext
from tasks.evaluation import Subject, evaluate
from tasks.failures import (
    Failure,
    FailureKind,
    ModelLost,
    PermanentServiceError,
    ServiceOutage,
)
from tasks.learner import Learner
from tasks.patience import RetryPolicy
from tasks.service import LoraSettings, Service
from tasks.service_settings import ServiceSettings
from tasks.trainer import TrainerInfo
from tests.tasks import recorded_runs
from tests.tasks.fake_runs import FakeService, context, open_fake

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


class Keeper:
    """A service that keeps some checkpoints, and says something else about the others."""

    def __init__(self, answers: dict[str, list[Failure]], *, broken: bool = False) -> None:
        self.answers, self.broken = answers, broken
        self.asked: list[str] = []
        self.clock = FakeService()

    async def load_trainer(self, uri: str, *, label: str) -> Any:
        self.asked.append(uri.rpartition("/")[2])
        waiting = self.answers.get(self.asked[-1], [])
        if waiting:
            failure = waiting[0] if self.broken else waiting.pop(0)
            raise failure.as_error(f"load {uri}")
        return SimpleNamespace(
            info=TrainerInfo("m", "tiny", 4, True, None, "tiny"), observe=_silent, close=_silent
        )

    def patience(self) -> Any:
        return self.clock.patience()


async def _silent() -> None:
    return None


class Replaying(Learner):
    """A learner whose updates are only counted."""

    async def _apply(self, trainer: Any, index: int) -> float | None:
        self.replayed = [*getattr(self, "replayed", []), index]
        self._version = index + 1
        return None


def _learner(folder: Path, keeper: Keeper) -> Replaying:
    """Its checkpoints were made after no, two and four updates."""
    run, execution, _ = recorded_runs.create(folder, recorded_runs.Plant())
    for version in (2, 4):
        uri = f"tinker://m/weights/{version}"
        run.append("checkpoint", arm="dppo", phase="train", step=0, policy_version=version, uri=uri)
    ctx = SimpleNamespace(
        run=run,
        execution=execution,
        service=keeper,
        server=SimpleNamespace(local={}),
        tell=lambda *_, **__: None,
    )
    arm = SimpleNamespace(name="dppo", loss=None)
    return Replaying(
        cast(RunContext, ctx), cast(ArmPlan, arm), phase="train", init_uri="tinker://m/weights/0"
    )


EXPIRED = Failure(FailureKind.PERMANENT, "Error code: 404 - no such checkpoint", 404)
LOST = Failure(FailureKind.LOST_MODEL, "Error code: 410 - model_lost", 410)


@pytest.mark.parametrize("failure", [EXPIRED, LOST], ids=["404", "410"])
async def test_checkpoint_that_is_gone_makes_way_for_the_one_before_it(
    failure: Failure, tmp_path: Path
) -> None:
    """Asked for on two sessions, then the older one is loaded and three updates are replayed."""
    learner = _learner(tmp_path, keeper := Keeper({"4": [failure] * 9}))

    await learner.at(5)

    assert keeper.asked == ["4", "4", "2"]
    assert learner.replayed == [2, 3, 4]
    (event,) = learner.ctx.run.events("checkpoint_gone")
    assert event["uri"] == "tinker://m/weights/4"
    assert (event["arm"], event["phase"], event["policy_version"]) == ("dppo", "train", 4)
    assert event["error"] == failure.text


async def test_initialization_checkpoint_is_the_last_to_be_tried(tmp_path: Path) -> None:
    learner = _learner(tmp_path, keeper := Keeper({"4": [EXPIRED] * 2, "2": [LOST] * 2}))

    await learner.at(4)

    assert keeper.asked == ["4", "4", "2", "2", "0"]
    assert learner.replayed == [0, 1, 2, 3]


async def test_checkpoint_that_was_found_gone_is_tried_first_the_next_time(tmp_path: Path) -> None:
    """The service was going down when it said so; it is told of once."""
    learner = _learner(tmp_path, keeper := Keeper({"4": [LOST] * 4}))

    for _ in range(3):
        await learner.at(4)
        await learner.drop()

    assert keeper.asked == ["4", "4", "2", "4", "4", "2", "4"]
    assert len(learner.ctx.run.events("checkpoint_gone")) == 1


async def test_one_answer_does_not_prove_that_a_checkpoint_is_gone(tmp_path: Path) -> None:
    learner = _learner(tmp_path, keeper := Keeper({"4": [LOST]}))

    await learner.at(4)

    assert keeper.asked == ["4", "4"]
    assert learner.ctx.run.events("checkpoint_gone") == []


@pytest.mark.parametrize(
    "failure",
    [
        Failure(FailureKind.LOST_MODEL, "session 's': no such session", 403),
        Failure(FailureKind.OUTAGE, "Connection error."),
        Failure(FailureKind.CAPACITY, "429", 429),
    ],
    ids=["session", "outage", "capacity"],
)
async def test_failure_that_is_not_about_the_checkpoint_is_waited_out(
    failure: Failure, tmp_path: Path
) -> None:
    learner = _learner(tmp_path, keeper := Keeper({"4": [failure] * 3}))

    await learner.at(4)

    assert keeper.asked == ["4"] * 4
    assert keeper.clock.clock.time > 0.0


async def test_run_stops_when_even_the_initialization_checkpoint_is_gone(tmp_path: Path) -> None:
    """Every one was asked for twice, and nothing is waited for."""
    keeper = Keeper({"4": [EXPIRED], "2": [EXPIRED], "0": [EXPIRED]}, broken=True)
    learner = _learner(tmp_path, keeper)

    with pytest.raises(PermanentServiceError, match="none of the 3 checkpoints") as error:
        await learner.at(4)

    assert error.value.final
    assert "initialization checkpoint tinker://m/weights/0: Error code: 404" in error.value.error
    assert keeper.asked == ["4", "4", "2", "2", "0", "0"]
    gone = learner.ctx.run.events("checkpoint_gone")
    assert [event["policy_version"] for event in gone] == [4, 2, 0]


async def test_service_that_answers_410_to_everything_is_waited_for(tmp_path: Path) -> None:
    """Nothing is known to be gone; the waiting ends as an outage, from which the run goes on."""
    learner = _learner(tmp_path, Keeper({"4": [LOST], "2": [LOST], "0": [LOST]}, broken=True))

    with pytest.raises(ServiceOutage, match="none of the 3 checkpoints") as error:
        await learner.at(4)

    assert error.value.final
    assert learner.ctx.run.events("checkpoint_gone") == []
