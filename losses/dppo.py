"""DPPO: a detached, capped ratio on every token whose divergence is still acceptable.

Shape legend: T targets of one sequence.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from losses.anchors import anchor_logprobs
from losses.dppo_rule import DppoRule, drift, keep_mask
from losses.errors import LossConfigError, LossInputError
from losses.inputs import LossInputs, LossOutput, check_inputs, compute_dtype, on_mask, summed

LOG_RATIO_LIMIT_NATS = 20.0
"""Upper limit of the log-ratio inside the exponential; there is none on the way down."""


class DppoTerms(NamedTuple):
    """Unsummed terms of DPPO."""

    per_token_T: Tensor
    keep_T: Tensor
    ratio_T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Dppo:
    """Settings of DPPO, and the token loss they define.

    Raises:
        LossConfigError: if the cap is not positive.
    """

    rule: DppoRule
    """Which tokens are dropped."""
    ratio_cap: float | None
    """Largest ratio a token's term is weighted with (C); None for no cap."""

    def __post_init__(self) -> None:
        """Refuse a cap that would reverse or silence the loss."""
        if self.ratio_cap is not None and not self.ratio_cap > 0.0:
            message = f"ratio_cap: {self.ratio_cap}; expected a number > 0 or null"
            raise LossConfigError(message)

    def __call__(self, target_logprobs_T: Tensor, inputs: LossInputs) -> LossOutput:
        """Sum the loss over the trained tokens of one sequence."""
        return dppo_loss(target_logprobs_T, inputs, settings=self)


def dppo_loss(target_logprobs_T: Tensor, inputs: LossInputs, *, settings: Dppo) -> LossOutput:
    """Sum DPPO's masked policy-gradient loss over the trained tokens of one sequence.

    With r = min(exp(min(target - sampling, 20)), cap) and keep as the rule decides, both without
    gradient, a trained token contributes ``-A * r * keep * target``; its gradient is
    ``-A * r * keep``. The ratio is always taken against the sampling log-probabilities; the anchor
    moves the mask alone. Above the cap the gradient stays ``cap * A``, it does not vanish.

    The sum is not normalised: the caller divides by the denominator that the spec registers.

    Args:
        target_logprobs_T: [T] nats; carries the gradient.
        inputs: sampling log-probabilities, advantages and mask. Rollout-correction weights are
            refused, since the ratio already is that correction.
        settings: rule and cap.

    Returns:
        The sum in reward units times nats, and the keep mask.

    Raises:
        LossInputError: if a field does not fit or a trained token holds a non-finite number.

    Sources:
        arXiv:2602.04879, eq. 12, and its released code.
    """
    check_inputs(target_logprobs_T, inputs)
    if inputs.weights_T is not None:
        message = "weights_T: given; expected None, since DPPO's own ratio corrects the rollout"
        raise LossInputError(message)
    terms = dppo_terms(target_logprobs_T, inputs, settings=settings)
    return summed(
        terms.per_token_T,
        keep_T=terms.keep_T,
        ratio_T=terms.ratio_T,
        loss_mask_T=inputs.loss_mask_T,
    )


def dppo_terms(target_logprobs_T: Tensor, inputs: LossInputs, *, settings: Dppo) -> DppoTerms:
    """Return the terms before the sum, without checking the inputs."""
    mask_T = inputs.loss_mask_T
    dtype = compute_dtype(target_logprobs_T)
    target_T = on_mask(target_logprobs_T, mask_T, dtype=dtype)
    advantages_T = on_mask(inputs.advantages_T, mask_T, dtype=dtype)
    current_T = target_T.detach()
    moved = drift(
        settings.rule,
        current_logprobs_T=current_T,
        anchor_logprobs_T=on_mask(
            anchor_logprobs(inputs, settings.rule.anchor), mask_T, dtype=dtype
        ),
        divergence_T=None
        if inputs.divergence_T is None
        else on_mask(inputs.divergence_T, mask_T, dtype=dtype),
    )
    keep_T = keep_mask(moved, advantages_T)
    log_ratio_T = current_T - on_mask(inputs.sampling_logprobs_T, mask_T, dtype=dtype)
    ratio_T = torch.exp(log_ratio_T.clamp(max=LOG_RATIO_LIMIT_NATS))
    if settings.ratio_cap is not None:
        ratio_T = ratio_T.clamp(max=settings.ratio_cap)
    per_token_T = -advantages_T * ratio_T * keep_T * target_T
    return DppoTerms(per_token_T, keep_T, ratio_T)
