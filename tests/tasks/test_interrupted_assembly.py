"""A step whose tables were cut off between two of them is completed from its parts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from envs.protocols import Episode, Turn
from evidence.errors import InputError
from tasks.context import RunContext
from tasks.learner import Learner
from tasks.rollout import sample_rollout
from tasks.trajectories import stored_trajectories
from tests.flows import retail_spec
from tests.tasks.fake_runs import FakeEnvironment, context, episode

pytestmark = pytest.mark.anyio

KEY = ("sdpo", "train", 0)


class Talk(FakeEnvironment):
    """Every episode is a conversation of one message."""

    async def run_episode(self, item_id: str, sampler: Any, *, settings: Any, seed: int) -> Episode:
        self.asked.append(item_id)
        turn = Turn(turn=0, role="assistant", content="Hi.", token_start=1, token_end=2)
        return episode(item_id, turns=(turn,), info={"system_tokens": 1, "rationale": "Ask."})


def _talk(folder: Path) -> RunContext:
    document = retail_spec.spec()
    return context(folder, Talk(), planned=retail_spec.execution(document), **document)


def _learner(ctx: RunContext, arm: str) -> Learner:
    async def sampler(version: int) -> None:
        return None

    fake = SimpleNamespace(
        arm=ctx.arm(arm),
        phase="train",
        sampler=sampler,
        version_of_step=lambda step: 0,
        progressed=lambda: None,
    )
    return cast(Learner, fake)


def _cut_off(ctx: RunContext, monkeypatch: pytest.MonkeyPatch, *, at: str) -> None:
    """Let the disk be full when the table of that name is to be written, once."""
    write = ctx.run.write_table

    def failing(table: str, rows: Any, *, key: Any = ()) -> Any:
        if table == at:
            monkeypatch.setattr(ctx.run, "write_table", write)
            raise InputError(table, "No space left on device", "a disk with room")
        return write(table, rows, key=key)

    monkeypatch.setattr(ctx.run, "write_table", failing)


@pytest.mark.parametrize("at", ["rollouts", "tokens", "turns"])
async def test_step_that_was_cut_off_between_two_tables_is_completed(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six episodes are played once; all three tables are there in the end."""
    ctx = _talk(tmp_path / "cut")
    whole = _talk(tmp_path / "whole")
    _cut_off(ctx, monkeypatch, at=at)
    with pytest.raises(InputError, match="No space left"):
        await sample_rollout(ctx, _learner(ctx, "sdpo"), 0)
    assert not ctx.run.has_table(at, key=KEY)

    ref = await sample_rollout(ctx, _learner(ctx, "sdpo"), 0)
    await sample_rollout(whole, _learner(whole, "sdpo"), 0)

    assert ref.path == "tables/tokens/sdpo/train/000000.parquet"
    assert len(cast(Talk, ctx.environment).asked) == 6
    assert ctx.run.content_digests() == whole.run.content_digests()
    assert [one.turns[0].content for one in stored_trajectories(ctx, KEY)] == ["Hi."] * 6


async def test_teacher_is_shown_no_step_whose_messages_are_missing(tmp_path: Path) -> None:
    """An empty solution would look like any other."""
    ctx = _talk(tmp_path)
    await sample_rollout(ctx, _learner(ctx, "sdpo"), 0)
    (tmp_path / "fake/tables/turns/sdpo/train/000000.parquet").unlink()

    with pytest.raises(InputError, match=r"turns/sdpo/train/000000\.parquet: expected a file"):
        stored_trajectories(ctx, KEY)


async def test_step_without_messages_is_whole_without_their_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written for it again."""
    ctx = context(tmp_path)
    arm = ctx.arms[0].name
    first = await sample_rollout(ctx, _learner(ctx, arm), 0)
    monkeypatch.setattr(ctx.run, "write_table", None)

    again = await sample_rollout(ctx, _learner(ctx, arm), 0)

    assert again == first
    assert ctx.run.keys("turns") == []
