"""A load is held against what the service says it loaded, before any update is applied to it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deploy.local_service.launch import LocalService
from tasks.context import RunContext
from tasks.failures import PermanentServiceError, ServiceOutage
from tasks.journal_tables import write_journal
from tasks.openings import Openings
from tasks.service import LoraSettings, Service
from tasks.service_settings import ServiceSettings
from tasks.trainer import TrainerInfo
from tests.tasks import recorded_runs

PLANNED = {"type": "adamw", "learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95}
INFO = TrainerInfo("m1", "tiny", 4, True, None, "tiny")


class FakeTrainer:
    """A loaded client whose service says whatever it is told to say."""

    def __init__(self, observed: dict[str, Any] | None) -> None:
        self.info, self.observed, self.closed = INFO, observed, False

    async def observe(self) -> dict[str, Any] | None:
        return self.observed

    async def close(self) -> bool:
        self.closed = True
        return True


class Loads:
    """The loads of one arm, with the answers that the service gives to them in turn."""

    def __init__(self, folder: Path, *observed: dict[str, Any] | None, local: bool = True) -> None:
        self.run, execution, _ = recorded_runs.create(folder, recorded_runs.Plant())
        self.trainers = [FakeTrainer(one) for one in observed]
        self.saved: dict[str, dict[str, Any]] = {}
        waiting = iter(self.trainers)

        async def load_trainer(uri: str, *, label: str) -> FakeTrainer:
            return next(waiting)

        async def checkpoint(uri: str) -> dict[str, Any] | None:
            return self.saved.get(uri)

        ctx = SimpleNamespace(
            run=self.run,
            execution=execution,
            server=SimpleNamespace(local={"service": "x"} if local else {}),
            service=SimpleNamespace(
                load_trainer=load_trainer, reachability=SimpleNamespace(checkpoint=checkpoint)
            ),
        )
        self.ctx = ctx
        self.openings = Openings(cast(RunContext, ctx), "dppo", "train")


def _reported(**optimizer: Any) -> dict[str, Any]:
    return {"model_id": "m1", "optimizer": {**PLANNED, "steps": 0, **optimizer}}


@pytest.mark.anyio
async def test_load_of_the_right_state_is_recorded(tmp_path: Path) -> None:
    first = _reported() | {"restored_from": "tinker://s"}
    loads = Loads(tmp_path, first, _reported(steps=2))

    await loads.openings.load("tinker://a", 0, replayed=0)
    await loads.openings.load("tinker://b", 2, replayed=1)

    assert [event["restore"] for event in loads.openings.recorded()] == [0, 1]
    assert [event["loaded_uri"] for event in loads.openings.recorded()] == ["tinker://s", None]
    assert [trainer.closed for trainer in loads.trainers] == [False, False]


@pytest.mark.anyio
async def test_load_whose_process_was_killed_before_its_row_gets_it_with_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load 1 fell into attempt 2; the journal is written at the end of attempt 3."""
    loads = Loads(tmp_path, _reported(), _reported(steps=2))
    await loads.openings.load("tinker://a", 0, replayed=0)
    loads.run.close_attempt({"status": "failed"})
    loads.run.append("result", result={})

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loads.run, "write_table", killed)
        with pytest.raises(KeyboardInterrupt):
            await loads.openings.load("tinker://b", 2, replayed=1)
    loads.run.close_attempt({"status": "failed"})
    assert loads.run.keys("restores") == [("dppo", "train", 0)]

    write_journal(loads.run)

    [first] = loads.run.read_table("restores", key=("dppo", "train", 0))
    [second] = loads.run.read_table("restores", key=("dppo", "train", 1))
    assert (first["attempt"], first["checkpoint"], first["replayed_updates"]) == (
        1,
        "tinker://a",
        0,
    )
    assert (second["attempt"], second["checkpoint"], second["replayed_updates"]) == (
        2,
        "tinker://b",
        1,
    )
    assert second["optimizer_check"] == (
        '{"beta1":0.9,"beta2":0.95,"learning_rate":0.0001,"steps":2,"type":"adamw"}'
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"steps": 0}, "has done 0 steps, the checkpoint holds 2"),
        ({"steps": 2, "type": "sgd"}, "is sgd, planned is adamw"),
        ({"steps": 2, "beta2": 0.5}, "the beta2 of the optimizer that was loaded is 0.5"),
    ],
    ids=["moments_forgotten", "other_family", "other_setting"],
)
@pytest.mark.anyio
async def test_restore_of_another_optimizer_is_refused(
    changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """It is released, kept apart from the restores, and a right one may follow it."""
    loads = Loads(tmp_path, _reported(), _reported(**changed), _reported(steps=2))
    await loads.openings.load("tinker://a", 0, replayed=0)

    with pytest.raises(PermanentServiceError, match=words) as caught:
        await loads.openings.load("tinker://b", 2, replayed=0)

    assert caught.value.final
    assert loads.trainers[1].closed
    assert loads.run.events("load_refused")[0]["policy_version"] == 2
    await loads.openings.load("tinker://b", 2, replayed=0)
    assert [event["restore"] for event in loads.openings.recorded()] == [0, 1]


@pytest.mark.parametrize("name", ["adapter_sha256", "base_sha256"])
@pytest.mark.parametrize("version", [0, 2], ids=["first_load", "restore"])
@pytest.mark.anyio
async def test_load_of_other_weights_than_the_checkpoint_s_is_refused(
    version: int, name: str, tmp_path: Path
) -> None:
    """Same optimizer, same steps: only the digests tell."""
    digests = {"adapter_sha256": "a1", "base_sha256": "b1"}
    other = _reported(steps=version) | digests | {name: "c3"}
    loads = Loads(tmp_path, other, _reported(steps=version) | digests)
    loads.saved["tinker://x"] = digests

    with pytest.raises(PermanentServiceError, match=f"the {name} of the model .* is c3") as caught:
        await loads.openings.load("tinker://x", version, replayed=0)

    assert caught.value.final
    assert loads.trainers[0].closed
    assert loads.openings.recorded() == []
    (refused,) = loads.run.events("load_refused")
    assert (refused["requested_uri"], refused["policy_version"]) == ("tinker://x", version)
    await loads.openings.load("tinker://x", version, replayed=0)
    assert [event["restore"] for event in loads.openings.recorded()] == [0]


@pytest.mark.anyio
async def test_adapter_of_another_seed_is_refused_although_it_scores_alike(
    local_service: LocalService, tmp_path: Path
) -> None:
    """Half of a fresh adapter is zero whatever its seed is: the model's output is the same."""
    service = Service(ServiceSettings(url=local_service.url))
    right, other = [
        await service.create_trainer(LoraSettings("tiny", 4, seed), label="x") for seed in (0, 1)
    ]
    uri = await right.save("initialization")
    loads = Loads(tmp_path)
    loads.ctx.service = service

    await (await loads.openings.load(uri, 0, replayed=0)).close()
    loads.ctx.service = SimpleNamespace(
        load_trainer=_returning(other), reachability=service.reachability
    )
    with pytest.raises(PermanentServiceError, match="the adapter_sha256 of the model"):
        await loads.openings.load(uri, 0, replayed=0)

    assert await service.release_all()


def _returning(trainer: Any) -> Any:
    """A load that always gives the same client."""

    async def load_trainer(uri: str, *, label: str) -> Any:
        return trainer

    return load_trainer


@pytest.mark.parametrize(
    ("saved", "observed"),
    [
        ({}, {"adapter_sha256": "a1"}),
        ({"adapter_sha256": "a1"}, {"base_sha256": "b1"}),
        ({"adapter_sha256": "a1"}, {"adapter_sha256": None}),
        ({"adapter_sha256": None}, {"adapter_sha256": "a1"}),
    ],
    ids=["unknown_checkpoint", "other_reports", "hibernated_model", "silent_checkpoint"],
)
@pytest.mark.anyio
async def test_weights_are_compared_only_where_both_are_reported(
    saved: dict[str, Any], observed: dict[str, Any], tmp_path: Path
) -> None:
    loads = Loads(tmp_path, _reported() | observed)
    loads.saved["tinker://x"] = saved

    await loads.openings.load("tinker://x", 0, replayed=0)

    assert len(loads.openings.recorded()) == 1


@pytest.mark.anyio
async def test_embedded_service_must_say_what_it_loaded(tmp_path: Path) -> None:
    """The report was lost on its way: that is asked again, not left out of the record."""
    loads = Loads(tmp_path, None)

    with pytest.raises(ServiceOutage, match="no report about the loaded model m1") as caught:
        await loads.openings.load("tinker://a", 0, replayed=0)

    assert not caught.value.final
    assert loads.openings.recorded() == []


@pytest.mark.anyio
async def test_other_services_may_say_nothing(tmp_path: Path) -> None:
    loads = Loads(tmp_path, None, local=False)

    await loads.openings.load("tinker://a", 0, replayed=0)

    assert loads.openings.recorded()[0]["observed"] is None
