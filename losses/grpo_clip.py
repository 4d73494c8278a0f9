"""GRPO's clipped surrogate, with an optional dual clip.

Shape legend: T targets of one sequence.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from losses.anchors import Anchor, anchor_logprobs
from losses.errors import LossConfigError
from losses.inputs import LossInputs, LossOutput, check_inputs, compute_dtype, on_mask, summed

PUBLISHED_LOG_RATIO_LIMIT_NATS = 20.0
"""Where verl's clipped loss stops following the log-ratio, on both sides."""


class ClipTerms(NamedTuple):
    """Unsummed terms of the clipped surrogate."""

    per_token_T: Tensor
    keep_T: Tensor
    ratio_T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoClip:
    """Settings of the clipped surrogate, and the token loss they define.

    Raises:
        LossConfigError: if the bounds do not satisfy 0 < low <= 1 <= high, the dual clip does not
            exceed 1 or the limit is not positive.
    """

    clip_low_threshold: float
    """Lower bound on the ratio itself, not an epsilon. In (0, 1]."""
    clip_high_threshold: float
    """Upper bound on the ratio itself. At least 1."""
    dual_clip: float | None
    """Largest ratio that a negative advantage is charged for; None for no dual clip."""
    anchor: Anchor = "sampling"
    """What the ratio is taken against."""
    log_ratio_limit_nats: float | None = None
    """Beyond it the log-ratio is clamped and the gradient is 0; None follows the formula."""

    def __post_init__(self) -> None:
        """Refuse bounds that no ratio can satisfy."""
        low, high = self.clip_low_threshold, self.clip_high_threshold
        if not 0.0 < low <= 1.0 <= high:
            message = (
                f"clip_low_threshold, clip_high_threshold: {low}, {high}; "
                "expected 0 < low <= 1 <= high (bounds on the ratio, not epsilons)"
            )
            raise LossConfigError(message)
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            message = f"dual_clip: {self.dual_clip}; expected a number > 1 or null"
            raise LossConfigError(message)
        if self.log_ratio_limit_nats is not None and not self.log_ratio_limit_nats > 0.0:
            message = f"log_ratio_limit_nats: {self.log_ratio_limit_nats}; expected > 0 or null"
            raise LossConfigError(message)

    def __call__(self, target_logprobs_T: Tensor, inputs: LossInputs) -> LossOutput:
        """Sum the loss over the trained tokens of one sequence."""
        return grpo_clip_loss(target_logprobs_T, inputs, settings=self)


def grpo_clip_loss(
    target_logprobs_T: Tensor, inputs: LossInputs, *, settings: GrpoClip
) -> LossOutput:
    """Sum the clipped-surrogate loss over the trained tokens of one sequence.

    With r = exp(target - anchor) and A the advantage, a trained token contributes
    ``-min(r * A, clamp(r, low, high) * A)``; with a dual clip c and A < 0 that term is not allowed
    above ``-A * c``. The gradient is ``-r * A`` unless a bound is active, where it is 0. A token is
    kept when no bound is active; one of zero advantage is always kept, since nothing is removed.

    The sum is not normalised: the caller divides by the denominator the spec registers, so that
    splitting a batch cannot change the gradient. The result depends on ``target_logprobs_T`` even
    when every token is masked, because the service refuses a tensor without a gradient.

    Args:
        target_logprobs_T: [T] nats; carries the gradient.
        inputs: sampling log-probabilities, advantages and mask; ``weights_T`` multiplies a term.
        settings: bounds, dual clip, anchor and limit.

    Returns:
        The sum in reward units and the tokens whose gradient survives.

    Raises:
        LossInputError: if a field does not fit or a trained token holds a non-finite number.

    Sources:
        Clipped surrogate: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
        Group-relative use: Shao et al. 2024, arXiv:2402.03300, eq. 3.
        Dual clip: Ye et al. 2019, arXiv:1912.09729, "Dual-clip PPO".
    """
    check_inputs(target_logprobs_T, inputs)
    terms = clip_terms(target_logprobs_T, inputs, settings=settings)
    return summed(
        terms.per_token_T,
        keep_T=terms.keep_T,
        ratio_T=terms.ratio_T,
        loss_mask_T=inputs.loss_mask_T,
    )


def clip_terms(target_logprobs_T: Tensor, inputs: LossInputs, *, settings: GrpoClip) -> ClipTerms:
    """Return the terms before the sum, without checking the inputs."""
    mask_T = inputs.loss_mask_T
    dtype = compute_dtype(target_logprobs_T)
    advantages_T = on_mask(inputs.advantages_T, mask_T, dtype=dtype)
    raw_T = on_mask(target_logprobs_T, mask_T, dtype=dtype) - on_mask(
        anchor_logprobs(inputs, settings.anchor), mask_T, dtype=dtype
    )
    with torch.no_grad():
        bounded_T, removed_T = bounded_terms(raw_T, advantages_T, settings=settings)
    # Only tokens that keep their gradient enter the exponential that is differentiated: an
    # overflowing ratio on a clipped token would turn its zero gradient into 0 * inf.
    follows_T = ~removed_T & (advantages_T != 0)
    live_T = -torch.exp(torch.where(follows_T, raw_T, torch.zeros_like(raw_T))) * advantages_T
    per_token_T = torch.where(follows_T, live_T, bounded_T)
    if inputs.weights_T is not None:
        per_token_T = per_token_T * on_mask(inputs.weights_T, mask_T, dtype=dtype)
    return ClipTerms(per_token_T, ~removed_T, limited_ratio(raw_T.detach(), settings=settings))


def limited_ratio(raw_T: Tensor, *, settings: GrpoClip) -> Tensor:
    """Return exp of the log-ratio, held within the limit if there is one."""
    limit = settings.log_ratio_limit_nats
    return torch.exp(raw_T if limit is None else raw_T.clamp(min=-limit, max=limit))


def bounded_terms(
    raw_T: Tensor, advantages_T: Tensor, *, settings: GrpoClip
) -> tuple[Tensor, Tensor]:
    """Return the value of every term with all bounds applied, and which terms a bound holds."""
    limit = settings.log_ratio_limit_nats
    ratio_T = limited_ratio(raw_T, settings=settings)
    plain_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(settings.clip_low_threshold, settings.clip_high_threshold)
    clipped_T = clipped_T * advantages_T
    removed_T = clipped_T > plain_T
    bounded_T = torch.where(removed_T, clipped_T, plain_T)
    if settings.dual_clip is not None:
        ceiling_T = -settings.dual_clip * advantages_T
        capped_T = (advantages_T < 0) & (bounded_T > ceiling_T)
        bounded_T = torch.where(capped_T, ceiling_T, bounded_T)
        removed_T = removed_T | capped_T
    if limit is not None:
        removed_T = removed_T | (raw_T.abs() > limit)
    zero_T = advantages_T == 0
    return torch.where(zero_T, torch.zeros_like(bounded_T), bounded_T), removed_T & ~zero_T
