"""The baseline's custom loss against the service's built-in one: its value, and what a step does.

Gradients are not returned by the protocol. They are seen in how far one step moves the
log-probabilities of the batch. Adam's own first step would be a poor instrument: it has the size of
the learning rate wherever a gradient is, so that a component of 1e-9 that two correct paths round
to different signs counts as much as the largest. With an epsilon far above every gradient the step
is gradient descent, and the movement is as large as the gradient.

All steps start from one checkpoint: adapters without a seed differ from each other in the half that
is not zero, and the movements with them.

A service that does not repeat its own scores has computed each of two values on other scores, and
the tolerances are far below what that makes of a sum: there is nothing to compare there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
from numpy.typing import NDArray

from tasks.builtin_loss import builtin_loss
from tasks.conformance_bench import EPSILON
from tasks.context import RunContext
from tasks.datums import TrainedSequence, builtin_datum_of, datum_of, loss_inputs_of
from tasks.failures import PermanentServiceError
from tasks.fingerprint import fingerprint
from tasks.parity_measurements import (
    Comparison,
    GradientProbe,
    against_builtin_step,
    against_builtin_value,
)
from tasks.service import LoraSettings
from tasks.trainer import Trainer

WANTED_NATS = (1.0, 4.0)
"""Largest movement of a log-probability: float32 weights move in steps that show as some 5e-5."""
NOT_REPEATED = "the service does not repeat its own scores"
_FIRST_LENGTH = 1e-3
_TRIES = 8


def descent(adam: tinker.AdamParams, length: float) -> tinker.AdamParams:
    """Settings that make Adam's step so many times the gradient.

    Args:
        adam: the run's settings, of which only the second beta is kept.
        length: learning rate of gradient descent.
    """
    return tinker.AdamParams(
        learning_rate=length * EPSILON,
        beta1=0.0,
        beta2=adam.beta2,
        eps=EPSILON,
        weight_decay=0.0,
        grad_clip_norm=0.0,
    )


async def compare_with_builtin(
    ctx: RunContext,
    loss: Mapping[str, Any],
    batch: Sequence[TrainedSequence],
    *,
    stock_batch: Sequence[TrainedSequence],
    before: Sequence[NDArray[np.float32]],
    repeats: bool,
    lora: LoraSettings,
) -> list[Comparison]:
    """The custom path against the built-in loss, each on a client of its own, one step each.

    Nothing is compared where the service has no such loss, or its scores would not tell; an event
    `builtin_not_compared` says why, and the gate is unverified then.

    Args:
        ctx: the run.
        loss: settings of the baseline's loss.
        batch: what the custom path is given.
        stock_batch: the same, with the advantages that the stock pipeline computes.
        before: log-probabilities of the batch under a fresh client.
        repeats: whether that client gave them twice.
        lora: the adapter, without an optimizer held by the service.
    """
    stock = builtin_loss(loss)
    if stock is None:
        ctx.run.append("builtin_not_compared", reason=f"no built-in loss computes {loss}")
        return []
    if not repeats:
        ctx.run.append("builtin_not_compared", reason=NOT_REPEATED)
        return []
    name, config = stock
    probe = GradientProbe(loss, [loss_inputs_of(sequence) for sequence in batch])
    datums = [datum_of(sequence) for sequence in batch]

    async def custom(trainer: Trainer) -> dict[str, float]:
        return await trainer.forward_backward_custom(datums, probe)

    async def builtin(trainer: Trainer) -> dict[str, float]:
        sent = [builtin_datum_of(sequence) for sequence in stock_batch]
        return await trainer.forward_backward(sent, name, config)

    try:
        steps = _Steps(ctx, datums, before, lora, start=await _start(ctx, lora))
        ours = await steps.visible(custom)
        if ours is None:
            return []
        length, moved = ours
        metrics, (moved_stock, again) = await steps.taken("builtin", builtin, length, scorings=2)
    except PermanentServiceError as error:
        ctx.run.append("builtin_not_compared", reason=str(error))
        return []
    if not are_repeated(moved_stock, again):
        ctx.run.append("builtin_not_compared", reason=NOT_REPEATED)
        return []
    value = against_builtin_value(probe, metrics)
    return [*value, against_builtin_step(before, moved, moved_stock)]


def are_repeated(one: Sequence[NDArray[np.float32]], other: Sequence[NDArray[np.float32]]) -> bool:
    """Whether two scorings of a batch are the same to the last bit."""
    return fingerprint(one) == fingerprint(other)


Work = Callable[[Trainer], Awaitable[dict[str, float]]]
Scores = list[NDArray[np.float32]]


async def _start(ctx: RunContext, lora: LoraSettings) -> str:
    """A checkpoint of a fresh adapter."""
    trainer = await ctx.service.create_trainer(lora, label="correctness-start")
    try:
        return await trainer.save("correctness-start")
    finally:
        await trainer.close()


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps on clients that start from the same weights."""

    ctx: RunContext
    datums: Sequence[tinker.Datum]
    before: Sequence[NDArray[np.float32]]
    lora: LoraSettings
    start: str

    async def taken(
        self, label: str, work: Work, length: float, *, scorings: int = 1
    ) -> tuple[dict[str, float], list[Scores]]:
        """Metrics of the work, and the scores after one step of it, asked for so many times."""
        label = f"correctness-{label}"
        trainer = await self.ctx.service.load_weights(self.start, self.lora, label=label)
        try:
            metrics = await work(trainer)
            await trainer.optim_step(descent(self.ctx.adam, length))
            return metrics, [await trainer.forward(self.datums) for _ in range(scorings)]
        finally:
            await trainer.close()

    async def visible(self, work: Work) -> tuple[float, Scores] | None:
        """A step that moves the batch visibly: its length, and the scores after it.

        Returns:
            None, with an event, if there is none.
        """
        length = _FIRST_LENGTH
        for _ in range(_TRIES):
            _, (after,) = await self.taken("custom", work, length)
            size = _largest(after, self.before)
            if WANTED_NATS[0] <= size <= WANTED_NATS[1]:
                return length, after
            length *= _factor(size)
        reason = f"no step of the custom loss moves the batch by {WANTED_NATS[0]:g} nats or more"
        self.ctx.run.append("builtin_not_compared", reason=reason)
        return None


def _largest(after: Scores, before: Sequence[NDArray[np.float32]]) -> float:
    moves = [
        np.abs(one.astype(np.float64) - other).max()
        for one, other in zip(after, before, strict=True)
    ]
    return float(max(moves))


def _factor(size: float) -> float:
    """What the length is to be multiplied with, to come to the middle of what is wanted."""
    if not np.isfinite(size):
        return 1e-3
    wanted = float(np.sqrt(WANTED_NATS[0] * WANTED_NATS[1]))
    return float(np.clip(wanted / max(size, 1e-12), 1e-3, 1e3))
