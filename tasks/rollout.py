"""Sample one rollout step: every group is kept as soon as it is finished, and never again asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from envs.protocols import Episode, Sampler
from evidence.canonical import canonical_bytes, digest
from evidence.run import EPISODES, TableRef
from losses.advantages import group_advantages as registered_advantages
from losses.advantages import group_mean_advantages
from tasks.arms import ArmPlan
from tasks.context import RunContext, require_graded, settle_all
from tasks.failures import ModelLost
from tasks.learner import Learner
from tasks.token_texts import write_token_texts


async def sample_rollout(ctx: RunContext, learner: Learner, step: int) -> TableRef:
    """Sample, grade and keep one rollout step of an arm.

    Reads: parts of finished groups. Writes: one part a group, then `rollouts`, `tokens`, `turns` and
    `token_texts`. Calls the service. Safe to repeat: finished groups are not
    sampled again, what is missing of the tables is written, and a finished step is only looked up.

    Returns:
        The `tokens` table of the step.
    """
    arm, phase = learner.arm, learner.phase
    key = (arm.name, phase, step)
    if _is_assembled(ctx, key):
        write_token_texts(ctx, key)
        return ctx.run.table_ref("tokens", key=key)
    groups = range(ctx.execution.rollout.groups)
    items = ctx.environment.train_batch(step, len(groups))
    missing = _missing(ctx, learner, step)
    with ctx.timed(
        arm.name,
        phase,
        step,
        "sampling",
        units=len(missing),
        samples=len(missing) * ctx.execution.rollout.group_size,
    ):
        while missing:
            await _sample_missing(ctx, learner, step, [(group, items[group]) for group in missing])
            missing = _missing(ctx, learner, step)
    refs = ctx.run.assemble_parts(arm.name, phase, step, list(groups))
    write_token_texts(ctx, key)
    return refs["tokens"]


def _is_assembled(ctx: RunContext, key: tuple[str, str, int]) -> bool:
    """Whether all tables of a step are written; not every environment has `turns`."""
    if not all(ctx.run.has_table(name, key=key) for name in ("tokens", "rollouts")):
        return False
    return ctx.run.has_table("turns", key=key) or not ctx.run.unassembled(*key)


def _missing(ctx: RunContext, learner: Learner, step: int) -> list[int]:
    finished = set(ctx.run.parts(learner.arm.name, learner.phase, step))
    return [group for group in range(ctx.execution.rollout.groups) if group not in finished]


async def _sample_missing(
    ctx: RunContext, learner: Learner, step: int, wanted: Sequence[tuple[int, str]]
) -> None:
    """Sample groups side by side; a lost policy is published again by the next round."""
    version = learner.version_of_step(step)
    sampler = await learner.sampler(version)
    groups = GroupSampling(ctx, learner.arm, learner.phase, step, version)
    try:
        await settle_all([groups.sample(group, item_id, sampler) for group, item_id in wanted])
    except ModelLost as error:
        if len(_missing(ctx, learner, step)) < len(wanted):
            learner.progressed()
        await learner.lost(error)
    else:
        learner.progressed()


class GroupSampling:
    """The groups of one rollout step."""

    def __init__(
        self, ctx: RunContext, arm: ArmPlan, phase: str, step: int, policy_version: int
    ) -> None:
        self._ctx, self._arm, self._phase, self._step = ctx, arm, phase, step
        self._version = policy_version

    async def sample(self, group: int, item_id: str, sampler: Sampler) -> None:
        """Sample and grade one group and keep it.

        Episodes of several turns are kept one by one as they end, so that a slow one, or a kill,
        costs no finished one.

        Raises:
            ServiceOutage: if the simulator or the judge failed; that episode is not kept.
        """
        ctx = self._ctx
        episodes = await settle_all(
            [
                self._episode(group, sample, item_id, sampler)
                for sample in range(ctx.execution.rollout.group_size)
            ]
        )
        rewards = [tables["rollouts"][0]["reward"] for tables in episodes]
        merged: dict[str, list[dict[str, Any]]] = {}
        for tables, advantage in zip(episodes, group_advantages(self._arm, rewards), strict=True):
            self._give(tables, advantage)
            for name, rows in tables.items():
                merged.setdefault(name, []).extend(rows)
        ctx.run.write_part(self._arm.name, self._phase, self._step, group, merged)
        ctx.tell(
            "sampling",
            arm=self._arm.name,
            done=len(ctx.run.parts(self._arm.name, self._phase, self._step)),
            total=ctx.execution.rollout.groups,
            message=f"{self._phase} step {self._step}",
        )

    async def _episode(
        self, group: int, sample: int, item_id: str, sampler: Sampler
    ) -> dict[str, list[dict[str, Any]]]:
        """Rows of one episode by table, without its advantage; a kept one is not played again."""
        ctx = self._ctx
        where = (self._arm.name, self._phase, self._step)
        number = group * ctx.execution.rollout.group_size + sample
        keeps = ctx.execution.rollout.max_turns > 1
        if keeps and number in ctx.run.parts(*where, folder=EPISODES):
            return ctx.run.read_part_rows(*where, number, folder=EPISODES)
        seed = self._seed(group, sample)
        episode = await ctx.environment.run_episode(
            item_id, sampler, settings=ctx.rollout_settings, seed=seed
        )
        require_graded([episode])
        place = self._place(group, sample)
        row = rollout_row(episode, seed, 0.0, policy_version=self._version)
        tables = {
            "rollouts": [place | row],
            "tokens": [place | row for row in token_rows(episode)],
            "turns": [place | row for row in turn_rows(episode)],
        }
        found = {name: rows for name, rows in tables.items() if rows}
        if keeps:
            ctx.run.write_part(*where, number, found, folder=EPISODES)
        return found

    def _give(self, tables: dict[str, list[dict[str, Any]]], advantage: float) -> None:
        """Write an episode's advantage into its rows; a teacher gives the tokens theirs later."""
        tables["rollouts"][0]["advantage"] = advantage
        if not self._arm.distils:
            for row in tables["tokens"]:
                row["advantage"] = advantage if row["loss_mask"] else None

    def _seed(self, group: int, sample: int) -> int:
        return self._arm.sampling_seed(
            self._ctx.run.spec_sha256, self._phase, self._step, group, sample
        )

    def _place(self, group: int, sample: int) -> dict[str, Any]:
        return {
            "arm": self._arm.name,
            "phase": self._phase,
            "step": self._step,
            "group": group,
            "sample": sample,
        }


