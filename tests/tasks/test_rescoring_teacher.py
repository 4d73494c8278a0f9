"""Lost weights while a rollout is rescored: only what is gone is brought back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.context import RunContext
from tasks.failures import Failure, FailureKind, ModelLost, ServiceOutage
from tasks.teacher_models import TeacherModel
from tests.tasks.fake_runs import FakeService, context


class Sampler:
    """Remembers whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> bool:
        self.closed = True
        return True


class Opening(FakeService):
    """Opens published weights, and keeps what it opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[tuple[str, Sampler]] = []

    async def open_sampler(self, *, path: str, label: str) -> Sampler:
        self.opened.append((path, Sampler()))
        return self.opened[-1][1]


class Arm:
    """A learner that only counts how often its policy was lost."""

    def __init__(self, teacher: str) -> None:
        self.arm = SimpleNamespace(name="sdpo", advantage={"teacher": teacher})
        self.phase, self.init_uri = "train", "tinker://init"
        self.restored = 0

    def version_of_step(self, step: int) -> int:
        return 4 * step

    async def lost(self, error: ModelLost) -> None:
        self.restored += 1


def _lost(what: str) -> ModelLost:
    return ModelLost("gone", what=what, failure=Failure(FailureKind.LOST_MODEL, "gone"))


@pytest.fixture
def ctx(tmp_path: Path) -> RunContext:
    """A run whose initial weights have been published."""
    made = context(tmp_path, service=Opening())
    made.run.append("initial_published", of="tinker://init", uri="tinker://sampler")
    return made


def _teacher(ctx: RunContext, arm: Arm) -> TeacherModel:
    learner: Any = arm
    return TeacherModel(ctx, learner, 1)


def test_lost_frozen_teacher_is_opened_again_and_the_arm_is_left_alone(ctx: RunContext) -> None:
    arm, service = Arm("initial"), ctx.service
    assert isinstance(service, Opening)
    teacher = _teacher(ctx, arm)

    async def lose_and_open() -> Any:
        await teacher.open()
        await teacher.lost(_lost("score initial teacher"))
        return await teacher.open()

    sampler = asyncio.run(lose_and_open())

    assert arm.restored == 0
    assert [(path, one.closed) for path, one in service.opened] == [
        ("tinker://sampler", True),
        ("tinker://sampler", False),
    ]
    assert sampler is service.opened[1][1]
    (failure,) = ctx.run.events("service_failure")
    told = {name: failure[name] for name in ("arm", "phase", "what", "kind", "error")}
    assert told == {
        "arm": "sdpo",
        "phase": "train",
        "what": "initial teacher lost",
        "kind": "lost_model",
        "error": "gone",
    }


@pytest.mark.parametrize(
    ("teacher", "what"),
    [("initial", "likeliest tokens sdpo@4"), ("current", "score sdpo@4")],
)
def test_lost_policy_that_sampled_is_restored_by_its_arm(
    ctx: RunContext, teacher: str, what: str
) -> None:
    """Also where a frozen teacher is asked beside it, whose client stays open."""
    arm, service = Arm(teacher), ctx.service
    assert isinstance(service, Opening)
    model = _teacher(ctx, arm)

    async def lose() -> None:
        if teacher == "initial":
            await model.open()
        await model.lost(_lost(what))

    asyncio.run(lose())

    assert arm.restored == 1
    assert [one.closed for _, one in service.opened] == [False] * (teacher == "initial")


def _losses(ctx: RunContext, finished: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a frozen teacher is waited for; one more group is done each time, if any is."""
    teacher, times = _teacher(ctx, Arm("initial")), 0

    async def lose() -> None:
        nonlocal times
        for times in range(40):
            await teacher.lost(_lost("score initial teacher"))
            if finished is not None:
                finished.append(times)

    if finished is not None:
        monkeypatch.setattr(ctx.run, "parts", lambda *_, **__: finished)
    try:
        asyncio.run(lose())
    except ServiceOutage:
        return times
    return 40


def test_frozen_teacher_is_waited_for_as_long_as_the_policy_says(
    ctx: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits of 1, 2, 4, 8, 15, 30 and then 60 seconds; the 16th would end at 660, after 600."""
    assert _losses(ctx, None, monkeypatch) == 15


def test_waiting_for_the_frozen_teacher_begins_anew_after_progress(
    ctx: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _losses(ctx, [], monkeypatch) == 40
