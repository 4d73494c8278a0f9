"""Three figures that verl-based trainers log, by their own definitions.

They are kept apart from the project's diagnostics because their denominators differ: a count plus
1e-8, and for the mask forms only tokens with an advantage.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

EPSILON = 1e-8
LOG_RATIO_LIMIT_NATS = 20.0


class PublishedMetrics(NamedTuple):
    """``pg_clipfrac``, ``pg_clipfrac_lower`` and ``ppo_kl`` as a verl trainer prints them."""

    pg_clipfrac: float
    pg_clipfrac_lower: float
    ppo_kl: float


def masked_mean(values: NDArray[np.generic], chosen: Bools) -> float:
    """Return verl's mean over the chosen entries: sum / (count + 1e-8)."""
    total = float(values[chosen].astype(np.float64).sum())
    return total / (int(np.count_nonzero(chosen)) + EPSILON)


def mask_form_metrics(
    *,
    target_logprobs: ArrayLike,
    sampling_logprobs: ArrayLike,
    advantages: ArrayLike,
    loss_mask: ArrayLike,
    keep: ArrayLike,
) -> PublishedMetrics:
    """Return the figures of a masked policy loss (DPPO and its relatives).

    Clip fractions are over tokens with a non-zero advantage; the log-ratio is limited upwards only.
    """
    chosen = np.asarray(loss_mask).astype(np.bool_)
    adv = np.asarray(advantages, dtype=np.float64)
    dropped = ~np.asarray(keep).astype(np.bool_)
    counted = chosen & (adv != 0)
    log_ratio = log_ratios(target_logprobs, sampling_logprobs, chosen)
    return PublishedMetrics(
        masked_mean(dropped, counted),
        masked_mean(dropped & (adv < 0), counted),
        masked_mean(-np.minimum(log_ratio, LOG_RATIO_LIMIT_NATS), chosen),
    )


def clip_form_metrics(
    *,
    target_logprobs: ArrayLike,
    anchor_logprobs: ArrayLike,
    advantages: ArrayLike,
    loss_mask: ArrayLike,
    bounds: tuple[float, float],
    dual_clip: float,
) -> PublishedMetrics:
    """Return the figures of the clipped surrogate; all trained tokens are in the denominator."""
    chosen = np.asarray(loss_mask).astype(np.bool_)
    adv = np.where(chosen, np.asarray(advantages, dtype=np.float64), 0.0)
    limit = LOG_RATIO_LIMIT_NATS
    log_ratio = np.clip(log_ratios(target_logprobs, anchor_logprobs, chosen), -limit, limit)
    ratio = np.exp(log_ratio)
    plain, clipped = -adv * ratio, -adv * np.clip(ratio, *bounds)
    return PublishedMetrics(
        masked_mean(clipped > plain, chosen),
        masked_mean((np.maximum(plain, clipped) > -adv * dual_clip) & (adv < 0), chosen),
        masked_mean(-log_ratio, chosen),
    )


def log_ratios(first: ArrayLike, second: ArrayLike, chosen: Bools) -> Floats:
    """Return first - second on the chosen entries and 0 elsewhere."""
    out = np.zeros(chosen.shape)
    out[chosen] = (
        np.asarray(first, dtype=np.float64)[chosen] - np.asarray(second, dtype=np.float64)[chosen]
    )
    return out
