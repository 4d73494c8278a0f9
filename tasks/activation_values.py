"""What the pilot retained, and the gate's metrics computed from it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from evidence.episode_metrics import FAILED
from losses.gate_metrics import GateMetric, PilotEvidence, PilotUpdate, measure_all
from losses.token_arrays import TokenArrays
from tasks.context import PILOT, RunContext
from tasks.teacher_evidence import TeacherEvidence, judge_calls, teacher_evidence

PILOT_BEAT = "joint_step_running"
"""Event of the ledger: a pilot's first step goes on."""


def activation_metrics(ctx: RunContext, phase: str = PILOT) -> dict[str, GateMetric]:
    """Every metric that the spec's gate names, measured or with the reason why not."""
    gate = ctx.spec.activation_gate
    names = [] if gate is None else [check.metric for check in gate.checks]
    return measure_all(names, pilot_evidence(ctx, phase))


def pilot_evidence(ctx: RunContext, phase: str = PILOT) -> PilotEvidence:
    """What the tables of a pilot hold of the piloted arms.

    Updates are those of the main piloted arm. What is said of a teacher comes from the first
    piloted arm that has one, rewards from the first whose advantages are made of them, and the
    judge's calls from all of them.
    """
    piloted = [ctx.arm(name) for name in ctx.execution.pilot.arms]
    main = piloted[0].name
    distils = next((arm.name for arm in piloted if arm.distils), None)
    rewarded = next((arm.name for arm in piloted if not arm.distils), main)
    updates = [
        _update(ctx, (main, phase, int(key[2])))
        for key in ctx.run.keys("updates", prefix=(main, phase))
    ]
    teacher = teacher_evidence(ctx.run, distils, phase) if distils else TeacherEvidence()
    return PilotEvidence(
        updates=updates,
        baseline_clip=_baseline_clip(ctx),
        optimizer_steps=_optimizer_steps(ctx, main, phase),
        base_models=_base_models(ctx),
        teacher_logprobs=teacher.teacher_logprobs,
        student_logprobs=teacher.student_logprobs,
        judge_rationales=teacher.judge_rationales,
        group_rewards_PG=_rewards(ctx, rewarded, phase),
        judge_calls_parsed=[
            *judge_calls(ctx.run, [arm.name for arm in piloted], phase),
            *[False] * _failed_judge_calls(ctx, phase),
        ],
    )


def _failed_judge_calls(ctx: RunContext, phase: str) -> int:
    """Calls since the pilot began whose judge never gave a usable answer: no episode tells of them."""
    begun = [event["n"] for event in ctx.run.events(PILOT_BEAT) if event["phase"] == phase]
    return sum(
        int(event["attempts"])
        for event in ctx.run.events(FAILED)
        if begun and event["n"] > begun[0] and event["partner"] == "judge"
    )


def _update(ctx: RunContext, key: tuple[str, str, int]) -> PilotUpdate:
    update = key[2]
    table = ctx.run.read_arrow("update_tokens", key=key)

    def column(name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.asarray(table.column(name).to_numpy(), dtype=np.float64)

    step, position = divmod(update, ctx.execution.rollout.updates_per_step)
    return PilotUpdate(
        step=step,
        position=position,
        epoch=position // ctx.execution.rollout.minibatches,
        tokens=TokenArrays(
            target_logprobs_N=column("target_logprob"),
            sampling_logprobs_N=column("sampling_logprob"),
            advantages_N=column("advantage"),
            keep_N=column("keep").astype(bool),
        ),
    )


def _baseline_clip(ctx: RunContext) -> tuple[float, float] | None:
    """The ratio clip of the arm that has one, the baseline first."""
    for arm in sorted(ctx.arms, key=lambda arm: arm.role != "baseline"):
        if arm.loss is not None and arm.loss["kind"] == "grpo_clip":
            return float(arm.loss["clip_low_threshold"]), float(arm.loss["clip_high_threshold"])
    return None


def _optimizer_steps(ctx: RunContext, arm: str, phase: str) -> dict[int, int]:
    """Optimizer steps as logged, by rollout step; a step that was replayed counts once."""
    applied: dict[int, set[int]] = defaultdict(set)
    for event in ctx.run.events("step_outcome"):
        mine = (event["arm"], event["phase"]) == (arm, phase)
        if mine and event["outcome"].startswith("applied"):
            applied[event["update"] // ctx.execution.rollout.updates_per_step].add(event["update"])
    return {step: len(updates) for step, updates in applied.items()}


def _base_models(ctx: RunContext) -> list[str] | None:
    """The model name that every created client reported; None if one of them did not."""
    names = [event["info"]["base_model"] for event in ctx.run.events("client_opened")]
    return None if not names or None in names else names


def _rewards(ctx: RunContext, arm: str, phase: str) -> list[list[float]]:
    """Rewards by group, of every step that the pilot sampled."""
    found = []
    for key in ctx.run.keys("rollouts", prefix=(arm, phase)):
        table = ctx.run.read_arrow("rollouts", key=key)
        groups: dict[int, list[float]] = defaultdict(list)
        for group, reward in zip(
            table.column("group").to_pylist(), table.column("reward").to_pylist(), strict=True
        ):
            groups[group].append(reward)
        found += [groups[group] for group in sorted(groups)]
    return found
