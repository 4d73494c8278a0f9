"""The activation pilot: a short training of fresh clients, on train tasks only, thrown away.

While the piloted arm takes its first step, every other trained arm takes one beside it, so that a
step is timed at the concurrency of the comparison. Nothing of this enters the comparison: the
clients are released, and the tables carry the phase ``pilot``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from evidence import activation
from evidence.canonical import canonical_bytes, digest
from evidence.gate import GateResult, SourceRef
from losses.errors import LossInputError
from tasks.activation_values import PILOT_BEAT, activation_metrics
from tasks.context import PILOT, RunContext, settle_all
from tasks.gate_answer import GateAnswer
from tasks.learner import Learner
from tasks.restoration import digest_of_file
from tasks.training import run_step

JOINT_STEP = "joint_step"
_BEAT_SECONDS = 10.0


async def run_pilot(ctx: RunContext, init_uri: str, phase: str = PILOT) -> None:
    """Train the piloted arms for the planned steps, and the others for one, and release them.

    Reads and writes: tables of the phase. Calls the service. Safe to repeat: finished
    groups and updates are not done again.
    """
    learners = [Learner(ctx, arm, phase=phase, init_uri=init_uri) for arm in ctx.trained_arms]
    try:
        if not ctx.timings(what=JOINT_STEP, phase=phase):
            await _joint_step(ctx, learners, phase)
        piloted = [one for one in learners if one.arm.name in ctx.execution.pilot.arms]
        await settle_all([_rest(ctx, learner) for learner in piloted])
    finally:
        for learner in learners:
            await learner.drop()
    arms = [learner.arm.name for learner in learners]
    ctx.run.append("pilot_released", arms=arms, phase=phase)


async def _joint_step(ctx: RunContext, learners: Sequence[Learner], phase: str) -> None:
    """Every arm's first step side by side, timed with all of its tries.

    What an interrupted try had finished is not done again, so its time counts too.
    """
    count, size = len(learners), ctx.execution.rollout.batch_size
    earlier = sum(e["seconds"] for e in ctx.run.events(PILOT_BEAT) if e["phase"] == phase)
    with ctx.timed("all", phase, 0, JOINT_STEP, units=count, samples=count * size) as timer:
        timer.earlier = earlier
        async with _beating(ctx, phase):
            await settle_all([run_step(ctx, learner, 0) for learner in learners])


@asynccontextmanager
async def _beating(ctx: RunContext, phase: str) -> AsyncIterator[None]:
    """Keep in the ledger that time passes, each beat ahead of the seconds that it stands for.

    A killed try is thereby counted as at most one beat too long, and never as too short.
    """

    async def beat() -> None:
        while True:
            ctx.run.append(PILOT_BEAT, attempt=ctx.run.attempt, seconds=_BEAT_SECONDS, phase=phase)
            await ctx.service.clock.sleep(_BEAT_SECONDS)

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)  # the first beat stands before anything is kept
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def _rest(ctx: RunContext, learner: Learner) -> None:
    steps = pilot_steps(ctx)
    for step in range(steps):
        await run_step(ctx, learner, step)
        ctx.tell(learner.phase, arm=learner.arm.name, done=step + 1, total=steps)


def pilot_steps(ctx: RunContext) -> int:
    """Rollout steps of the pilot in this run."""
    planned = ctx.execution.pilot.steps
    return planned if ctx.limit is None else min(planned, ctx.limit)


async def check_activation(ctx: RunContext, init_uri: str, phase: str = PILOT) -> GateAnswer:
    """Run the pilot and hold every prespecified diagnostic against its range.

    A loss that cannot be computed on the pilot's tokens fails the gate with its words; it is never
    a reason to skip it.
    """
    try:
        await run_pilot(ctx, init_uri, phase)
    except LossInputError as error:
        reason = f"the loss cannot be computed: {error}"
        return GateAnswer(GateResult(gate="activation", status="failed", reasons=(reason,)))
    report = calibration(ctx, phase)
    name = f"activation-calibration-{digest(report)[:12]}.json"
    path = ctx.run.write_file(name, canonical_bytes(report) + b"\n")
    ctx.run.append("activation_calibration", report=report)
    result = activation.validate(ctx.spec.raw, report)
    gate = result.to_gate((SourceRef(path, digest_of_file(ctx, path)),))
    return GateAnswer(gate, {"activation_calibration": report, **_original_gate(ctx, report)})


def _original_gate(ctx: RunContext, report: dict[str, Any]) -> dict[str, Any]:
    """The gate as originally planned, judged on the same numbers and kept beside the changed one."""
    planned = ctx.choices.original_gate
    if planned is None or planned == ctx.spec.raw.get("activation_gate"):
        return {}
    original = activation.validate({**ctx.spec.raw, "activation_gate": dict(planned)}, report)
    return {"original_activation_gate": original.to_record()}


def calibration(ctx: RunContext, phase: str = PILOT) -> dict[str, Any]:
    """What the pilot of a phase measured, in the contract's form."""
    rollout = ctx.execution.rollout
    note = (
        f"{phase}: "
        f"{pilot_steps(ctx)} rollout steps of {', '.join(ctx.execution.pilot.arms)} from the "
        f"initialization checkpoint; {rollout.groups} groups of {rollout.group_size}, "
        f"{rollout.minibatches} minibatches x {rollout.epochs} epochs; clients released"
    )
    metrics = activation_metrics(ctx, phase)
    return {
        "values": {name: found.value for name, found in metrics.items() if found.reason is None},
        "note": note,
        "not_measured": {name: found.reason for name, found in metrics.items() if found.reason},
        "detail": {name: dict(found.detail) for name, found in metrics.items() if found.detail},
    }
