"""Correctness preflight, measured: the losses through the path that trains, on fixed inputs.

First the baseline's loss through the custom path, with no treatment in it, against the service's
own built-in loss and the reference; then the treatment's loss against the reference.

What the service computed on scores of its own is compared only where it repeats them; where it does
not, that evidence is missing and the gate is unverified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evidence import correctness
from evidence.canonical import canonical_bytes, digest
from evidence.gate import GateResult, SourceRef
from losses.errors import LossConfigError, LossInputError
from losses.inputs import LossInputs
from tasks.advantage_parity import (
    cookbook_rewarded,
    group_settings,
    rewarded,
    sdpo_comparisons,
    teacher_scores,
)
from tasks.arms import ArmPlan
from tasks.builtin_comparison import NOT_REPEATED, are_repeated, compare_with_builtin
from tasks.context import RunContext
from tasks.datums import TrainedSequence, datum_of, loss_inputs_of
from tasks.fixed_inputs import fixed_batch, forced_inputs, stale, taught_batch
from tasks.gate_answer import GateAnswer
from tasks.minibatch import loss_of
from tasks.parity_measurements import (
    Comparison,
    GradientProbe,
    against_reference,
    packed_against_unpacked,
    served_sums,
    worst,
)
from tasks.restoration import digest_of_file
from tasks.revisions import executed_revision, implementation_revision
from tasks.service import LoraSettings
from tasks.trainer import Trainer


async def check_correctness(ctx: RunContext) -> GateAnswer:
    """Measure every planned path and hold the errors against the spec's tolerances.

    Writes: the inputs and every comparison, as evidence files. Calls the service with clients of
    its own, which are released. Safe to repeat.
    """
    paths = [] if ctx.spec.correctness_preflight is None else ctx.spec.raw["correctness_preflight"]
    plans = paths.get("paths") or [] if isinstance(paths, Mapping) else []
    if not plans:
        result = correctness.validate(ctx.spec.raw, None)
        return GateAnswer(result.to_gate())
    try:
        measured = await _measure(ctx)
    except LossInputError as error:
        reason = f"the custom path cannot be measured: {error}"
        return GateAnswer(GateResult(gate="correctness", status="failed", reasons=(reason,)))
    path = ctx.run.write_file(
        f"correctness-{digest(measured)[:12]}.json", canonical_bytes(measured) + b"\n"
    )
    report = {"required": True, "paths": [_report(ctx, plan, measured) for plan in plans]}
    result = correctness.validate(ctx.spec.raw, report)
    gate = result.to_gate((SourceRef(path, digest_of_file(ctx, path)),))
    return GateAnswer(_explained(ctx, gate), {"correctness_preflight": report})


def _explained(ctx: RunContext, gate: GateResult) -> GateResult:
    """An unverified gate, with why evidence is missing where the service's scores are the cause."""
    known = {event["reason"] for event in ctx.run.events("builtin_not_compared")}
    if gate.status != "unverified" or NOT_REPEATED not in known:
        return gate
    reason = f"{NOT_REPEATED}: what it computed on them was compared with nothing"
    return replace(gate, reasons=(*gate.reasons, reason))


async def _measure(ctx: RunContext) -> dict[str, Any]:
    """Every comparison of baseline and treatment, with the inputs they were made on."""
    baseline, treatment = loss_of(_arm(ctx, "baseline")), loss_of(_arm(ctx, "treatment"))

    async def served() -> Served:
        return await _through_the_service(ctx, baseline, treatment)

    found = await ctx.service.retrying("correctness, custom path", served, from_scratch=True)

    async def builtin() -> list[Comparison]:
        return await _against_builtin(ctx, baseline, found)

    stock = await ctx.service.retrying("correctness, built-in loss", builtin, from_scratch=True)
    comparisons = {"baseline": [*found.baseline, *stock], "reference": found.reference}
    comparisons |= {f"sdpo_{side}": listed for side, listed in found.sdpo.items()}
    return {
        "stock_compared": sorted({comparison.check for comparison in stock}),
        "inputs": [_input_record(sequence) for sequence in found.batch],
        "forced_inputs": forced_inputs().to_record(),
        "losses": {"baseline": baseline, "reference": treatment},
        "comparisons": {
            name: [comparison.to_record() for comparison in listed]
            for name, listed in comparisons.items()
        },
    }


