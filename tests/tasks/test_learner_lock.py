"""An arm's live client does one thing at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tasks.arms import ArmPlan
from tasks.context import RunContext
from tasks.learner import Learner
from tests.tasks import recorded_runs


class FakeTrainer:
    """A loaded client; what is asked of it while it is released has failed."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(
            model_id="m", base_model="tiny", lora_rank=4, optimizer=None, tokenizer=None
        )
        self.closed = False

    async def observe(self) -> None:
        return None

    async def close(self) -> bool:
        self.closed = True
        return True


@pytest.mark.anyio
async def test_operations_on_the_client_do_not_overlap(tmp_path: Path) -> None:
    run, execution, _ = recorded_runs.create(tmp_path, recorded_runs.Plant())
    run.append(
        "checkpoint", arm="dppo", phase="train", step=0, policy_version=2, uri="tinker://two"
    )

    async def load_trainer(uri: str, *, label: str) -> FakeTrainer:
        return FakeTrainer()

    patience = SimpleNamespace(start=lambda: None)
    service = SimpleNamespace(load_trainer=load_trainer, patience=lambda: patience)
    ctx = SimpleNamespace(
        run=run, execution=execution, service=service, server=SimpleNamespace(local={})
    )
    arm = SimpleNamespace(name="dppo", loss=None)
    learner = Learner(
        cast(RunContext, ctx), cast(ArmPlan, arm), phase="train", init_uri="tinker://zero"
    )

    async def look(trainer: Any) -> bool:
        for _ in range(5):
            await asyncio.sleep(0)
        return bool(trainer.closed)

    released = await asyncio.gather(learner.do(2, "update", look), learner.do(0, "publish", look))

    assert released == [False, False]
