"""An episode as a sequence to train on, without the detour through a table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from envs.protocols import Episode
from tasks.arms import ArmPlan
from tasks.datums import Support, TrainedSequence
from tasks.sampling import ServiceSampler


def sampled_sequence(
    episode: Episode, *, group: int, sample: int, advantage: float
) -> TrainedSequence:
    """The sequence that `tokens` would hold for this episode; float32 values as stored there."""
    mask = np.array(episode.loss_mask, dtype=bool)
    logprobs = np.array(
        [0.0 if value is None else value for value in episode.sampling_logprobs], dtype=np.float32
    )
    return TrainedSequence(
        group=group,
        sample=sample,
        tokens=np.array(episode.tokens, dtype=np.int64),
        loss_mask=mask,
        sampling_logprobs=logprobs.astype(np.float64),
        advantages=np.where(mask, np.float32(advantage), 0.0).astype(np.float64),
    )


async def with_own_teacher(
    sequence: TrainedSequence, arm: ArmPlan, scorer: ServiceSampler
) -> TrainedSequence:
    """Give a sequence half its own probability as a teacher, where the arm's loss reads one.

    It is what a probe trains on before there is any teacher. The likeliest tokens, where the loss
    compares them, are those of the scorer.

    Raises:
        PermanentServiceError: if the service returns no top-K scores, and the loss needs them.
    """
    if not arm.reads_teacher:
        return sequence
    half = np.log(0.5)
    values = np.where(sequence.loss_mask, sequence.sampling_logprobs + half, np.nan)
    taught = replace(sequence, teacher_logprobs=values)
    if arm.top_k is None:
        return taught
    tokens, logprobs = await scorer.likeliest(sequence.tokens.tolist(), top_k=arm.top_k)
    await scorer.scores_of(sequence.tokens.tolist(), tokens)
    return replace(taught, support=Support(tokens, logprobs + half))