def group_advantages(arm: ArmPlan, rewards: Sequence[float]) -> list[float]:
    """Advantage of each completion of one group, from the arm's settings.

    For an arm with a teacher: the reward minus the group's mean, which a hybrid mixes in.
    """
    rewards_G = torch.tensor(list(rewards), dtype=torch.float64)
    if arm.distils:
        return [float(value) for value in group_mean_advantages(rewards_G)]
    return [float(value) for value in registered_advantages(arm.advantage, rewards_G)]


def rollout_row(
    episode: Episode, seed: int, advantage: float, *, policy_version: int
) -> dict[str, Any]:
    """One row of `rollouts` without its key."""
    prompt = list(episode.tokens[: episode.prompt_tokens])
    return {
        "item_id": episode.item_id,
        "policy_version": policy_version,
        "seed": seed,
        "prompt_tokens": episode.prompt_tokens,
        "completion_tokens": episode.completion_tokens,
        "turns": episode.agent_turns,
        "stop_reason": episode.stop_reason,
        "truncated": episode.truncated,
        "reward": float(episode.reward),
        "native_reward": None if episode.native_reward is None else float(episode.native_reward),
        "correct": episode.correct,
        "format_ok": episode.format_ok,
        "parse_failures": episode.parse_failures,
        "tool_calls": episode.tool_calls,
        "tool_errors": episode.tool_errors,
        "advantage": advantage,
        "completion_text": episode.text,
        "prompt_sha256": digest(prompt),
        "info_json": _info(episode),
    }


def _info(episode: Episode) -> str:
    facts = {
        "extracted": episode.extracted,
        "metrics": dict(episode.metrics),
        "info": dict(episode.info),
    }
    return canonical_bytes(facts).decode("ascii")


def token_rows(episode: Episode) -> list[dict[str, Any]]:
    """Rows of `tokens` without their key and advantages: the whole sequence, prompt included."""
    return [
        {
            "position": position,
            "turn": turn,
            "token_id": token,
            "loss_mask": trained,
            "sampling_logprob": logprob,
            "advantage": None,
            "teacher_logprob": None,
        }
        for position, (turn, token, trained, logprob) in enumerate(
            zip(
                episode.turn_of_token,
                episode.tokens,
                episode.loss_mask,
                episode.sampling_logprobs,
                strict=True,
            )
        )
    ]


def turn_rows(episode: Episode) -> list[dict[str, Any]]:
    """Rows of `turns` without their key; none for an episode without messages."""
    return [
        {
            "message": index,
            "turn": turn.turn,
            "role": turn.role,
            "content": turn.content,
            "tool_name": turn.tool_name,
            "tool_args": turn.tool_args,
            "tool_error": turn.tool_error,
            "stop_reason": turn.stop_reason,
            "token_start": turn.token_start,
            "token_end": turn.token_end,
        }
        for index, turn in enumerate(episode.turns)
    ]
