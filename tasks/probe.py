"""Service probe: one client and one optimizer step per arm, with its exact settings, then released.

An arm that the service would refuse is found here, before anything is spent on it.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from typing import Any

from evidence.gate import CheckResult, GateResult, GateStatus
from tasks.anchor import anchor_of
from tasks.arms import ArmPlan
from tasks.context import RunContext, require_graded
from tasks.datums import TrainedSequence, datum_of
from tasks.failures import FailureKind, PermanentServiceError
from tasks.gate_answer import GateAnswer
from tasks.minibatch import MinibatchLoss, correction_of
from tasks.sequences import sampled_sequence, with_own_teacher
from tasks.tokenizers import prepare_environment
from tasks.trainer import Trainer

GATE = "service_probe"
REFUSED_VALUES = frozenset({None, 400, 422})
"""Status of an answer that refuses what was asked for, not who asked or when.

A request that was accepted and then failed for what it holds has no status."""


async def probe_service(ctx: RunContext) -> GateAnswer:
    """Create each trained arm's client, take one step on one example, and release it.

    Writes: an event `probe` per arm. Calls the service. Safe to repeat.

    Raises:
        ServiceError: if the arm's settings are not what was refused (credentials, billing, ...).
    """
    checks = []
    for arm in ctx.trained_arms:
        ctx.tell(GATE, f"one step of {arm.name}", arm=arm.name)
        try:
            checks.append(
                await ctx.service.retrying(
                    f"probe {arm.name}", partial(_probe_arm, ctx, arm), from_scratch=True
                )
            )
        except PermanentServiceError as error:
            if not _refuses_values(error):
                raise
            checks.append(CheckResult(check=arm.name, status="failed", reason=str(error)))
    failed = tuple(check.reason or check.check for check in checks if check.status == "failed")
    status: GateStatus = "failed" if failed else "passed"
    return GateAnswer(GateResult(gate=GATE, status=status, reasons=failed, checks=tuple(checks)))


def _refuses_values(error: PermanentServiceError) -> bool:
    failure = error.failure
    if failure is None or failure.kind is not FailureKind.PERMANENT:
        return False
    return failure.status in REFUSED_VALUES


async def _probe_arm(ctx: RunContext, arm: ArmPlan) -> CheckResult:
    started = time.monotonic()
    trainer = await ctx.service.create_trainer(ctx.lora, label=f"probe-{arm.name}")
    try:
        created = time.monotonic()
        await prepare_environment(ctx, trainer.info.tokenizer)
        await _one_step(ctx, arm, trainer)
        stepped = time.monotonic()
    finally:
        released = await trainer.close()
    info = asdict(trainer.info)
    ctx.run.append(
        "probe",
        arm=arm.name,
        info=info,
        create_seconds=created - started,
        step_seconds=stepped - created,
        released=released,
    )
    return _judge(ctx, arm, info)


def _judge(ctx: RunContext, arm: ArmPlan, info: dict[str, Any]) -> CheckResult:
    """What the service made must be what was asked for, where it says what it made."""
    planned = {"base_model": ctx.spec.base_model, "lora_rank": ctx.spec.lora_rank}
    wrong = [
        f"{name} is {info[name]!r}, planned is {value!r}"
        for name, value in planned.items()
        if info[name] is not None and info[name] != value
    ]
    return CheckResult(
        check=arm.name,
        status="failed" if wrong else "passed",
        reason="; ".join(wrong) or None,
        tolerance=planned,
        measured={name: info[name] for name in (*planned, "optimizer")},
    )


async def _one_step(ctx: RunContext, arm: ArmPlan, trainer: Trainer) -> None:
    sequence = await probe_example(ctx, arm, trainer)
    correction = correction_of(ctx, arm)
    anchor = await anchor_of(arm, correction, trainer, [sequence])
    loss = MinibatchLoss.of(arm, [sequence], denominator=1.0, anchor=anchor, correction=correction)
    answer = await trainer.step([datum_of(sequence)], loss, ctx.adam)
    error = answer.loss_error or answer.step_error
    if error is not None:
        raise error


async def probe_example(ctx: RunContext, arm: ArmPlan, trainer: Trainer) -> TrainedSequence:
    """One sampled completion of the first training task, with advantage 1.

    Raises:
        ServiceOutage: if its simulator or judge failed: better known now than after training.
    """
    sampler = await trainer.publish(f"probe-{arm.name}")
    item_id = ctx.environment.train_batch(0, ctx.execution.rollout.groups)[0]
    episode = await ctx.environment.run_episode(
        item_id,
        sampler,
        settings=ctx.rollout_settings,
        seed=arm.sampling_seed(ctx.run.spec_sha256, "probe", 0, 0, 0),
    )
    require_graded([episode])
    sequence = sampled_sequence(episode, group=0, sample=0, advantage=1.0)
    return await with_own_teacher(sequence, arm, sampler)
