"""Episodes of several turns are kept one by one; a slow, failed or killed one costs no other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from envs.protocols import Episode, Turn
from evidence.execution import ExecutionFile
from evidence.run import EPISODES, Run
from evidence.spec import Spec
from tasks.activation_values import pilot_evidence
from tasks.context import RunContext
from tasks.reachability import ServerInfo
from tasks.rollout import GroupSampling
from tasks.service import ServiceOutage
from tasks.teacher_evidence import judge_calls
from tests.flows import retail_spec
from tests.tasks.fake_runs import FakeService, episode

REWARDS = (1.0, 0.25, 0.5)
NOBODY: Any = None


class Shop:
    """Each sample earns what stands in `REWARDS`; those in `failing` are not graded."""

    def __init__(self, failing: set[int] | None = None) -> None:
        self.failing = failing or set()
        self.played: list[int] = []

    async def run_episode(self, item_id: str, sampler: Any, *, settings: Any, seed: int) -> Episode:
        sample = self.played_now
        self.played_now += 1
        await asyncio.sleep(0)
        if sample in self.failing:
            return episode(
                item_id,
                reward=float("nan"),
                metrics={},
                graded=False,
                info={"failure": "no answer"},
            )
        self.played.append(sample)
        turn = Turn(turn=0, role="assistant", content="\ud800", token_start=1, token_end=2)
        info = {"system_tokens": 1, "rationale": "Ask.", "judge_failures": ["prose"] * sample}
        return episode(item_id, reward=REWARDS[sample], turns=(turn,), info=info)

    played_now = 0


def _context(folder: Path, environment: Shop) -> RunContext:
    document = retail_spec.spec()
    execution = retail_spec.execution(document)
    run = Run.create(str(folder), run_id="fake", spec=document, execution=execution)
    service: Any = FakeService()
    ctx = RunContext(
        run=run,
        spec=Spec.parse(document),
        execution=ExecutionFile.parse(execution),
        service=service,
        server=ServerInfo(models=("tiny",)),
    )
    shop: Any = environment
    ctx.environment = shop
    return ctx


def _sample(ctx: RunContext, arm: str, group: int = 1) -> None:
    groups = GroupSampling(ctx, ctx.arm(arm), "train", 0, 0)
    asyncio.run(groups.sample(group, "item", NOBODY))


def test_finished_episodes_stay_where_another_was_not_graded(tmp_path: Path) -> None:
    ctx = _context(tmp_path, Shop(failing={1}))

    with pytest.raises(ServiceOutage, match="no answer"):
        _sample(ctx, "grpo")

    assert ctx.run.parts("grpo", "train", 0, folder=EPISODES) == [3, 5]
    assert ctx.run.parts("grpo", "train", 0) == []


def test_only_missing_episodes_are_played_again(tmp_path: Path) -> None:
    """Sample 1 of the group had failed; the resumed group plays it and nothing else."""
    with pytest.raises(ServiceOutage):
        _sample(_context(tmp_path / "killed", Shop(failing={1})), "grpo")
    again = Shop()
    again.played_now = 1
    ctx = _context(tmp_path / "killed", again)
    whole = _context(tmp_path / "whole", Shop())

    _sample(ctx, "grpo")
    _sample(whole, "grpo")

    assert again.played == [1]
    assert _part(ctx) == _part(whole)


def test_advantages_are_given_once_the_group_is_whole(tmp_path: Path) -> None:
    """GRPO's tokens have the reward minus 7/12; a teacher gives those of the other arm later."""
    rows = {}
    for arm in ("grpo", "sdpo"):
        ctx = _context(tmp_path / arm, Shop())
        _sample(ctx, arm)
        rows[arm] = ctx.run.read_part_rows(arm, "train", 0, 1)

    expected = [reward - 7 / 12 for reward in REWARDS]
    for arm in ("grpo", "sdpo"):
        assert [row["advantage"] for row in rows[arm]["rollouts"]] == pytest.approx(expected)
    trained = [row["advantage"] for row in rows["grpo"]["tokens"] if row["loss_mask"]]
    assert trained == pytest.approx(expected, abs=1e-7)
    assert [row["advantage"] for row in rows["grpo"]["tokens"] if not row["loss_mask"]] == [
        None
    ] * 3
    assert {row["advantage"] for row in rows["sdpo"]["tokens"]} == {None}


def test_judge_calls_are_one_answer_an_episode_and_its_failures(tmp_path: Path) -> None:
    """Samples 0, 1 and 2 needed 1, 2 and 3 calls."""
    ctx = _context(tmp_path, Shop())
    _sample(ctx, "grpo", group=0)
    ctx.run.assemble_parts("grpo", "train", 0, [0])

    calls = judge_calls(ctx.run, ["grpo"], "train")

    assert calls == [True, False, True, False, False, True]


def test_judge_that_never_answered_counts_against_the_pilot_it_failed_in(tmp_path: Path) -> None:
    """Three calls before the pilot began, and the simulator's, are not among them."""
    ctx = _context(tmp_path, Shop())
    ctx.run.append("partner_failed", partner="judge", attempts=3, problems=[])
    ctx.run.append("joint_step_running", phase="pilot", seconds=10.0)
    ctx.run.append("partner_failed", partner="simulator", attempts=3, problems=[])
    ctx.run.append("partner_failed", partner="judge", attempts=2, problems=[])

    evidence = pilot_evidence(ctx)

    assert evidence.judge_calls_parsed == [False, False]


def _part(ctx: RunContext) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = ctx.run.read_part_rows("grpo", "train", 0, 1)
    return rows
