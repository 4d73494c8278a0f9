"""Held-out episodes of several turns are kept one by one, with every message that was said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from envs.protocols import Episode, Turn
from evidence.execution import ExecutionFile
from evidence.run import EPISODES
from tasks.context import RunContext
from tasks.evaluation import BASE, Subject, evaluate
from tasks.failures import ServiceOutage
from tests.flows import tiny_spec
from tests.tasks.fake_runs import FakeEnvironment, context, open_fake

pytestmark = pytest.mark.anyio
SUBJECT = Subject(arm=BASE, seed=3, policy_version=0, open=open_fake)


@dataclass
class Conversations(FakeEnvironment):
    """Ten held-out items; in every episode the user asks, the policy calls, the tool fails."""

    async def run_episode(self, item_id: str, sampler: Any, *, settings: Any, seed: int) -> Episode:
        played = await FakeEnvironment.run_episode(
            self, item_id, sampler, settings=settings, seed=seed
        )
        turns = (
            Turn(turn=0, role="user", content=f"About {item_id}?", token_start=0, token_end=1),
            Turn(
                turn=0,
                role="assistant",
                content="\ud800",
                token_start=1,
                token_end=2,
                tool_name="look",
                tool_args="{}",
                stop_reason="stop",
            ),
            Turn(
                turn=0,
                role="tool",
                content="no",
                token_start=2,
                token_end=2,
                tool_name="look",
                tool_error="unknown order",
            ),
        )
        return replace(played, turns=turns)


def several_turns() -> Mapping[str, Any]:
    """Changes of the small execution file that give episodes several turns."""
    rollout = tiny_spec.execution(tiny_spec.spec())["rollout"] | {"max_turns": 3}
    return {"rollout": rollout, "simulator": {"kind": "scripted"}}


def conversations(folder: Path, environment: Conversations) -> RunContext:
    return context(folder, environment, planned=several_turns())


async def test_failed_judge_costs_no_finished_episode(tmp_path: Path) -> None:
    """Nine of ten are kept, and the next attempt asks for the tenth alone."""
    environment = Conversations(failing={"item-3"})
    ctx = conversations(tmp_path / "failed", environment)

    with pytest.raises(ServiceOutage, match="grading of item-3"):
        await evaluate(ctx, SUBJECT, BASE)
    kept = ctx.run.parts(BASE, "eval", BASE, folder=EPISODES)
    environment.failing.clear()
    environment.asked.clear()
    await evaluate(ctx, SUBJECT, BASE)
    whole = conversations(tmp_path / "whole", Conversations())
    await evaluate(whole, SUBJECT, BASE)

    assert kept == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert environment.asked == ["item-3"]
    assert ctx.run.content_digests() == whole.run.content_digests()


async def test_part_of_eight_is_never_taken_for_one_item(tmp_path: Path) -> None:
    """A directory may hold parts of eight under the same indices; all ten items are asked."""
    environment = Conversations()
    ctx = conversations(tmp_path, environment)
    row = {
        "arm": BASE,
        "label": BASE,
        "policy_version": 0,
        "item_id": "item-7",
        "metric": "accuracy",
        "seed": 3,
        "value": 0.0,
        "prediction": "",
        "stop_reason": "stop",
        "evaluator_id": "e",
    }
    ctx.run.write_part(BASE, "eval", BASE, 0, {"evaluations": [row]})

    await evaluate(ctx, SUBJECT, BASE)

    assert environment.asked == [f"item-{index}" for index in range(10)]
    rows = ctx.run.read_table("evaluations", key=(BASE, BASE))
    assert [row["value"] for row in rows] == [1.0] * 10


async def test_messages_are_kept_under_the_key_of_the_evaluation(tmp_path: Path) -> None:
    ctx = conversations(tmp_path, Conversations())

    await evaluate(ctx, SUBJECT, BASE)

    rows = ctx.run.read_table("evaluation_turns", key=(BASE, BASE))
    assert len(rows) == 30
    assert rows[3:6] == [
        {
            "arm": "base",
            "label": "base",
            "policy_version": 0,
            "item_id": "item-1",
            "seed": 3,
            "message": message,
            "turn": 0,
            "role": role,
            "content": content,
            "tool_name": tool,
            "tool_args": arguments,
            "tool_error": error,
            "stop_reason": stop,
            "token_start": start,
            "token_end": end,
        }
        for message, role, content, tool, arguments, error, stop, start, end in (
            (0, "user", "About item-1?", None, None, None, None, 0, 1),
            (1, "assistant", "\ud800", "look", "{}", None, "stop", 1, 2),
            (2, "tool", "no", "look", None, "unknown order", None, 2, 2),
        )
    ]


async def test_single_answers_are_kept_by_eights_without_messages(tmp_path: Path) -> None:
    ctx = context(tmp_path)

    await evaluate(ctx, SUBJECT, BASE)

    assert ctx.run.parts(BASE, "eval", BASE) == [0, 1]
    assert ctx.run.parts(BASE, "eval", BASE, folder=EPISODES) == []
    assert not ctx.run.has_table("evaluation_turns", key=(BASE, BASE))


async def test_progress_counts_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts hold eight items and two."""
    done: list[int] = []
    ctx = context(tmp_path)
    monkeypatch.setattr(ctx, "tell", lambda *_, **told: done.append(told["done"]))

    await evaluate(ctx, SUBJECT, BASE)

    assert done == [8, 10]


async def test_pilot_with_longer_episodes_changes_no_portions(tmp_path: Path) -> None:
    """Held-out items are played as planned: one answer each, kept by eights."""
    ctx = context(tmp_path)
    ctx.adopt(ExecutionFile.parse(ctx.run.execution | several_turns()), pilot_phase="pilot")

    await evaluate(ctx, SUBJECT, BASE)

    assert ctx.run.parts(BASE, "eval", BASE) == [0, 1]