@dataclass(frozen=True, slots=True)
class Served:
    """What was measured on one client: its scores before anything, the inputs, the comparisons."""

    before: list[NDArray[np.float32]]
    repeats: bool
    """Whether it gave these scores twice, to the last bit."""
    batch: list[TrainedSequence]
    baseline: list[Comparison]
    reference: list[Comparison]
    sdpo: dict[str, list[Comparison]]
    """Comparisons of the advantages of a self-distilled arm, by side; empty without one."""


async def _through_the_service(
    ctx: RunContext, baseline: Mapping[str, Any], treatment: Mapping[str, Any]
) -> Served:
    """Both losses through the custom path of one fresh client."""
    trainer = await ctx.service.create_trainer(_plain(ctx.lora), label="correctness")
    try:
        datums = [datum_of(sequence) for sequence in fixed_batch(ctx)]
        before, again = [await trainer.forward(datums) for _ in range(2)]
        repeats = are_repeated(before, again)
        if not repeats:
            ctx.run.append("served_sums_not_compared", reason=NOT_REPEATED)
        batch = stale(fixed_batch(ctx), before)
        if _distilled(ctx) is not None:
            batch = rewarded(batch, group_settings(_arm(ctx, "baseline").advantage))
        return Served(
            before=before,
            repeats=repeats,
            batch=batch,
            baseline=await _one_loss(ctx, trainer, baseline, batch, before, repeats=repeats),
            reference=await _one_loss(ctx, trainer, treatment, batch, before, repeats=repeats),
            sdpo=await _advantages(ctx, trainer, batch, before),
        )
    finally:
        await trainer.close()


def _distilled(ctx: RunContext) -> ArmPlan | None:
    """The first arm whose advantages come from a teacher."""
    return next((arm for arm in ctx.trained_arms if arm.distils), None)


async def _advantages(
    ctx: RunContext,
    trainer: Trainer,
    batch: Sequence[TrainedSequence],
    before: Sequence[NDArray[np.float32]],
) -> dict[str, list[Comparison]]:
    """SDPO's advantages from scores of the service, where an arm has a teacher."""
    arm = _distilled(ctx)
    if arm is None:
        return {}
    scored = await teacher_scores(batch, await trainer.publish("correctness-teacher"))
    try:
        # A loss that is given the teacher itself takes no advantages; the others' loss stands in.
        loss = {"kind": "importance_sampling"} if arm.reads_teacher else loss_of(arm)
        return sdpo_comparisons(loss, arm.advantage, scored, before)
    except LossConfigError as error:
        ctx.run.append("correctness_not_measured", reason=str(error))
        return {}


def _arm(ctx: RunContext, role: str) -> ArmPlan:
    """The trained arm of a role, else the first trained one (a control has only one kind)."""
    of_role = [arm for arm in ctx.trained_arms if arm.role == role]
    return (of_role or list(ctx.trained_arms))[0]


def _plain(lora: LoraSettings) -> LoraSettings:
    """The adapter without any optimizer held by the service: a probe takes steps of its own."""
    return replace(lora, optimizer=None)


async def _one_loss(
    ctx: RunContext,
    trainer: Trainer,
    loss: Mapping[str, Any],
    batch: Sequence[TrainedSequence],
    before: Sequence[NDArray[np.float32]],
    *,
    repeats: bool = True,
) -> list[Comparison]:
    """One loss on real log-probabilities through the SDK, and on made-up ones without it.

    A loss that reads recomputed log-probabilities is given those from before any step. The sum that
    the service reports is left out where it does not repeat its scores.
    """
    where = "served log-probabilities"
    try:
        taught = taught_batch(loss, batch)
        probe = GradientProbe(loss, _inputs_of(loss, taught, before))
        metrics = await trainer.forward_backward_custom([datum_of(one) for one in taught], probe)
        return [
            *against_reference(loss, probe, where),
            *packed_against_unpacked(loss, probe, where),
            *(served_sums(probe, metrics) if repeats else ()),
            *_forced(loss),
        ]
    except LossConfigError as error:
        ctx.run.append("correctness_not_measured", reason=str(error))
        return []


