"""The registered fallbacks of a failed activation gate: what each changes, and how it is tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


def calibration_refusal(ctx: RunContext, tried: int) -> str | None:
    """Why no further fallback may be tried; None if one may.

    Args:
        ctx: the run.
        tried: fallbacks tried so far.
    """
    limits = ctx.execution.calibration
    if limits is None:
        return "no calibration is registered"
    steps = pilot_steps(ctx)
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
    """The deviation that going on with a fallback is, in the contract's form."""
    fallback = ctx.execution.fallbacks[number - 1]
    change = changed(ctx.execution, fallback)
    reasons = "; ".join(failed.reasons)
    reason = (
        f"The activation gate failed as planned ({reasons}); fallback {number} is the first of the "
        f"registered ones that did not. {fallback.source}"
    )
    return {**change.deviation, "reason": reason}
