"""Teacher rescoring: the tokens of a rollout step scored again under a prompt with hindsight.

The teacher reads a system message of its own and then the very tokens of the trajectory, tool
results included, so that every score belongs to one token of it. It never reads the attempt twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from envs.teacher import TeacherSource
from evidence.canonical import digest
from evidence.errors import InputError
from evidence.run import RESCORED, TableRef
from losses.sdpo_advantage import (
    AlignedTeacher,
    TokenAdvantages,
    align_teacher_logprobs,
    registered_sdpo_advantages,
)
from tasks.context import RunContext, settle_all
from tasks.failures import ModelLost
from tasks.learner import Learner
from tasks.sampling import ServiceSampler
from tasks.support_scores import scored_support
from tasks.teacher_models import TeacherModel
from tasks.trajectories import TeacherPlan, stored_trajectories, teacher_plans


async def rescore_rollout(ctx: RunContext, learner: Learner, step: int) -> TableRef | None:
    """Score a sampled rollout step with the arm's teacher, where the arm has one.

    Reads: `rollouts`, `tokens`, `turns` of the step. Writes: one part a group, then `rescoring` and
    `teachers`. Calls the service. Safe to repeat: scored groups are not asked again, and a finished
    step is only looked up.

    Returns:
        The `rescoring` table of the step; None for an arm without a teacher.
    """
    arm, phase = learner.arm, learner.phase
    if not arm.distils:
        return None
    key = (arm.name, phase, step)
    if ctx.run.has_table("rescoring", key=key) and ctx.run.has_table("teachers", key=key):
        return ctx.run.table_ref("rescoring", key=key)
    plans = _plans_by_group(ctx, learner, step)
    missing = _missing(ctx, learner, step)
    count = len(missing) * ctx.execution.rollout.group_size
    with ctx.timed(arm.name, phase, step, "rescoring", units=len(missing), samples=count):
        teacher = TeacherModel(ctx, learner, step)
        try:
            while missing:
                await _rescore_missing(ctx, learner, step, teacher, [plans[g] for g in missing])
                missing = _missing(ctx, learner, step)
        finally:
            await teacher.close()
    groups = list(range(ctx.execution.rollout.groups))
    refs = ctx.run.assemble_parts(arm.name, phase, step, groups, folder=RESCORED)
    return refs["rescoring"]


def teacher_source(ctx: RunContext) -> TeacherSource:
    """The run's environment, which must be able to write a teacher's sequence.

    Raises:
        InputError: if it is not.
    """
    environment = ctx.environment
    if not isinstance(environment, TeacherSource):
        expected = "an environment with a teacher's prompt, for an SDPO advantage"
        raise InputError("environment.name", environment.name, expected)
    return environment


def _plans_by_group(ctx: RunContext, learner: Learner, step: int) -> dict[int, list[TeacherPlan]]:
    trajectories = stored_trajectories(ctx, (learner.arm.name, learner.phase, step))
    plans = teacher_plans(trajectories, learner.arm.advantage, teacher_source(ctx))
    by_group: dict[int, list[TeacherPlan]] = {}
    for plan in plans:
        by_group.setdefault(plan.trajectory.sequence.group, []).append(plan)
    return by_group


def _missing(ctx: RunContext, learner: Learner, step: int) -> list[int]:
    finished = set(ctx.run.parts(learner.arm.name, learner.phase, step, folder=RESCORED))
    return [group for group in range(ctx.execution.rollout.groups) if group not in finished]


async def _rescore_missing(
    ctx: RunContext,
    learner: Learner,
    step: int,
    teacher: TeacherModel,
    wanted: Sequence[Sequence[TeacherPlan]],
) -> None:
    """Score groups side by side; lost weights are brought back by the next round."""
    groups = GroupRescoring(ctx, learner, step, version=teacher.version)
    try:
        scorer = await teacher.open()
        wants_student = learner.arm.top_k is not None
        student = await learner.sampler(learner.version_of_step(step)) if wants_student else None
        await settle_all([groups.rescore(plans, scorer, student) for plans in wanted])
    except ModelLost as error:
        if len(_missing(ctx, learner, step)) < len(wanted):
            learner.progressed()
        await teacher.lost(error)
    else:
        learner.progressed()


class GroupRescoring:
    """The groups of one rollout step."""

    def __init__(self, ctx: RunContext, learner: Learner, step: int, *, version: int) -> None:
        self._ctx, self._arm, self._phase, self._step = ctx, learner.arm, learner.phase, step
        self._version = version

    async def rescore(
        self,
        plans: Sequence[TeacherPlan],
        scorer: ServiceSampler,
        student: ServiceSampler | None = None,
    ) -> None:
        """Score one group's trajectories side by side and keep them.

        Args:
            plans: of the group.
            scorer: the teacher.
            student: the policy that sampled, where the arm's loss compares its likeliest tokens.
        """
        ctx, arm = self._ctx, self._arm
        aligned = await settle_all([aligned_scores(plan, scorer) for plan in plans])
        tables: dict[str, list[dict[str, Any]]] = {"rescoring": [], "teachers": []}
        if student is not None and arm.top_k is not None:
            tables["supports"] = await self._supports(plans, student, scorer, top_k=arm.top_k)
        for plan, values in zip(plans, aligned, strict=True):
            advantages = plan_advantages(arm.advantage, plan, values)
            sequence = plan.trajectory.sequence
            place = {"group": sequence.group, "sample": sequence.sample}
            tables["rescoring"] += [place | row for row in token_rows(plan, values, advantages)]
            tables["teachers"].append(place | teacher_row(plan, advantages, version=self._version))
        for rows in tables.values():
            for row in rows:
                row |= {"arm": arm.name, "phase": self._phase, "step": self._step}
        group = plans[0].trajectory.sequence.group
        ctx.run.write_part(arm.name, self._phase, self._step, group, tables, folder=RESCORED)
        ctx.tell(
            "rescoring",
            arm=arm.name,
            done=len(ctx.run.parts(arm.name, self._phase, self._step, folder=RESCORED)),
            total=ctx.execution.rollout.groups,
            message=f"{self._phase} step {self._step}",
        )

    async def _supports(
        self,
        plans: Sequence[TeacherPlan],
        student: ServiceSampler,
        scorer: ServiceSampler,
        *,
        top_k: int,
    ) -> list[dict[str, Any]]:
        """Rows of `supports` without arm, phase and step."""
        scored = await settle_all(
            [scored_support(plan, student, scorer, top_k=top_k) for plan in plans]
        )
        return [
            {"group": plan.trajectory.sequence.group, "sample": plan.trajectory.sequence.sample}
            | row
            for plan, support in zip(plans, scored, strict=True)
            for row in support.rows(plan)
        ]


async def aligned_scores(plan: TeacherPlan, scorer: ServiceSampler) -> AlignedTeacher:
    """Ask the teacher for its sequence, and bring every score to the token it belongs to.

    A trajectory without a teacher's sequence has no value anywhere, and nothing is asked.
    """
    tokens = len(plan.trajectory.sequence.tokens)
    if plan.scored is None:
        nothing = torch.full((tokens - 1,), float("nan"), dtype=torch.float64)
        return AlignedTeacher(nothing, scored=0, unanswered=0, beyond_context=tokens - 1)
    return align_teacher_logprobs(
        await scorer.compute_logprobs(plan.scored.tokens),
        sequence_tokens=tokens,
        student_prefix_tokens=plan.trajectory.system_tokens,
        teacher_prefix_tokens=plan.scored.prefix_tokens,
    )


def plan_advantages(
    settings: Mapping[str, Any], plan: TeacherPlan, aligned: AlignedTeacher
) -> TokenAdvantages:
    """The advantages of one trajectory as the arm registers them, for its targets."""
    trajectory = plan.trajectory
    return registered_sdpo_advantages(
        settings,
        aligned,
        torch.from_numpy(trajectory.sequence.sampling_logprobs[1:].copy()),
        torch.from_numpy(trajectory.sequence.loss_mask[1:].copy()),
        group_advantage=trajectory.group_advantage,
    )


def token_rows(
    plan: TeacherPlan, aligned: AlignedTeacher, advantages: TokenAdvantages
) -> list[dict[str, Any]]:
    """Rows of `rescoring` without their key: every trained token of one trajectory."""
    sequence = plan.trajectory.sequence
    prefix = 0 if plan.scored is None else plan.scored.prefix_tokens
    teacher_T, advantages_T = aligned.teacher_logprobs_T.tolist(), advantages.advantages_T.tolist()
    return [
        {
            "position": position,
            "teacher_logprob": teacher_T[position - 1],
            "sampling_logprob": float(sequence.sampling_logprobs[position]),
            "advantage": advantages_T[position - 1],
            "teacher_prefix_tokens": prefix,
        }
        for position in np.flatnonzero(sequence.loss_mask).tolist()
    ]


def teacher_row(plan: TeacherPlan, advantages: TokenAdvantages, *, version: int) -> dict[str, Any]:
    """One row of `teachers` without its key."""
    solution, scored = plan.solution, plan.scored
    return {
        "policy_version": version,
        "solution_sample": None if solution is None else solution.sequence.sample,
        "solution_reward": None if solution is None else solution.reward,
        "solution_native_reward": None if solution is None else solution.native_reward,
        "solution_shown": scored is not None and scored.solution_shown,
        "solution_dropped": plan.solution_dropped,
        "feedback_shown": scored is not None and scored.feedback_shown,
        "over_length": plan.over_length,
        "student_prefix_tokens": plan.trajectory.system_tokens,
        "teacher_prefix_tokens": 0 if scored is None else scored.prefix_tokens,
        "teacher_tokens": 0 if scored is None else len(scored.tokens),
        "trained_tokens": plan.trajectory.sequence.loss_tokens,
        "missing_tokens": advantages.missing_tokens,
        "clipped_tokens": advantages.clipped_tokens,
        "prefix_sha256": (
            None if scored is None else digest(list(scored.tokens[: scored.prefix_tokens]))
        ),
    }
