"""An episode as a sequence to train on, without the detour through a table."""

from __future__ import annotations

import numpy as np

from envs.protocols import Episode
from tasks.datums import TrainedSequence


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
