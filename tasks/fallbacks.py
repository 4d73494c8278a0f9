"""The registered fallbacks of a failed activation gate: what each changes, and how it is tried.

Every pilot draws its episodes anew. A fallback that cannot act on a metric would only give that
metric another chance at the same bound, so it is tried only where it can act on all that failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from evidence.execution import ExecutionFile
from evidence.gate import GateResult
from evidence.run_settings import Fallback
from tasks.context import RunContext
from tasks.gate_answer import GateAnswer
from tasks.pilot import check_activation, pilot_steps
from tasks.wall_cap import CapReached, WallCap

FROZEN_TEACHER = "frozen_initial_teacher"

_OF_TEACHER = frozenset({"sdpo_frac_tokens_abs_adv_gt_0.1", "sdpo_mean_abs_token_adv"})
"""Metrics of what a teacher says of each token."""
_OF_UPDATES = frozenset(
    {
        "dppo_masked_token_fraction",
        "policy_drift_abs_p_q90",
        "grpo_clip_fraction",
        "epoch2_dppo_masked_token_fraction",
        "epoch2_ppo_counterfactual_clip_fraction",
        "epoch2_policy_drift_abs_p_q90",
    }
)
"""Metrics of the main piloted arm's updates, which follow from its advantages."""
_OF_EPISODES = frozenset({"grpo_frac_groups_nonzero_adv", "sdpo_frac_trajectories_with_feedback"})
"""Metrics of how episodes end, what they earn, and whether a teacher's sequence has room."""


def calibration_phase(number: int) -> str:
    """Phase of the pilot with the fallback of that number, from 1."""
    return f"calibration-{number}"


@dataclass(frozen=True, slots=True)
class Change:
    """What one fallback makes of the plan.

    Attributes:
        execution: the execution file with the one change.
        deviation: the change in the contract's form, without its reason.
        tested_instead: the claim that is tested then; None where the hypothesis stays.
    """

    execution: ExecutionFile
    deviation: Mapping[str, str]
    tested_instead: str | None


def changed(execution: ExecutionFile, fallback: Fallback) -> Change:
    """Apply one fallback to the planned settings, alone: fallbacks are alternatives in an order."""
    raw = execution.raw
    if fallback.kind == FROZEN_TEACHER:
        blocks = [raw.get("advantage"), *(arm.get("advantage") for arm in raw["arms"].values())]
        for block in blocks:
            if isinstance(block, dict) and "teacher" in block:
                block["teacher"] = "initial"
        return Change(
            ExecutionFile.parse(raw),
            {
                "field": "objective",
                "original": "the teacher is the policy that sampled",
                "effective": "the teacher is the frozen initial policy",
            },
            "The hypothesis with the frozen initial policy as the teacher.",
        )
    planned = execution.rollout.max_turns
    raw["rollout"]["max_turns"] = fallback.value
    return Change(
        ExecutionFile.parse(raw),
        {
            "field": "dataset",
            "original": f"training episodes of at most {planned} agent turns",
            "effective": f"of at most {fallback.value}; held-out items keep {planned}",
        },
        None,
    )


def acts_on(ctx: RunContext, fallback: Fallback) -> frozenset[str]:
    """The gate's metrics that a fallback can change by what it changes, not by new episodes.

    Neither acts on whether a judge can be read, on the model, or on the number of updates. In a
    pilot of one step the frozen initial teacher is the very policy that sampled.
    """
    if fallback.kind != FROZEN_TEACHER:
        return _OF_EPISODES | _OF_TEACHER | _OF_UPDATES
    if pilot_steps(ctx) < 2:
        return frozenset()
    main = ctx.arm(ctx.execution.pilot.arms[0])
    return _OF_TEACHER | _OF_UPDATES if main.distils else _OF_TEACHER


def unsuited(ctx: RunContext, number: int, failed: GateResult) -> str | None:
    """Why the fallback of that number, from 1, is not to be tried; None if it may be.

    Fallbacks are alternatives, so what failed is always what failed as planned. A failure that is
    of no metric, such as a loss that cannot be computed, is left to every fallback.
    """
    fallback = ctx.execution.fallbacks[number - 1]
    missed = {check.check for check in failed.checks if check.status == "failed"}
    beyond = sorted(missed - acts_on(ctx, fallback))
    if not beyond:
        return None
    return f"fallback {number} ({fallback.kind}) cannot act on {', '.join(beyond)}: not tried"


