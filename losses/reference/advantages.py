"""Float64 reference of the advantages, with exactly rounded sums."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from losses.reference.arrays import Floats, floats, trained


def group_mean(rewards: Sequence[float]) -> list[float]:
    """Return r - mean(r), exactly 0 for equal rewards."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def verl_group(rewards: Sequence[float], *, norm_by_std: bool, epsilon: float) -> list[float]:
    """Return verl's advantages of one group; a group of one keeps its reward."""
    if len(rewards) == 1:
        return [rewards[0] / (1.0 + epsilon if norm_by_std else 1.0)]
    centred = group_mean(rewards)
    if not norm_by_std:
        return centred
    spread = math.sqrt(math.fsum(c * c for c in centred) / (len(centred) - 1))
    return [0.0 if spread == 0.0 else c / (spread + epsilon) for c in centred]


def verl_outcome(
    token_rewards: ArrayLike,
    mask: ArrayLike,
    *,
    groups: Sequence[str],
    norm_by_std: bool,
    epsilon: float,
) -> Floats:
    """Return [B, T] advantages: sum the token rewards, centre within groups, spread on the mask."""
    totals = [math.fsum(row) for row in floats(token_rewards).tolist()]
    out = np.zeros(trained(mask).shape)
    for group in sorted(set(groups)):
        rows = [index for index, name in enumerate(groups) if name == group]
        values = verl_group([totals[r] for r in rows], norm_by_std=norm_by_std, epsilon=epsilon)
        for row, value in zip(rows, values, strict=True):
            out[row] = np.where(trained(mask)[row], value, 0.0)
    return out


def correction_weights(
    trainer: ArrayLike,
    sampling: ArrayLike,
    mask: ArrayLike,
    *,
    level: str,
    threshold: float,
    batch_normalize: bool,
) -> Floats:
    """Return [B, T] truncated importance weights between trainer and sampler.

    Raises:
        ValueError: if the level is unknown.
    """
    chosen = trained(mask)
    gap = np.where(chosen, floats(trainer), 0.0) - np.where(chosen, floats(sampling), 0.0)
    if level == "sequence":
        gap = np.broadcast_to(gap.sum(axis=1, keepdims=True), gap.shape)
    elif level != "token":
        message = f"level: {level!r}; expected 'token' or 'sequence'"
        raise ValueError(message)
    weights: Floats = np.minimum(np.exp(np.clip(gap, -20.0, 20.0)), threshold) * chosen
    if batch_normalize:
        lengths = chosen.sum(axis=1)
        rows = lengths > 0
        if level == "token":
            mean = weights.sum() / (lengths.sum() + 1e-8)
        else:
            mean = (weights.sum(axis=1)[rows] / (lengths[rows] + 1e-8)).mean() if rows.any() else 0
        weights = weights / (mean if mean > 1e-8 else 1.0)
    return weights
