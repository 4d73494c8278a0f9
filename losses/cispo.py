"""CISPO: the clipped ratio as a constant weight on the log-probability.

Shape legend: T targets of one sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from losses.errors import LossConfigError
from losses.inputs import LossInputs, LossOutput, check_inputs, compute_dtype, on_mask, summed


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo:
    """Settings of CISPO, and the token loss they define.

    Raises:
        LossConfigError: if the bounds do not satisfy 0 <= low <= 1 <= high.
    """

    clip_low_threshold: float
    """Lower bound on the ratio itself; 0 for none."""
    clip_high_threshold: float
    """Upper bound on the ratio itself. At least 1."""

    def __post_init__(self) -> None:
        """Refuse bounds that no ratio can satisfy."""
        low, high = self.clip_low_threshold, self.clip_high_threshold
        if not 0.0 <= low <= 1.0 <= high:
            message = (
                f"clip_low_threshold, clip_high_threshold: {low}, {high}; "
                "expected 0 <= low <= 1 <= high"
            )
            raise LossConfigError(message)

    def __call__(self, target_logprobs_T: Tensor, inputs: LossInputs) -> LossOutput:
        """Sum the loss over the trained tokens of one sequence."""
        return cispo_loss(target_logprobs_T, inputs, settings=self)


def cispo_loss(target_logprobs_T: Tensor, inputs: LossInputs, *, settings: Cispo) -> LossOutput:
    """Sum ``-A * sg[clamp(exp(target - sampling), low, high)] * target`` over trained tokens.

    No token loses its gradient: it is ``-A`` times the clamped ratio everywhere, so ``keep_T``
    equals the mask. The sum is not normalised.

    Args:
        target_logprobs_T: [T] nats; carries the gradient.
        inputs: sampling log-probabilities, advantages and mask; ``weights_T`` multiplies a term.
        settings: bounds on the ratio.

    Returns:
        The sum in reward units times nats.

    Raises:
        LossInputError: if a field does not fit or a trained token holds a non-finite number.

    Sources:
        MiniMax 2025, arXiv:2506.13585; Tinker's built-in loss of the same name.
    """
    check_inputs(target_logprobs_T, inputs)
    mask_T = inputs.loss_mask_T
    dtype = compute_dtype(target_logprobs_T)
    target_T = on_mask(target_logprobs_T, mask_T, dtype=dtype)
    log_ratio_T = target_T - on_mask(inputs.sampling_logprobs_T, mask_T, dtype=dtype)
    ratio_T = torch.exp(log_ratio_T.detach())
    weight_T = ratio_T.clamp(settings.clip_low_threshold, settings.clip_high_threshold)
    per_token_T = -weight_T * on_mask(inputs.advantages_T, mask_T, dtype=dtype) * target_T
    if inputs.weights_T is not None:
        per_token_T = per_token_T * on_mask(inputs.weights_T, mask_T, dtype=dtype)
    return summed(per_token_T, keep_T=mask_T, ratio_T=weight_T, loss_mask_T=mask_T)
