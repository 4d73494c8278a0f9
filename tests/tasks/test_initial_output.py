"""The output on the fixed batch can be captured again by a process that follows a killed one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tasks import restoration
from tasks.context import RunContext
from tasks.learner import Learner
from tests.tasks import recorded_runs


@pytest.mark.anyio
async def test_other_output_of_a_second_capture_is_kept_beside_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between file and event, on a service that does not repeat its scores."""
    run, _, _ = recorded_runs.create(tmp_path, recorded_runs.Plant())
    monkeypatch.setattr(restoration, "fixed_batch", lambda ctx: [])
    outputs = iter([[np.array([-1.0], np.float32)], [np.array([-1.5], np.float32)]])

    async def do(version: int, what: str, operation: Any) -> Any:
        return next(outputs)

    learner = cast(Learner, SimpleNamespace(arm=SimpleNamespace(name="dppo"), do=do))

    def forgetful(name: str) -> list[Any]:
        return []

    for _ in range(2):
        seen = SimpleNamespace(events=forgetful, write_file=run.write_file, append=run.append)
        await restoration._capture(cast(RunContext, SimpleNamespace(run=seen)), learner)

    files = [event["evidence"] for event in run.events("initial_output")]
    assert len(set(files)) == 2
    assert all(run.store.exists(f"files/{name}") for name in files)
