"""The sampling weights' log-probabilities as the trainer computes them, for losses that need them.

They are computed once, before the first update of a rollout step, and kept: later updates and
replays use the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evidence.method_settings import RolloutCorrection
from tasks.arms import ArmPlan
from tasks.context import RunContext
from tasks.datums import Floats, TrainedSequence, datum_of, sequences_of
from tasks.minibatch import Minibatch
from tasks.recomputed import read_recomputed, reads_recomputed, write_recomputed
from tasks.trainer import Trainer


def needs_anchor(arm: ArmPlan, correction: RolloutCorrection | None) -> bool:
    """Whether the arm's loss, or its rollout correction, reads recomputed log-probabilities."""
    return reads_recomputed(arm.loss, correction)


async def anchor_of(
    arm: ArmPlan,
    correction: RolloutCorrection | None,
    trainer: Trainer,
    sequences: Sequence[TrainedSequence],
) -> list[Floats] | None:
    """Scores of sequences that the client's own weights sampled; None where the arm reads none."""
    if not needs_anchor(arm, correction):
        return None
    answers = await trainer.forward([datum_of(sequence) for sequence in sequences])
    return [values.astype(np.float64) for values in answers]


async def recomputed_logprobs(
    ctx: RunContext, arm: ArmPlan, phase: str, minibatch: Minibatch, trainer: Trainer
) -> list[Floats] | None:
    """Log-probabilities of the minibatch's targets under the weights that sampled, or None.

    The caller's client holds these weights when the first minibatch of the step is about to be
    trained; from then on the kept numbers are read.
    """
    if not needs_anchor(arm, minibatch.correction):
        return None
    key = (arm.name, phase, minibatch.step)
    everything = sequences_of(ctx.run.read_arrow("tokens", key=key))
    kept = read_recomputed(ctx.run, *key)
    if kept is None:
        answers = await trainer.forward([datum_of(sequence) for sequence in everything])
        kept = np.concatenate(answers).astype(np.float32)
        write_recomputed(ctx.run, *key, kept)
    return _of_minibatch(kept.astype(np.float64), everything, minibatch.sequences)


def _of_minibatch(
    kept: Floats, everything: Sequence[TrainedSequence], wanted: Sequence[TrainedSequence]
) -> list[Floats]:
    ends = np.cumsum([len(sequence.targets) for sequence in everything])
    parts = dict(
        zip(
            [(sequence.group, sequence.sample) for sequence in everything],
            np.split(kept, ends[:-1]),
            strict=True,
        )
    )
    return [parts[sequence.group, sequence.sample] for sequence in wanted]
