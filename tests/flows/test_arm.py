"""An arm gives its client's room back however it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flows import arm as arm_module
from flows import steps
from flows.arm import run_arm
from tasks.failures import CapacityBlocked
from tasks.learner import Learner
from tasks.trainer import Trainer
from tests.tasks.fake_runs import context


class Client:
    """A live client that is only closed."""

    closed = 0

    async def close(self) -> bool:
        self.closed += 1
        return True


async def _evaluated(*_: Any) -> None:
    return None


async def _blocked(*_: Any) -> None:
    raise CapacityBlocked("slots are taken", final=True)


@pytest.mark.parametrize(("evaluation", "error"), [(_evaluated, None), (_blocked, CapacityBlocked)])
def test_arm_releases_its_client(
    evaluation: Any,
    error: type[Exception] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other arm may be waiting for that room, and goes on when this one was refused."""
    ctx = context(tmp_path)
    learner = Learner(ctx, ctx.arm("dppo"), phase="train", init_uri="tinker://zero")
    client = Client()
    learner._trainer = cast(Trainer, client)
    completed: list[str] = []
    result: Any = SimpleNamespace(complete_arm=lambda arm, metrics: completed.append(arm))
    monkeypatch.setattr(arm_module, "train_arm", _evaluated)
    monkeypatch.setattr(arm_module, "arm_metrics", lambda *_: {})
    monkeypatch.setattr(steps, "EVALUATION", evaluation)

    if error is None:
        asyncio.run(run_arm(ctx, learner, result))
    else:
        with pytest.raises(error):
            asyncio.run(run_arm(ctx, learner, result))

    assert completed == (["dppo"] if error is None else [])
    assert client.closed == 1
    assert learner.trainer is None
