"""The forced checks of a self-distilled arm, before any run: does its signal react, and where.

Three episodes of the first training task are played, and the best stands as the solution for the
other two. Each of those is scored under the teacher's frame with that solution and an empty
feedback block, under the same frame with the solution's words taken out, and under its own
unchanged prompt. The first must differ from the second by more than a repetition does; the third
must give the sampler's own scores; the gradient must lie on sampled tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from evidence.canonical import canonical_bytes, digest
from evidence.gate import CheckResult, GateResult, GateStatus, SourceRef
from losses.sdpo_advantage import AlignedTeacher
from tasks.arms import ArmPlan
from tasks.context import RunContext, require_graded, settle_all
from tasks.datums import TrainedSequence, datum_of, loss_inputs_of
from tasks.gate_answer import GateAnswer
from tasks.minibatch import loss_of
from tasks.parity_measurements import GradientProbe
from tasks.rescoring import aligned_scores, plan_advantages, teacher_source
from tasks.rescoring_check import alignment_error
from tasks.restoration import digest_of_file
from tasks.sampling import ServiceSampler
from tasks.sequences import sampled_sequence
from tasks.support_scores import scored_support
from tasks.trainer import Trainer
from tasks.trajectories import TeacherPlan, Trajectory, planned

GATE = "forced_checks"
EPISODES = 3
"""One to be shown, and two that are scored."""
EMPTY_FEEDBACK = " "
"""What stands in a feedback block that says nothing."""
MIN_CHANGE_NATS = 1e-3
"""Least mean change of the advantages when a solution's words are put into an empty frame."""
TIMES_REPEAT = 3.0
"""The change is also at least so many times what scoring the same prompt twice differs by."""
MAX_NOISE_NATS = 0.1
"""Largest mean difference between the sampler's scores and the teacher's of the same prompt."""
MAX_ALIGNMENT_NATS = 0.05
"""Largest mean difference between rescored and recomputed values of the same tokens."""


async def check_forced(ctx: RunContext, init_uri: str) -> GateAnswer:
    """Measure the forced checks of every arm with a teacher; no other arm has any.

    Writes: the measurements, as an evidence file. Calls the service with clients of its own, which
    are released; no optimizer step is taken. Safe to repeat.
    """
    arms = [arm for arm in ctx.trained_arms if arm.distils]
    if not arms:
        reason = "no arm is distilled from a teacher"
        return GateAnswer(GateResult(gate=GATE, status="not_applicable", reasons=(reason,)))
    measured = {}
    for arm in arms:
        ctx.tell(GATE, f"forced checks of {arm.name}", arm=arm.name)
        measured[arm.name] = await _measured(ctx, arm, init_uri)
    path = ctx.run.write_file(
        f"forced-checks-{digest(measured)[:12]}.json", canonical_bytes(measured) + b"\n"
    )
    checks = tuple(check for name, one in measured.items() for check in judged(name, one))
    failed = tuple(check.reason for check in checks if check.reason is not None)
    status: GateStatus = "failed" if failed else "passed"
    source = SourceRef(path, digest_of_file(ctx, path))
    return GateAnswer(GateResult(GATE, status, failed, checks, (source,)))


async def _measured(ctx: RunContext, arm: ArmPlan, init_uri: str) -> dict[str, Any]:
    async def once() -> dict[str, Any]:
        trainer = await ctx.service.load_trainer(init_uri, label=f"forced-{arm.name}")
        try:
            return await _measure(ctx, arm, trainer)
        finally:
            await trainer.close()

    return await ctx.service.retrying(f"forced checks of {arm.name}", once, from_scratch=True)


async def _measure(ctx: RunContext, arm: ArmPlan, trainer: Trainer) -> dict[str, Any]:
    scorer = await trainer.publish(f"forced-{arm.name}")
    trajectories = await _episodes(ctx, arm, scorer)
    frames = framed_plans(ctx, arm, trajectories)
    shown, shown_again, emptied, emptied_again, unchanged = [
        await _scored(arm, plans, scorer)
        for plans in (
            *[[one.shown for one in frames]] * 2,
            *[[one.emptied for one in frames]] * 2,
            [one.unchanged for one in frames],
        )
    ]
    error = await alignment_error(
        [one.plan for one in shown], [one.aligned for one in shown], scorer
    )
    return {
        "episodes": [_described(arm, one) for one in shown],
        "mean_abs_change": _difference(shown, emptied),
        "mean_abs_repeat": [
            _difference(shown, shown_again),
            _difference(emptied, emptied_again),
        ],
        "mean_abs_without_context": _mean_abs([one.advantages for one in unchanged]),
        "mean_abs_with_solution": _mean_abs([one.advantages for one in shown]),
        "alignment": error.to_record(),
        "gradient": await _gradient(arm, trainer, await _trained(arm, shown, scorer)),
    }


