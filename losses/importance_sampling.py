"""The importance-sampling policy gradient: no clip, no mask, no cap.

Shape legend: T targets of one sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from losses.inputs import LossInputs, LossOutput, check_inputs, compute_dtype, on_mask, summed


def importance_sampling_loss(target_logprobs_T: Tensor, inputs: LossInputs) -> LossOutput:
    """Sum ``-exp(target - sampling) * A`` over the trained tokens of one sequence.

    The gradient of a token is ``-exp(target - sampling) * A``, however far the policy has moved.
    A masked token contributes exactly 0 whatever its inputs hold. The sum is not normalised: the
    caller divides by the denominator that the spec registers.

    Args:
        target_logprobs_T: [T] nats; carries the gradient.
        inputs: sampling log-probabilities, advantages and mask; ``weights_T`` multiplies a term.

    Returns:
        The sum in reward units; ``keep_T`` equals the mask.

    Raises:
        LossInputError: if a field does not fit or a trained token holds a non-finite number.

    Sources:
        Tinker's built-in loss of the same name.
    """
    check_inputs(target_logprobs_T, inputs)
    dtype = compute_dtype(target_logprobs_T)
    mask_T = inputs.loss_mask_T
    log_ratio_T = on_mask(target_logprobs_T, mask_T, dtype=dtype) - on_mask(
        inputs.sampling_logprobs_T, mask_T, dtype=dtype
    )
    advantages_T = on_mask(inputs.advantages_T, mask_T, dtype=dtype)
    # A zero advantage gives exactly 0, also where the ratio overflows: 0 * inf would be NaN.
    followed_T = torch.where(advantages_T != 0, log_ratio_T, torch.zeros_like(log_ratio_T))
    per_token_T = -torch.exp(followed_T) * advantages_T
    if inputs.weights_T is not None:
        per_token_T = per_token_T * on_mask(inputs.weights_T, mask_T, dtype=dtype)
    return summed(
        per_token_T, keep_T=mask_T, ratio_T=torch.exp(log_ratio_T.detach()), loss_mask_T=mask_T
    )


@dataclass(frozen=True, slots=True)
class ImportanceSampling:
    """``importance_sampling_loss`` as a configured token loss; it has no settings."""

    def __call__(self, target_logprobs_T: Tensor, inputs: LossInputs) -> LossOutput:
        """Sum the loss over the trained tokens of one sequence."""
        return importance_sampling_loss(target_logprobs_T, inputs)
