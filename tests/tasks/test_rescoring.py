"""Rescoring: who is shown to whom, where each score belongs, and what a trajectory without one is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from deploy.local_service.launch import LocalService
from deploy.local_service.tiny_model import write_tiny
from envs.protocols import Episode, EpisodeSettings
from envs.registry import make_environment
from envs.rendering import make_renderer
from envs.retail.scripted_agent import ScriptedPolicy, call_text
from envs.teacher import TeacherSequence
from losses.reference import sdpo
from tasks.datums import TrainedSequence, loss_inputs_of, with_teacher
from tasks.rescoring import aligned_scores, plan_advantages, teacher_row, token_rows
from tasks.rescoring_check import alignment_error, sampled_spans
from tasks.sampling import ServiceSampler
from tasks.sequences import sampled_sequence
from tasks.service import Service
from tasks.service_settings import ServiceSettings
from tasks.tokenizers import load_tokenizer
from tasks.trajectories import TeacherPlan, Trajectory, teacher_plans
from tests.flows.retail_spec import SDPO

MESSY = [
    "  What is your email?\n",
    call_text("find_user", {"email": "amy@mail.com"}) * 2,
    '<tool_call>{"name":"get_product","arguments":{"item":"lamp"}}</tool_call>',
    "<tool_call>{]",
    "é 漢 🙂",
]
SHORT = ["Hello."]
FIXTURES = Path(__file__).resolve().parents[1] / "losses" / "fixtures"
GOLDEN = json.loads((FIXTURES / "sdpo_token_advantage.json").read_text())["cases"]
SETTINGS = SDPO | {"solution_threshold": 0.8}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The embedded shop over the tiny model's tokenizer, and its renderer."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    tokenizer = load_tokenizer(str(folder))
    environment = make_environment(
        "retail", {}, tokenizer=tokenizer, renderer="qwen3_instruct", system_prompt="Help."
    )
    return environment, make_renderer("qwen3_instruct", tokenizer)


def _episode(shop: tuple[Any, Any], texts: Sequence[str]) -> Episode:
    environment, renderer = shop
    settings = EpisodeSettings(max_tokens=400, max_turns=len(texts))
    policy = ScriptedPolicy(texts, renderer)
    item = environment.train_ids[0]
    played: Episode = asyncio.run(environment.run_episode(item, policy, settings=settings, seed=0))
    return played


@pytest.fixture(scope="module")
def trajectories(shop: tuple[Any, Any]) -> list[Trajectory]:
    """Two groups: rewards 0.9, 0.83, 0.9 and 0.5, 0.85; a failed attempt may be among the best."""
    rewards = [(0, 0.9), (0, 0.83), (0, 0.9), (1, 0.5), (1, 0.85)]
    episodes = [_episode(shop, MESSY), _episode(shop, SHORT)]
    made = []
    for number, (group, reward) in enumerate(rewards):
        episode = episodes[number % 2]
        sample = number - 3 * group
        made.append(
            Trajectory(
                sequence=sampled_sequence(episode, group=group, sample=sample, advantage=0.0),
                reward=reward,
                native_reward=float(number),
                group_advantage=0.25,
                system_tokens=episode.info["system_tokens"],
                feedback=f"Words on {number}.",
                turns=episode.turns,
            )
        )
    return made


def _plans(shop: tuple[Any, Any], given: list[Trajectory], **changes: Any) -> list[TeacherPlan]:
    return teacher_plans(given, SETTINGS | changes, shop[0])


def test_best_sibling_above_the_bar_is_shown_and_never_the_attempt(
    shop: tuple[Any, Any], trajectories: list[Trajectory]
) -> None:
    """Ties go to the lower sample; a lone success is shown to the others alone."""
    shown = [
        None if plan.solution is None else plan.solution.sequence.sample
        for plan in _plans(shop, trajectories)
    ]

    assert shown == [2, 0, 0, 1, None]


def test_failed_attempt_shown_as_solution_has_its_native_reward_beside(
    shop: tuple[Any, Any], trajectories: list[Trajectory]
) -> None:
    """A composite of 0.83 passes the bar although the task was not solved."""
    given = [trajectories[0], replace(trajectories[1], reward=0.95, native_reward=0.0)]
    (plan, _) = _plans(shop, given)
    advantages = plan_advantages(SETTINGS, plan, _nothing(plan))

    row = teacher_row(plan, advantages, version=3)

    assert (row["solution_reward"], row["solution_native_reward"]) == (0.95, 0.0)
    assert (row["solution_sample"], row["policy_version"]) == (1, 3)


def test_nothing_to_show_is_nothing_to_score(
    shop: tuple[Any, Any], trajectories: list[Trajectory]
) -> None:
    (plan,) = _plans(shop, [trajectories[1]], feedback="none")
    advantages = plan_advantages(SETTINGS, plan, _nothing(plan))

    assert (plan.scored, plan.over_length) == (None, False)
    assert set(advantages.advantages_T.tolist()) == {0.0}
    rows = token_rows(plan, _nothing(plan), advantages)
    assert len(rows) == trajectories[1].sequence.loss_tokens
    assert {row["teacher_prefix_tokens"] for row in rows} == {0}
    assert all(np.isnan(row["teacher_logprob"]) for row in rows)


@pytest.mark.parametrize(
    ("policy", "room", "expected"),
    [
        ("drop_solution", 10_000, (True, False, False)),
        ("drop_solution", 0, (False, True, False)),
        ("drop_solution", -400, (False, True, True)),
        ("zero_advantage", 0, (False, True, True)),
    ],
)
def test_sequence_that_is_too_long_has_a_counted_outcome(
    shop: tuple[Any, Any],
    trajectories: list[Trajectory],
    policy: str,
    room: int,
    expected: tuple[bool, bool, bool],
) -> None:
    """``room``: tokens beyond those that the attempt needs with feedback alone."""
    alone = _plans(shop, trajectories, solution_choice="none")[0].scored
    assert alone is not None
    limit = len(alone.tokens) + room
    plan = _plans(shop, trajectories, over_length=policy, max_teacher_tokens=limit)[0]

    row = teacher_row(plan, plan_advantages(SETTINGS, plan, _nothing(plan)), version=0)

    assert (row["solution_shown"], row["solution_dropped"], row["over_length"]) == expected
    assert row["teacher_tokens"] <= limit
    assert row["missing_tokens"] == row["trained_tokens"]


def _nothing(plan: TeacherPlan) -> Any:
    class Silent:
        async def compute_logprobs(self, tokens: Sequence[int]) -> list[float | None]:
            return [None] * len(tokens)

    silent: Any = Silent()
    return asyncio.run(aligned_scores(plan, silent))


@asynccontextmanager
async def _scorer(url: str) -> AsyncIterator[ServiceSampler]:
    service = Service(ServiceSettings(url=url))
    sampler = await service.open_sampler(base_model="tiny", label="scorer")
    try:
        yield sampler
    finally:
        await service.release_all()


@pytest.mark.anyio
async def test_every_turn_of_a_long_trajectory_has_its_own_scores(
    shop: tuple[Any, Any], trajectories: list[Trajectory], local_service: LocalService
) -> None:
    """Messy turns with tool results between; one position off is an error of nats."""
    plans = _plans(shop, trajectories)[:2]
    async with _scorer(local_service.url) as scorer:
        aligned = [await aligned_scores(plan, scorer) for plan in plans]
        exact = await alignment_error(plans, aligned, scorer)
        shifted = [
            one._replace(teacher_logprobs_T=one.teacher_logprobs_T.roll(1)) for one in aligned
        ]
        off = await alignment_error(plans, shifted, scorer)

    assert exact.turns == len(MESSY) + len(SHORT)
    assert exact.tokens == sum(plan.trajectory.sequence.loss_tokens for plan in plans)
    assert exact.max_abs < 1e-4
    assert off.mean_abs > 0.5


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["sdpo_token", "sdpo_sequence", "sdpo_hybrid"])
async def test_advantages_equal_the_float64_reference_on_served_scores(
    shop: tuple[Any, Any], trajectories: list[Trajectory], local_service: LocalService, kind: str
) -> None:
    settings = SETTINGS | {"kind": kind, "clip": 1.0, "grpo_weight": 0.75}
    plan = _plans(shop, trajectories)[0]
    assert plan.scored is not None
    sequence = plan.trajectory.sequence
    async with _scorer(local_service.url) as scorer:
        served = await scorer.compute_logprobs(plan.scored.tokens)
        aligned = await aligned_scores(plan, scorer)
    per_token = np.array(
        sdpo.aligned_advantages(
            served,
            sequence.sampling_logprobs.tolist(),
            sequence.loss_mask.tolist(),
            student_prefix=plan.trajectory.system_tokens,
            teacher_prefix=plan.scored.prefix_tokens,
            clip=None if kind == "sdpo_sequence" else 1.0,
            zero_nats=False,
        )
    )
    mask = sequence.loss_mask[1:]
    expected = {
        "sdpo_token": per_token,
        "sdpo_sequence": np.where(mask, np.clip(per_token[mask].mean(), -1.0, 1.0), 0.0),
        "sdpo_hybrid": np.where(mask, 0.75 * 0.25 + 0.25 * per_token, 0.0),
    }[kind]

    found = plan_advantages(settings, plan, aligned)

    np.testing.assert_allclose(found.advantages_T.numpy(), expected, rtol=0, atol=1e-12)
    assert found.missing_tokens == 0


def test_sampled_spans_are_the_turns() -> None:
    mask = [False, True, True, False, True, False, False, True]

    assert list(sampled_spans(mask)) == [(1, 3), (4, 5), (7, 8)]
    assert list(sampled_spans([False, False])) == []


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_advantages_that_are_trained_on_equal_the_golden_values(case: dict[str, Any]) -> None:
    """From the service's answer through the rows of the table to what the loss is given.

    A token that the service gives no value has no signal here, and counts as certain there.
    """
    given, expected = case["inputs"], case["outputs"]["float32"]
    missing = given["teacher_none_positions"]
    student, completion = given["student_prompt"], given["completion"]
    mask = [False] * len(student) + [True] * len(completion)
    for position in given["masked_completion_positions"]:
        mask[len(student) + position] = False
    sequence = TrainedSequence(
        group=0,
        sample=0,
        tokens=np.array([*student, *completion]),
        loss_mask=np.array(mask),
        sampling_logprobs=np.array([0.0] * len(student) + given["student_logprobs"]),
        advantages=np.zeros(len(mask)),
    )
    prefix = tuple(given["teacher_prompt"])
    room = case["params"]["max_context_length"]
    plan = TeacherPlan(
        Trajectory(sequence, 1.0, None, 0.0, len(student), "Words.", ()),
        None,
        "Words.",
        TeacherSequence((*prefix, *completion), 2, len(prefix), False, False, True),
    )

    class Service:
        async def compute_logprobs(self, tokens: Sequence[int]) -> list[float | None]:
            values: list[float | None] = [None] * len(prefix) + given["teacher_logprobs"]
            for position in missing:
                values[len(prefix) + position] = None
            return values[:room]

    served: Any = Service()
    aligned = asyncio.run(aligned_scores(plan, served))
    advantages = plan_advantages(SETTINGS | {"clip": case["params"]["clip"]}, plan, aligned)
    rows = token_rows(plan, aligned, advantages)
    table = pa.table(
        {
            "group": [0] * len(rows),
            "sample": [0] * len(rows),
            **{
                name: pa.array([row[name] for row in rows], type=kind)
                for name, kind in (
                    ("position", pa.int64()),
                    ("advantage", pa.float32()),
                    ("teacher_logprob", pa.float32()),
                )
            },
        }
    )
    (taught,) = with_teacher([sequence], table)
    golden = list(expected["aligned_advantages_clipped"])
    for position in missing:
        golden[len(student) - 1 + position] = 0.0

    np.testing.assert_allclose(
        loss_inputs_of(taught).advantages_T.numpy(), golden, rtol=1e-6, atol=1e-7
    )
    assert advantages.missing_tokens == len(missing) + max(0, len(prefix) + len(completion) - room)