async def _episodes(ctx: RunContext, arm: ArmPlan, scorer: ServiceSampler) -> list[Trajectory]:
    """Episodes of the first training task, as the initial policy plays it."""
    item_id = ctx.environment.train_batch(0, ctx.execution.rollout.groups)[0]
    episodes = await settle_all(
        [
            ctx.environment.run_episode(
                item_id,
                scorer,
                settings=ctx.rollout_settings,
                seed=arm.sampling_seed(ctx.run.spec_sha256, "preflight", 0, 0, sample),
            )
            for sample in range(EPISODES)
        ]
    )
    require_graded(episodes)
    return [
        Trajectory(
            sequence=sampled_sequence(episode, group=0, sample=sample, advantage=0.0),
            reward=episode.reward,
            native_reward=episode.native_reward,
            group_advantage=0.0,
            system_tokens=episode.info["system_tokens"],
            feedback=episode.info["rationale"],
            turns=episode.turns,
        )
        for sample, episode in enumerate(episodes)
    ]


@dataclass(frozen=True, slots=True)
class Framed:
    """What one attempt is scored under.

    Attributes:
        shown: the teacher's frame with a sibling as the solution, and an empty feedback block.
        emptied: the same frame: headings, the sibling's roles and the closing line, no words.
        unchanged: the attempt's own prompt.
    """

    shown: TeacherPlan
    emptied: TeacherPlan
    unchanged: TeacherPlan


def framed_plans(ctx: RunContext, arm: ArmPlan, trajectories: Sequence[Trajectory]) -> list[Framed]:
    """The best trajectory as the solution of every other one, whatever its reward was.

    Where any of them reaches the bar for solutions, the best does. Ties go to the first.
    """
    source, settings = teacher_source(ctx), arm.advantage
    best = max(trajectories, key=lambda one: one.reward)
    wordless = replace(best, turns=tuple(replace(turn, content="") for turn in best.turns))
    frames = []
    for trajectory in (one for one in trajectories if one is not best):
        shown, emptied = (
            planned(trajectory, solution, EMPTY_FEEDBACK, settings=settings, source=source)
            for solution in (best, wordless)
        )
        unchanged = source.teacher_sequence(
            trajectory.sequence.tokens.tolist(),
            system_tokens=trajectory.system_tokens,
            solution=None,
            feedback=None,
            max_tokens=settings["max_teacher_tokens"],
            over_length=settings["over_length"],
        )
        frames.append(Framed(shown, emptied, TeacherPlan(trajectory, None, None, unchanged)))
    return frames