def left_out(ctx: RunContext, number: int, failed: GateResult) -> GateAnswer:
    """The gate's answer in the place of a fallback that is not tried: that of the plan stands.

    Args:
        ctx: the run as planned.
        number: of the fallback, from 1.
        failed: the answer of the plan.
    """
    why = [unsuited(ctx, one, failed) for one in range(1, number + 1)]
    reasons = (*failed.reasons, *[reason for reason in why if reason is not None])
    return GateAnswer(replace(failed, reasons=reasons))


def suited(ctx: RunContext, failed: GateResult) -> list[int]:
    """Numbers of the fallbacks that can act on all that failed, in their order."""
    numbers = range(1, len(ctx.execution.fallbacks) + 1)
    return [number for number in numbers if unsuited(ctx, number, failed) is None]


def calibration_refusal(ctx: RunContext, number: int, failed: GateResult) -> str | None:
    """Why no further fallback may be tried; None if one may.

    Args:
        ctx: the run.
        number: of the fallback that would be next, from 1.
        failed: the answer of the plan.
    """
    limits = ctx.execution.calibration
    if limits is None:
        return "no calibration is registered"
    steps, tried = pilot_steps(ctx), sum(one < number for one in suited(ctx, failed))
    if (tried + 1) * steps > limits.max_steps:
        return (
            f"{tried * steps} of {limits.max_steps} calibration steps are used, one takes {steps}"
        )
    left = _cap(ctx).left
    return None if left > 0 else f"{limits.max_wall_minutes:g} minutes of calibration are used"


def _cap(ctx: RunContext) -> WallCap:
    limits = ctx.execution.calibration
    minutes = 0.0 if limits is None else limits.max_wall_minutes
    return WallCap(60.0 * minutes, lambda: _calibration_seconds(ctx))


def _calibration_seconds(ctx: RunContext) -> float:
    """Wall seconds since the first fallback was begun, whether or not a process ran."""
    begun = ctx.run.events("calibration_started")
    if not begun:
        return 0.0
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(begun[0]["at"])).total_seconds())


async def try_fallback(ctx: RunContext, init_uri: str, number: int) -> GateAnswer:
    """Pilot the plan with one fallback, on train tasks, within what is left of the calibration.

    Reads and writes: tables of the phase ``calibration-N``, and the event `calibration_started`.
    Calls the service. Safe to repeat.

    Args:
        ctx: the run as planned.
        init_uri: the initialization checkpoint.
        number: of the fallback, from 1.
    """
    fallback = ctx.execution.fallbacks[number - 1]
    if number not in {event["number"] for event in ctx.run.events("calibration_started")}:
        ctx.run.append("calibration_started", number=number, kind=fallback.kind)
    variant = ctx.variant(changed(ctx.execution, fallback).execution)
    try:
        async with _cap(ctx).holding(f"calibration {number}"):
            return await check_activation(variant, init_uri, calibration_phase(number))
    except CapReached as stop:
        reason = f"fallback {number} ({fallback.kind}): {stop}"
        return GateAnswer(GateResult(gate="activation", status="failed", reasons=(reason,)))


def adoption(ctx: RunContext, number: int, failed: GateResult) -> dict[str, Any]:
    """The deviation that going on with a fallback is, in the contract's form.

    Its reason says which attempt at the gate passed, and how many there could have been.

    Args:
        ctx: the run as planned.
        number: of the fallback that passed, from 1.
        failed: the answer of the plan.
    """
    fallback = ctx.execution.fallbacks[number - 1]
    change = changed(ctx.execution, fallback)
    possible = suited(ctx, failed)
    attempt = 2 + sum(one < number for one in possible)
    omitted = [unsuited(ctx, one, failed) for one in range(1, number)]
    notes = "".join(f" ({note})" for note in omitted if note is not None)
    reason = (
        f"The activation gate failed as planned ({'; '.join(failed.reasons)}); fallback {number} "
        f"is the first of the registered ones that did not, in attempt {attempt} of at most "
        f"{len(possible) + 1}{notes}. {fallback.source}"
    )
    return {**change.deviation, "reason": reason}
