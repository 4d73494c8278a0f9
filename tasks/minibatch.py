"""One optimizer step: which stored sequences it uses, its loss, and the rows it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tinker
import torch
from numpy.typing import NDArray

from evidence.method_settings import RolloutCorrection
from evidence.run import COMPUTED, Rows, TableRef
from losses.aggregation import denominator_value
from losses.diagnostics import minibatch_diagnostics
from losses.inputs import LossInputs, LossOutput
from losses.objective import CustomLoss
from losses.rollout_correction import rollout_correction_weights
from losses.support_columns import step_loss
from tasks.arms import ArmPlan
from tasks.context import RunContext
from tasks.datums import (
    Floats,
    TrainedSequence,
    loss_inputs_of,
    minibatch_of,
    sequences_of,
    with_support,
    with_teacher,
)
from tasks.diagnostics import diagnostic_settings, update_columns
from tasks.recomputed import correction_for


@dataclass(slots=True)
class MinibatchLoss:
    """A minibatch's loss as the SDK calls it; keeps the log-probabilities that it was given."""

    custom: CustomLoss
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    """What the service returned for each datum, before the step, nats."""
    logprob_dtype: str | None = None
    """Type in which they came."""
    on_computed: Callable[[MinibatchLoss], None] | None = None
    """Told as soon as the loss is known, which is before its gradient is sent."""

    @classmethod
    def of(
        cls,
        arm: ArmPlan,
        sequences: Sequence[TrainedSequence],
        *,
        denominator: float,
        anchor: Sequence[Floats] | None = None,
        correction: RolloutCorrection | None = None,
    ) -> MinibatchLoss:
        """The loss of an arm on some sequences.

        Args:
            arm: the arm.
            sequences: what is trained on.
            denominator: what the summed loss is divided by.
            anchor: recomputed log-probabilities of the targets, where they are needed.
            correction: weights between sampler and trainer, which need the anchor too.
        """
        anchors = anchor if anchor is not None else [None] * len(sequences)
        inputs = [
            loss_inputs_of(sequence, values, reads_teacher=arm.reads_teacher)
            for sequence, values in zip(sequences, anchors, strict=True)
        ]
        if correction is not None:
            inputs = corrected(inputs, correction)
        return cls(CustomLoss(step_loss(loss_of(arm)), inputs, denominator))

    def __call__(
        self, data: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the loss; see `losses.objective.CustomLoss`."""
        sampled = [values if values.dim() == 1 else values[:, -1] for values in logprobs]
        self.logprobs = [values.detach().numpy().astype(np.float32) for values in sampled]
        self.logprob_dtype = str(logprobs[0].dtype).removeprefix("torch.") if logprobs else None
        answer = self.custom(data, logprobs)
        if self.on_computed is not None:
            self.on_computed(self)
        return answer

    @property
    def value(self) -> float:
        """The loss of the last call, divided by the denominator."""
        return float(self.custom.calls[-1].loss.detach())

    @property
    def outputs(self) -> list[LossOutput]:
        """What was decided for each token in the last call."""
        return self.custom.calls[-1].outputs_D


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimizer step trains on.

    Attributes:
        update: optimizer step of the arm in this phase, from 0.
        step: rollout step whose batch it belongs to.
        epoch: pass over that batch.
        index: minibatch within the pass.
        sequences: the stored sequences.
        denominator: what the summed loss is divided by.
        arm: the arm.
        correction: weights between sampler and trainer, where the arm's loss takes any.
    """

    update: int
    step: int
    epoch: int
    index: int
    sequences: Sequence[TrainedSequence]
    denominator: float
    arm: ArmPlan
    correction: RolloutCorrection | None = None

    def custom_loss(self, anchor: Sequence[Floats] | None) -> MinibatchLoss:
        """The loss in the form that the service's SDK calls."""
        return MinibatchLoss.of(
            self.arm,
            self.sequences,
            denominator=self.denominator,
            anchor=anchor,
            correction=self.correction,
        )


def loss_of(arm: ArmPlan) -> Mapping[str, Any]:
    """Settings of a trained arm's loss.

    Raises:
        ValueError: for an arm that is not trained.
    """
    if arm.loss is None:
        raise ValueError(f"arm {arm.name} has no loss; it is not trained")
    return arm.loss


def load_minibatch(ctx: RunContext, arm: ArmPlan, phase: str, update: int) -> Minibatch:
    """Read the stored batch of an update; the sampling log-probabilities are never refreshed."""
    rollout = ctx.execution.rollout
    step, within = divmod(update, rollout.updates_per_step)
    epoch, index = divmod(within, rollout.minibatches)
    sequences = minibatch_of(
        trained_sequences(ctx, arm, phase, step),
        groups=rollout.groups,
        minibatches=rollout.minibatches,
        index=index,
    )
    denominator = denominator_value(
        ctx.execution.denominator.config,
        loss_tokens=sum(sequence.loss_tokens for sequence in sequences),
        sequences=len(sequences),
    )
    correction = correction_of(ctx, arm)
    return Minibatch(update, step, epoch, index, sequences, denominator, arm, correction)


def trained_sequences(
    ctx: RunContext, arm: ArmPlan, phase: str, step: int
) -> list[TrainedSequence]:
    """The stored sequences of a rollout step, with a teacher's advantages where the arm has one."""
    key = (arm.name, phase, step)
    sequences = sequences_of(ctx.run.read_arrow("tokens", key=key))
    if not arm.distils:
        return sequences
    taught = with_teacher(sequences, ctx.run.read_arrow("rescoring", key=key))
    if arm.top_k is None:
        return taught
    return with_support(taught, ctx.run.read_arrow("supports", key=key), top_k=arm.top_k)


def correction_of(ctx: RunContext, arm: ArmPlan) -> RolloutCorrection | None:
    """The rollout correction of an arm."""
    return correction_for(loss_of(arm), ctx.execution.rollout_correction)


def corrected(inputs_D: Sequence[LossInputs], correction: RolloutCorrection) -> list[LossInputs]:
    """The inputs with truncated importance weights between the sampler and the trainer.

    Raises:
        ValueError: if the trainer's own log-probabilities are not there.
    """
    anchors = [one.anchor_logprobs_T for one in inputs_D if one.anchor_logprobs_T is not None]
    if len(anchors) != len(inputs_D):
        raise ValueError("rollout correction needs recomputed log-probabilities of every sequence")
    weights_D = rollout_correction_weights(
        anchors,
        [one.sampling_logprobs_T for one in inputs_D],
        [one.loss_mask_T for one in inputs_D],
        level=correction.level,
        threshold=correction.threshold,
        batch_normalize=correction.batch_normalize,
    )
    return [
        replace(one, weights_T=weights_T)
        for one, weights_T in zip(inputs_D, weights_D, strict=True)
    ]


def has_update(ctx: RunContext, arm: ArmPlan, phase: str, update: int) -> bool:
    """Whether an update is part of the history that counts."""
    return ctx.run.has_table("updates", key=(arm.name, phase, update))


def update_ref(ctx: RunContext, arm: ArmPlan, phase: str, update: int) -> TableRef:
    """Where the row of an update lies."""
    return ctx.run.table_ref("updates", key=(arm.name, phase, update))


def write_update(
    ctx: RunContext, arm: ArmPlan, phase: str, minibatch: Minibatch, loss: MinibatchLoss
) -> bool:
    """Write `update_tokens` and then `updates`: the row of the update completes it.

    Both come from the part that `keep_computed` wrote, so from one forward pass, wherever an
    earlier process was cut off.

    Returns:
        Whether it is new; a replayed update changes nothing.
    """
    if has_update(ctx, arm, phase, minibatch.update):
        return False
    keep_computed(ctx, arm, phase, minibatch, loss)
    ctx.run.assemble_parts(arm.name, phase, minibatch.update, [0], folder=COMPUTED)
    return True


def keep_computed(
    ctx: RunContext, arm: ArmPlan, phase: str, minibatch: Minibatch, loss: MinibatchLoss
) -> None:
    """Keep what the loss was given, decided and came to as one part, unless there is one already.

    A service need not repeat bit for bit; what was computed first counts.
    """
    place = (arm.name, phase, minibatch.update)
    if ctx.run.parts(*place, folder=COMPUTED):
        return
    tables: dict[str, Rows] = {
        "update_tokens": token_columns(minibatch, loss),
        "updates": [update_row(ctx, minibatch, loss)],
    }
    ctx.run.write_part(*place, 0, tables, folder=COMPUTED)


def token_columns(minibatch: Minibatch, loss: MinibatchLoss) -> dict[str, NDArray[Any]]:
    """Columns of `update_tokens`: every loss token, with what the loss decided about it."""
    columns: dict[str, list[NDArray[Any]]] = {}
    for sequence, target, output in zip(
        minibatch.sequences, loss.logprobs, loss.outputs, strict=True
    ):
        mask = sequence.loss_mask[1:]
        keep = output.keep_T.numpy()[mask]
        advantages = sequence.advantages[1:][mask]
        count = int(mask.sum())
        for name, values in {
            "group": np.full(count, sequence.group, dtype=np.int64),
            "sample": np.full(count, sequence.sample, dtype=np.int64),
            "position": np.flatnonzero(mask).astype(np.int64) + 1,
            "token_id": sequence.targets[mask],
            "target_logprob": target[mask],
            "sampling_logprob": sequence.sampling_logprobs[1:][mask].astype(np.float32),
            "advantage": advantages.astype(np.float32),
            "prob_ratio": output.prob_ratio_T.numpy()[mask].astype(np.float64),
            "keep": keep,
            "removed": ~keep & (advantages != 0.0),
        }.items():
            columns.setdefault(name, []).append(values)
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def update_row(ctx: RunContext, minibatch: Minibatch, loss: MinibatchLoss) -> dict[str, Any]:
    """The row of `updates` without its key."""
    sequences = minibatch.sequences
    return {
        "step": minibatch.step,
        "epoch": minibatch.epoch,
        "minibatch": minibatch.index,
        "policy_version_before": minibatch.update,
        "datums": len(sequences),
        "loss": loss.value,
        "denominator": minibatch.denominator,
        "learning_rate": ctx.execution.optimizer.learning_rate,
        **diagnostics_of(ctx, loss),
        "logprob_dtype": loss.logprob_dtype,
    }


def diagnostics_of(ctx: RunContext, loss: MinibatchLoss) -> dict[str, Any]:
    """Every diagnostic of the loss, before the step was taken, as columns of `updates`."""
    record = minibatch_diagnostics(
        [torch.from_numpy(values) for values in loss.logprobs],
        loss.custom.inputs_D,
        loss.outputs,
        settings=diagnostic_settings(ctx.arms),
    )
    return update_columns(record)