@dataclass(frozen=True, slots=True)
class Scored:
    """One plan with the teacher's scores and the advantages that follow, on trained tokens."""

    plan: TeacherPlan
    aligned: AlignedTeacher
    advantages_T: torch.Tensor

    @property
    def advantages(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Advantages of the trained tokens, nats."""
        mask = self.plan.trajectory.sequence.loss_mask[1:]
        return np.asarray(self.advantages_T.numpy()[mask], dtype=np.float64)


async def _scored(
    arm: ArmPlan, plans: Sequence[TeacherPlan], scorer: ServiceSampler
) -> list[Scored]:
    aligned = await settle_all([aligned_scores(plan, scorer) for plan in plans])
    return [
        Scored(plan, values, plan_advantages(arm.advantage, plan, values).advantages_T)
        for plan, values in zip(plans, aligned, strict=True)
    ]


async def _gradient(
    arm: ArmPlan, trainer: Trainer, sequences: Sequence[TrainedSequence]
) -> dict[str, int]:
    """Where the gradient that the service is sent is not 0; nothing is applied."""
    inputs = [loss_inputs_of(one, reads_teacher=arm.reads_teacher) for one in sequences]
    probe = GradientProbe(loss_of(arm), inputs)
    await trainer.forward_backward_custom([datum_of(one) for one in sequences], probe)
    counts = {"on_mask": 0, "off_mask": 0, "trained_tokens": 0, "nonzero_advantages": 0}
    for sequence, gradient in zip(sequences, probe.gradients_D, strict=True):
        mask = sequence.loss_mask[1:]
        moved = (gradient.reshape(len(mask), -1) != 0.0).any(axis=1)
        counts["on_mask"] += int((moved & mask).sum())
        counts["off_mask"] += int((moved & ~mask).sum())
        counts["trained_tokens"] += int(mask.sum())
        counts["nonzero_advantages"] += int((sequence.advantages != 0.0).sum())
    return counts


async def _trained(
    arm: ArmPlan, scored: Sequence[Scored], student: ServiceSampler
) -> list[TrainedSequence]:
    """The sequences with what their teacher gave, as an update would use them."""
    found = []
    for one in scored:
        sequence = one.plan.trajectory.sequence
        advantages = np.zeros(len(sequence.tokens))
        advantages[1:] = one.advantages_T.numpy()
        teacher = np.full(len(sequence.tokens), np.nan)
        teacher[1:] = one.aligned.teacher_logprobs_T.numpy()
        taught = replace(sequence, advantages=advantages, teacher_logprobs=teacher)
        if arm.top_k is not None:
            support = await scored_support(one.plan, student, student, top_k=arm.top_k)
            taught = replace(taught, support=support.of(sequence))
        found.append(taught)
    return found


def _described(arm: ArmPlan, one: Scored) -> dict[str, Any]:
    plan, threshold = one.plan, arm.advantage["solution_threshold"]
    solution = plan.solution
    return {
        "tokens": len(plan.trajectory.sequence.tokens),
        "trained_tokens": plan.trajectory.sequence.loss_tokens,
        "reward": plan.trajectory.reward,
        "teacher_tokens": None if plan.scored is None else len(plan.scored.tokens),
        "solution_shown": plan.scored is not None and plan.scored.solution_shown,
        "solution_sample": None if solution is None else solution.sequence.sample,
        "solution_reward": None if solution is None else solution.reward,
        "solution_threshold": threshold,
        "solution_reaches_threshold": solution is not None and solution.reward >= threshold,
    }


def _difference(ones: Sequence[Scored], others: Sequence[Scored]) -> float | None:
    return _mean_abs([a.advantages - b.advantages for a, b in zip(ones, others, strict=True)])


def _mean_abs(parts: Sequence[np.ndarray[Any, np.dtype[np.float64]]]) -> float | None:
    """Mean size in nats; None where there is no token, or one whose value is not finite."""
    values = np.abs(np.concatenate(list(parts)))
    return float(values.mean()) if values.size and np.isfinite(values).all() else None


def judged(arm: str, measured: dict[str, Any]) -> list[CheckResult]:
    """The checks of one arm, each measurement against its bound."""
    noise, gradient = measured["mean_abs_without_context"], measured["gradient"]
    return [
        _solution_shown(arm, measured["episodes"]),
        _change(arm, measured),
        _check(
            arm,
            "unchanged_prompt_scores_as_sampled",
            ok=noise is not None and noise <= MAX_NOISE_NATS,
            bound={"max_mean_abs_nats": MAX_NOISE_NATS},
            measured=noise,
        ),
        _alignment(arm, measured["alignment"]),
        _check(
            arm,
            "gradient_on_sampled_tokens_alone",
            ok=gradient["off_mask"] == 0 < gradient["on_mask"],
            bound="nonzero on trained tokens, exactly 0 elsewhere",
            measured=gradient,
        ),
    ]


def _solution_shown(arm: str, episodes: Sequence[dict[str, Any]]) -> CheckResult:
    """Whether the sibling was good enough for training is recorded, and is no condition."""
    told = ("solution_shown", "solution_reward", "solution_reaches_threshold")
    return _check(
        arm,
        "solution_shown",
        ok=bool(episodes) and all(one["solution_shown"] for one in episodes),
        bound="in every episode",
        measured=[{name: one[name] for name in told} for one in episodes],
    )


def _change(arm: str, measured: dict[str, Any]) -> CheckResult:
    """A change that repeating the same request would also show is none."""
    change, repeats = measured["mean_abs_change"], measured["mean_abs_repeat"]
    known = [repeat for repeat in repeats if repeat is not None]
    least = max([MIN_CHANGE_NATS, *[TIMES_REPEAT * repeat for repeat in known]])
    return _check(
        arm,
        "advantages_change_with_solution",
        ok=change is not None and len(known) == len(repeats) and change >= least,
        bound={"min_mean_abs_nats": least, "repeats_differ_by_nats": repeats},
        measured=change,
    )


def _alignment(arm: str, alignment: dict[str, Any]) -> CheckResult:
    unanswered, tokens = alignment["unanswered"], alignment["tokens"]
    missing = f"{unanswered} of {unanswered + tokens} trained tokens have no log-probability"
    return _check(
        arm,
        "rescored_tokens_aligned",
        ok=unanswered == 0 < tokens and alignment["mean_abs"] <= MAX_ALIGNMENT_NATS,
        bound={"max_mean_abs_nats": MAX_ALIGNMENT_NATS, "max_unanswered": 0},
        measured=alignment,
        words=missing if unanswered else None,
    )


def _check(
    arm: str, name: str, *, ok: bool, bound: Any, measured: Any, words: str | None = None
) -> CheckResult:
    """One check; ``words`` say what is wrong where the numbers alone do not."""
    problem = words or f"measured {measured}, expected {bound}"
    return CheckResult(
        check=name,
        status="passed" if ok else "failed",
        path=arm,
        reason=None if ok else f"{arm}: {name}: {problem}",
        tolerance=bound,
        measured=measured,
    )
