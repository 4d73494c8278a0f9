"""Sentinel tokens: fixed tokens of the frozen batch, scored again as training goes on.

Before the first update they are scored three ways (as returned with the sample, by the sampler
again, by the trainer), which tells a sampler that disagrees from a policy that moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evidence.run import TableRef
from tasks.context import RunContext, settle_all
from tasks.datums import TrainedSequence, datum_of, sequences_of
from tasks.failures import PermanentServiceError
from tasks.learner import Learner
from tasks.trainer import Trainer


def sentinel_sequences(ctx: RunContext, learner: Learner, count: int) -> list[TrainedSequence]:
    """The fixed sequences: the first sample of each group in order, then the second, and so on."""
    table = ctx.run.read_arrow("tokens", key=(learner.arm.name, learner.phase, 0))
    ordered = sorted(sequences_of(table), key=lambda one: (one.sample, one.group))
    return sorted(ordered[:count], key=lambda one: (one.group, one.sample))


async def score_sentinels(
    ctx: RunContext, learner: Learner, *, count: int, updates_done: int
) -> TableRef:
    """Score the sentinels with the weights after some updates, unless that was done.

    Reads `tokens`. Writes `sentinels`. Calls the service. Safe to repeat.
    """
    key = (learner.arm.name, learner.phase, updates_done)
    if ctx.run.has_table("sentinels", key=key):
        return ctx.run.table_ref("sentinels", key=key)
    sequences = sentinel_sequences(ctx, learner, count)
    rescored = await _rescored(learner, sequences) if updates_done == 0 else None

    async def score(trainer: Trainer) -> list[NDArray[np.float32]]:
        return await trainer.forward([datum_of(sequence) for sequence in sequences])

    what = f"sentinels after {updates_done} updates"
    scores = await learner.do(updates_done, what, score)
    rows = [
        row
        for index, (sequence, values) in enumerate(zip(sequences, scores, strict=True))
        for row in _rows(sequence, values, None if rescored is None else rescored[index])
    ]
    return ctx.run.write_table("sentinels", rows, key=key)


async def _rescored(
    learner: Learner, sequences: Sequence[TrainedSequence]
) -> list[list[float | None]] | None:
    """What the sampler itself says of its tokens; None from a service that does not score."""
    sampler = await learner.sampler(0)
    try:
        return await settle_all(
            [sampler.compute_logprobs(sequence.tokens.tolist()) for sequence in sequences]
        )
    except PermanentServiceError as error:
        learner.ctx.run.append("rescoring_refused", error=error.error)
        return None


def _rows(
    sequence: TrainedSequence,
    scores: NDArray[np.float32],
    rescored: Sequence[float | None] | None,
) -> list[dict[str, Any]]:
    return [
        {
            "group": sequence.group,
            "sample": sequence.sample,
            "position": position,
            "token_id": int(sequence.tokens[position]),
            "trainer_logprob": float(scores[position - 1]),
            "sampling_logprob": float(np.float32(sequence.sampling_logprobs[position])),
            "rescored_logprob": None if rescored is None else rescored[position],
        }
        for position in (np.flatnonzero(sequence.loss_mask[1:]) + 1).tolist()
    ]
