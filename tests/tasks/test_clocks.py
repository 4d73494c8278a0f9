"""The wall-time budget counts from the first start of the run."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasks.clocks import wall_left_seconds
from tasks.context import RunContext
from tests.tasks.fake_runs import context


def _started(ctx: RunContext, minutes_ago: float, monkeypatch: pytest.MonkeyPatch) -> None:
    at = (datetime.now(UTC) - timedelta(minutes=minutes_ago)).isoformat()
    monkeypatch.setattr(ctx.run, "events", lambda event: [{"at": at}])


def test_wall_left_is_what_the_budget_leaves_after_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 of 30 minutes are used."""
    ctx = context(tmp_path)
    _started(ctx, 20.0, monkeypatch)

    assert wall_left_seconds(ctx) == pytest.approx(600.0, abs=30.0)


def test_wall_left_is_unknown_without_a_budget(tmp_path: Path) -> None:
    assert wall_left_seconds(context(tmp_path, budget={"max_steps": 4})) is None
