"""Logit-level SDPO: a divergence between student and teacher over a support of tokens.

Shape legend: T targets of one sequence, K support tokens (the whole vocabulary, or the student's
top K).
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from losses.anchors import Anchor, anchor_logprobs
from losses.errors import LossConfigError
from losses.inputs import (
    LossInputs,
    LossOutput,
    check_inputs,
    compute_dtype,
    on_mask,
    require_field,
    require_finite,
    require_shape,
    summed,
)
from losses.sdpo_token_level import importance_weight

Support: TypeAlias = Literal["full", "topk_tail", "topk_renormalised"]
"""``full``: K is the vocabulary. ``topk_tail``: a bucket holds the rest of each side's mass.
``topk_renormalised``: each side is normalised over the K tokens."""

SUPPORTS: tuple[Support, ...] = get_args(Support)
LOG_MASS_CEILING = -1e-7
"""Highest log-mass of the K tokens for which a tail is taken, so that its log stays finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpoLogit:
    """Settings of logit-level SDPO, and the token loss they define.

    Raises:
        LossConfigError: names the field, its value and what is allowed.
    """

    alpha: float
    """0: KL(teacher || student). 1: KL(student || teacher). Between: generalised Jensen-Shannon."""
    support: Support
    """What the K log-probabilities are."""
    is_clip: float | None = None
    """Cap of the importance weight exp(student - anchor) of the sampled token; None for none. With
    it the target has one more column, the sampled token, which gets no gradient."""
    anchor: Anchor = "sampling"
    """What the importance weight is taken against."""

    def __post_init__(self) -> None:
        """Refuse an alpha that is no mixture weight, and an unknown support."""
        if not 0.0 <= self.alpha <= 1.0:
            message = f"alpha: {self.alpha}; expected a number in [0, 1]"
            raise LossConfigError(message)
        if self.support not in SUPPORTS:
            message = f"support: {self.support!r}; expected one of {list(SUPPORTS)}"
            raise LossConfigError(message)
        if self.is_clip is not None and not self.is_clip > 0.0:
            message = f"is_clip: {self.is_clip}; expected a number > 0 or null"
            raise LossConfigError(message)

    def __call__(self, target_logprobs_T: Tensor, inputs: LossInputs) -> LossOutput:
        """Sum the loss over the trained positions of one sequence; the target is [T, K]."""
        return sdpo_logit_loss(target_logprobs_T, inputs, settings=self)


def sdpo_logit_loss(
    student_logprobs_TK: Tensor, inputs: LossInputs, *, settings: SdpoLogit
) -> LossOutput:
    """Sum the distillation divergence over the trained positions of one sequence.

    Both sides are given on the same K tokens, the student's choice. The two end points of alpha are
    the plain KL divergences, not limits of the Jensen-Shannon form, which tends to 0 there. The
    capped importance weight of the sampled token and ``weights_T`` multiply a position's term; the
    rewards' advantages are not used.

    Args:
        student_logprobs_TK: [T, K] nats; carries the gradient. [T, K + 1] with ``is_clip``, the
            last column being the sampled token.
        inputs: ``teacher_logprobs_TK`` ([T, K]) and the mask; the anchor with ``is_clip``.
        settings: alpha, support and importance weight.

    Returns:
        The sum in nats; ``keep_T`` equals the mask.

    Raises:
        LossInputError: if a field is missing or does not fit.

    Sources:
        arXiv:2601.20802, logit-level variant, and its released code.
    """
    teacher_TK = require_field(
        "teacher_logprobs_TK", inputs.teacher_logprobs_TK, purpose="needed by logit-level SDPO"
    )
    columns = teacher_TK.shape[1] + (settings.is_clip is not None)
    require_shape("target_logprobs", student_logprobs_TK, (teacher_TK.shape[0], columns))
    check_inputs(student_logprobs_TK, inputs, dims=2)
    require_finite("teacher_logprobs_TK", teacher_TK, inputs.loss_mask_T)
    mask_T = inputs.loss_mask_T
    dtype = compute_dtype(student_logprobs_TK)
    # Off the mask both sides are one uniform distribution, whose divergence and slope are finite.
    uniform = -math.log(teacher_TK.shape[1] + 1)
    student_TK = on_mask(student_logprobs_TK, mask_T, dtype=dtype, fill=uniform)
    ratio_T = torch.ones_like(student_TK[:, 0]).detach()
    if settings.is_clip is not None:
        anchor_T = on_mask(anchor_logprobs(inputs, settings.anchor), mask_T, dtype=dtype)
        sampled_T, student_TK = student_TK[:, -1], student_TK[:, :-1]
        ratio_T = importance_weight(sampled_T, anchor_T, is_clip=settings.is_clip)
    per_token_T = ratio_T * divergence(
        student_TK, on_mask(teacher_TK, mask_T, dtype=dtype, fill=uniform), settings=settings
    )
    if inputs.weights_T is not None:
        per_token_T = per_token_T * on_mask(inputs.weights_T, mask_T, dtype=dtype)
    return summed(per_token_T, keep_T=mask_T, ratio_T=ratio_T, loss_mask_T=mask_T)


def divergence(student_TK: Tensor, teacher_TK: Tensor, *, settings: SdpoLogit) -> Tensor:
    """Return the [T] divergence of each position after closing or normalising the support."""
    if settings.support == "topk_tail":
        student_TK, teacher_TK = with_tail(student_TK), with_tail(teacher_TK)
    elif settings.support == "topk_renormalised":
        student_TK = student_TK - torch.logsumexp(student_TK, dim=-1, keepdim=True)
        teacher_TK = teacher_TK - torch.logsumexp(teacher_TK, dim=-1, keepdim=True)
    if settings.alpha == 0.0:
        return kl(teacher_TK, student_TK)
    if settings.alpha == 1.0:
        return kl(student_TK, teacher_TK)
    alpha = torch.tensor(settings.alpha, dtype=student_TK.dtype)
    mixture_TK = torch.logaddexp(student_TK + torch.log(1 - alpha), teacher_TK + torch.log(alpha))
    return (1 - alpha) * kl(student_TK, mixture_TK) + alpha * kl(teacher_TK, mixture_TK)


def kl(first_TK: Tensor, second_TK: Tensor) -> Tensor:
    """Return KL(first || second) over the last axis, from log-probabilities."""
    return (torch.exp(first_TK) * (first_TK - second_TK)).sum(-1)


def with_tail(logprobs_TK: Tensor) -> Tensor:
    """Append the log of the mass outside the K tokens: [T, K] to [T, K + 1]."""
    log_mass_T1 = torch.logsumexp(logprobs_TK, dim=-1, keepdim=True).clamp(max=LOG_MASS_CEILING)
    return torch.cat([logprobs_TK, torch.log(-torch.expm1(log_mass_T1))], dim=-1)
