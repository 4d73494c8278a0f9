"""Token-level SDPO: the sampled token alone, weighted by how far student and teacher differ.

Shape legend: T targets of one sequence.
"""

from dataclasses import dataclass

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
    summed,
)

LOG_RATIO_LIMIT_NATS = 20.0
"""Limit of the log-ratio inside the importance weight, on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpoTokenLevel:
    """Settings of token-level SDPO, and the token loss they define.

    Raises:
        LossConfigError: if the ratio cap is not positive.
    """

    is_clip: float | None
    """Cap of the importance weight exp(student - anchor); None for no importance weight."""
    anchor: Anchor = "sampling"
    """What the importance weight is taken against."""

    def __post_init__(self) -> None:
        """Refuse a cap that would reverse or silence the loss."""
        if self.is_clip is not None and not self.is_clip > 0.0:
            message = f"is_clip: {self.is_clip}; expected a number > 0 or null"
            raise LossConfigError(message)

    def __call__(self, target_logprobs_T: Tensor, inputs: LossInputs) -> LossOutput:
        """Sum the loss over the trained tokens of one sequence."""
        return sdpo_token_level_loss(target_logprobs_T, inputs, settings=self)


def importance_weight(
    student_logprobs_T: Tensor, anchor_logprobs_T: Tensor, *, is_clip: float | None
) -> Tensor:
    """Return min(exp(clamp(student - anchor, -20, 20)), is_clip) without gradient; 1 for None."""
    if is_clip is None:
        return torch.ones_like(student_logprobs_T.detach())
    log_ratio_T = (student_logprobs_T - anchor_logprobs_T).detach()
    limit = LOG_RATIO_LIMIT_NATS
    return torch.exp(log_ratio_T.clamp(min=-limit, max=limit)).clamp(max=is_clip)


def sdpo_token_level_loss(
    target_logprobs_T: Tensor, inputs: LossInputs, *, settings: SdpoTokenLevel
) -> LossOutput:
    """Sum token-level self-distillation over the trained tokens of one sequence.

    With s the current student and t the teacher, a trained token contributes
    ``sg[s - t] * s * w``; its gradient is ``(s - t) * w``, which is a policy gradient with
    advantage ``t - s``. ``w`` is the capped importance weight times ``weights_T``. The rewards'
    advantages are not used. A sequence without a teacher signal is left out by its mask.

    Args:
        target_logprobs_T: [T] nats, the student; carries the gradient.
        inputs: teacher log-probabilities and mask; the anchor if there is an importance weight.
        settings: cap and anchor of the importance weight.

    Returns:
        The sum in nats squared; ``keep_T`` equals the mask.

    Raises:
        LossInputError: if a field is missing or does not fit.

    Sources:
        arXiv:2601.20802, token-level variant, and its released code.
    """
    check_inputs(target_logprobs_T, inputs)
    mask_T = inputs.loss_mask_T
    dtype = compute_dtype(target_logprobs_T)
    teacher_T = on_mask(
        require_field(
            "teacher_logprobs_T", inputs.teacher_logprobs_T, purpose="needed by token-level SDPO"
        ),
        mask_T,
        dtype=dtype,
    )
    student_T = on_mask(target_logprobs_T, mask_T, dtype=dtype)
    anchor_T = on_mask(anchor_logprobs(inputs, settings.anchor), mask_T, dtype=dtype)
    ratio_T = importance_weight(student_T, anchor_T, is_clip=settings.is_clip)
    per_token_T = (student_T - teacher_T).detach() * student_T * ratio_T
    if inputs.weights_T is not None:
        per_token_T = per_token_T * on_mask(inputs.weights_T, mask_T, dtype=dtype)
    return summed(per_token_T, keep_T=mask_T, ratio_T=ratio_T, loss_mask_T=mask_T)