def _forced(loss: Mapping[str, Any]) -> list[Comparison]:
    """A loss on made-up log-probabilities of sampled tokens; none of one that compares others."""
    if loss["kind"] == "sdpo_logit":
        return []
    forced = forced_inputs()
    probe = GradientProbe(loss, forced.inputs_D)
    probe.run(forced.target_logprobs_D)
    where = "forced log-probabilities"
    return [*against_reference(loss, probe, where), *packed_against_unpacked(loss, probe, where)]


def _inputs_of(
    loss: Mapping[str, Any],
    batch: Sequence[TrainedSequence],
    before: Sequence[NDArray[np.float32]],
) -> list[LossInputs]:
    recomputes = loss.get("anchor") == "recompute"
    return [
        loss_inputs_of(
            sequence,
            values.astype(np.float64) if recomputes else None,
            reads_teacher=str(loss["kind"]).startswith("sdpo_"),
        )
        for sequence, values in zip(batch, before, strict=True)
    ]


async def _against_builtin(
    ctx: RunContext, loss: Mapping[str, Any], found: Served
) -> list[Comparison]:
    """The baseline's loss against the built-in one; with a teacher, against stock advantages."""
    return await compare_with_builtin(
        ctx,
        loss,
        found.batch,
        stock_batch=found.batch if _distilled(ctx) is None else cookbook_rewarded(found.batch),
        before=found.before,
        repeats=found.repeats,
        lora=_plain(ctx.lora),
    )


def _report(
    ctx: RunContext, plan: Mapping[str, Any], measured: Mapping[str, Any]
) -> dict[str, Any]:
    """One path of the contract's report.

    A check of the baseline that nothing stock was compared with is left out, however well the
    baseline agrees with its own reference: the gate is unverified then.
    """
    tolerances = plan.get("tolerances") or {}
    errors = {}
    for side in ("baseline", "reference"):
        comparisons = [
            Comparison(**one)
            for name in _names(ctx, str(plan.get("id")), side)
            for one in measured["comparisons"].get(name, [])
        ]
        for check in ("loss", "gradient"):
            proven = side == "reference" or check in measured["stock_compared"]
            if proven and any(one.check == check for one in comparisons):
                bound = tolerances.get(f"{side}_{check}") or {}
                errors[f"{side}_{check}"] = dict(worst(comparisons, check, bound))
    inputs = {name: measured[name] for name in ("inputs", "forced_inputs")}
    return {
        "id": plan.get("id"),
        "fixed_input": {
            "sha256": digest(inputs),
            "description": "canonical JSON of inputs and forced_inputs in the correctness file: "
            "stale served sequences and made-up ones, both signs, zeros, both sides of thresholds",
        },
        "baseline_revision": executed_revision(plan.get("baseline_revision")),
        "reference_revision": executed_revision(plan.get("reference_revision")),
        "implementation_revision": implementation_revision(),
        "precision": _precision(ctx),
        "normalization": "sum over loss tokens, divided by 1",
        "errors": errors,
        "lr_scaling": [],
    }


def _names(ctx: RunContext, path: str, side: str) -> list[str]:
    """Which lists of comparisons one side of a path rests on.

    A path that is named after the self-distilled arm's advantage, or after the arm, rests on the
    comparisons of its advantages too; with the teacher switched off they are the baseline's.
    """
    arm = _distilled(ctx)
    if arm is not None and path.startswith((str(arm.advantage["kind"]), arm.name)):
        return [side, f"sdpo_{side}"]
    return [side]


def _precision(ctx: RunContext) -> str:
    dtype = ctx.server.local.get("dtype")
    return (
        f"matrix products of the service: {dtype or 'not reported'}; log-probabilities as float32 "
        "on the wire; the loss in float64 on the client"
    )


def _input_record(sequence: TrainedSequence) -> dict[str, Any]:
    return {
        "tokens": sequence.tokens.tolist(),
        "loss_mask": sequence.loss_mask.tolist(),
        "sampling_logprobs": sequence.sampling_logprobs.tolist(),
        "advantages": sequence.advantages.tolist(),
    }
