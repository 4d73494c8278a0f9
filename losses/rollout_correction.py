"""Truncated importance weights for the gap between the sampler and the trainer.

Shape legend: D sequences (ragged), T targets of one sequence.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from losses.errors import LossConfigError, LossInputError
from losses.inputs import compute_dtype, on_mask, require_finite, require_shape

CorrectionLevel: TypeAlias = Literal["token", "sequence"]
"""A weight for every token, or the product of its token ratios for a whole sequence."""

LEVELS: tuple[CorrectionLevel, ...] = get_args(CorrectionLevel)
LOG_WEIGHT_LIMIT_NATS = 20.0
MEAN_FLOOR = 1e-8
"""Added to the count of a mean, and least mean that weights are divided by, as published."""


def rollout_correction_weights(
    trainer_logprobs_D: Sequence[Tensor],
    sampling_logprobs_D: Sequence[Tensor],
    loss_mask_D: Sequence[Tensor],
    *,
    level: CorrectionLevel,
    threshold: float,
    batch_normalize: bool,
) -> list[Tensor]:
    """Return min(exp(clamp(trainer - sampler, -20, 20)), threshold), 0 off the mask.

    The trainer's log-probabilities are those it recomputed for the *sampling* weights, so that the
    weight corrects the numerics of two engines and not the policy's drift. Weights carry no
    gradient. At sequence level the log-ratios of the trained tokens are summed first.

    Args:
        trainer_logprobs_D: D tensors of [T] nats.
        sampling_logprobs_D: D tensors of [T] nats.
        loss_mask_D: D tensors of [T] bool.
        level: per token or per sequence.
        threshold: largest weight; > 0.
        batch_normalize: divide by the mean weight over tokens (or over sequences).

    Returns:
        D tensors of [T] weights.

    Raises:
        LossConfigError: if the level is unknown or the threshold not positive.
        LossInputError: if shapes differ or a trained token holds a non-finite number.

    Sources:
        Truncated importance sampling as in verl's rollout correction.
    """
    if level not in LEVELS:
        message = f"level: {level!r}; expected one of {list(LEVELS)}"
        raise LossConfigError(message)
    if not threshold > 0.0:
        message = f"threshold: {threshold}; expected a number > 0"
        raise LossConfigError(message)
    if not len(trainer_logprobs_D) == len(sampling_logprobs_D) == len(loss_mask_D):
        message = (
            f"sampling_logprobs_D, loss_mask_D: {len(sampling_logprobs_D)}, {len(loss_mask_D)} "
            f"entries; expected {len(trainer_logprobs_D)}"
        )
        raise LossInputError(message)
    weights_D = [
        sequence_weights(trainer_T, sampling_T, mask_T, level=level).clamp(max=threshold)
        for trainer_T, sampling_T, mask_T in zip(
            trainer_logprobs_D, sampling_logprobs_D, loss_mask_D, strict=True
        )
    ]
    if batch_normalize:
        mean = mean_weight(weights_D, loss_mask_D, level=level)
        weights_D = [weights_T / mean for weights_T in weights_D]
    return weights_D


@torch.no_grad()
def sequence_weights(
    trainer_T: Tensor, sampling_T: Tensor, mask_T: Tensor, *, level: CorrectionLevel
) -> Tensor:
    """Return the untruncated weights of one sequence, 0 off the mask."""
    require_shape("sampling_logprobs", sampling_T, tuple(trainer_T.shape))
    require_shape("loss_mask", mask_T, tuple(trainer_T.shape))
    require_finite("trainer_logprobs", trainer_T, mask_T)
    require_finite("sampling_logprobs", sampling_T, mask_T)
    dtype = compute_dtype(trainer_T)
    log_ratio_T = on_mask(trainer_T, mask_T, dtype=dtype) - on_mask(sampling_T, mask_T, dtype=dtype)
    if level == "sequence":
        log_ratio_T = log_ratio_T.sum().expand_as(log_ratio_T)
    limit = LOG_WEIGHT_LIMIT_NATS
    weights_T = torch.exp(log_ratio_T.clamp(min=-limit, max=limit))
    return torch.where(mask_T, weights_T, torch.zeros_like(weights_T))


def mean_weight(
    weights_D: Sequence[Tensor], loss_mask_D: Sequence[Tensor], *, level: CorrectionLevel
) -> float:
    """Return the mean weight over trained tokens, or over sequences; 1 where it is about 0."""
    counts = [int(mask_T.sum()) for mask_T in loss_mask_D]
    sums = [float(weights_T.sum()) for weights_T in weights_D]
    if level == "token":
        mean = sum(sums) / (sum(counts) + MEAN_FLOOR)
    else:
        means = [s / (n + MEAN_FLOOR) for s, n in zip(sums, counts, strict=True) if n > 0]
        mean = sum(means) / max(len(means), MEAN_FLOOR)
    return mean if mean > MEAN_FLOOR else 1.0
