"""What a token loss is given and what it returns.

Shape legend: T targets of one sequence (or of several joined end to end), K support tokens.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from losses.errors import LossInputError

REDUCED_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Everything a token loss needs besides the current log-probabilities. Never modified."""

    sampling_logprobs_T: Tensor
    """[T] nats; as returned with the sample, never refreshed."""
    advantages_T: Tensor
    """[T] advantage of each target token, in reward units (or nats for SDPO)."""
    loss_mask_T: Tensor
    """[T] bool; True where the policy sampled the token and it is trained."""
    anchor_logprobs_T: Tensor | None = None
    """[T] nats; the sampling weights recomputed by the trainer, for ``anchor="recompute"``."""
    weights_T: Tensor | None = None
    """[T] rollout-correction weights; a constant factor on each token's term."""
    divergence_T: Tensor | None = None
    """[T] top-K divergence of each position, for the top-K forms of DPPO."""
    teacher_logprobs_T: Tensor | None = None
    """[T] nats; the same tokens under the feedback-conditioned prompt, for token-level SDPO."""
    teacher_logprobs_TK: Tensor | None = None
    """[T, K] nats; the teacher on the student's support, for logit-level SDPO."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The summed loss of one sequence and what was decided for each of its tokens."""

    loss: Tensor
    """[] sum of ``per_token_T``; exactly 0, with a gradient, when no token is trained."""
    per_token_T: Tensor
    """[T] term of each token; exactly 0 off the mask."""
    keep_T: Tensor
    """[T] bool; False off the mask and where the loss removes the token's gradient."""
    prob_ratio_T: Tensor
    """[T] what the term was weighted with: exp(target - anchor) after any cap, without gradient.
    1 off the mask and where the loss uses no ratio."""
    loss_tokens: int
    """Tokens under the mask; 0 states that this loss is empty rather than balanced."""


class TokenLoss(Protocol):
    """A loss that treats every token by itself, so that sequences can be joined or split."""

    def __call__(self, target_logprobs_T: Tensor, inputs: LossInputs) -> LossOutput:
        """Sum the loss over the trained tokens of one sequence."""
        ...


def require_shape(name: str, value: Tensor, expected: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape.

    Raises:
        LossInputError: names the field, its shape and the expected one.
    """
    if tuple(value.shape) != expected:
        message = f"{name}: shape {tuple(value.shape)}; expected {expected}"
        raise LossInputError(message)


def require_field(name: str, value: Tensor | None, *, purpose: str) -> Tensor:
    """Return an optional field that this loss cannot do without.

    Raises:
        LossInputError: if the field is None.
    """
    if value is None:
        message = f"{name}: None; expected a tensor, {purpose}"
        raise LossInputError(message)
    return value


def require_finite(name: str, value: Tensor, loss_mask_T: Tensor) -> None:
    """Refuse NaN or an infinity on a trained token; off the mask anything goes.

    Raises:
        LossInputError: names the field, how many trained tokens are bad, the first position and
            its value.
    """
    bad = loss_mask_T & ~torch.isfinite(value if value.dim() == 1 else value.sum(-1))
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        message = (
            f"{name}: {value[first].tolist()} on trained token {first} "
            f"({int(bad.sum())} such tokens); expected finite numbers wherever loss_mask is True"
        )
        raise LossInputError(message)


def check_inputs(target_logprobs_T: Tensor, inputs: LossInputs, *, dims: int = 1) -> None:
    """Check shapes, the mask's type and finiteness under the mask, before any arithmetic.

    Args:
        target_logprobs_T: [T] nats, or [T, K] with ``dims`` 2.
        inputs: the rest.
        dims: axes that the target must have.

    Raises:
        LossInputError: on the first field that does not fit.
    """
    if target_logprobs_T.dim() != dims:
        message = f"target_logprobs: shape {tuple(target_logprobs_T.shape)}; expected " + (
            "[T]" if dims == 1 else "[T, K]"
        )
        raise LossInputError(message)
    shape = (int(target_logprobs_T.shape[0]),)
    require_shape("loss_mask_T", inputs.loss_mask_T, shape)
    if inputs.loss_mask_T.dtype != torch.bool:
        message = f"loss_mask_T: dtype {inputs.loss_mask_T.dtype}; expected torch.bool"
        raise LossInputError(message)
    require_finite("target_logprobs_T", target_logprobs_T, inputs.loss_mask_T)
    for name in (
        "sampling_logprobs_T",
        "advantages_T",
        "anchor_logprobs_T",
        "weights_T",
        "divergence_T",
        "teacher_logprobs_T",
    ):
        value = getattr(inputs, name)
        if value is not None:
            require_shape(name, value, shape)
            require_finite(name, value, inputs.loss_mask_T)


def compute_dtype(target_logprobs: Tensor) -> torch.dtype:
    """Return the dtype a loss works in: the target's own, but float32 for half precision."""
    if target_logprobs.dtype in REDUCED_DTYPES:
        return torch.float32
    return target_logprobs.dtype


def on_mask(value: Tensor, loss_mask_T: Tensor, *, dtype: torch.dtype, fill: float = 0.0) -> Tensor:
    """Copy ``value`` in ``dtype`` with ``fill`` off the mask.

    Selection comes before any product or exponential: 0 times NaN is NaN, also in the gradient.
    """
    mask = loss_mask_T if value.dim() == 1 else loss_mask_T.unsqueeze(-1)
    value = value.to(dtype)
    return torch.where(mask, value, torch.full_like(value, fill))


def summed(
    per_token_T: Tensor, *, keep_T: Tensor, ratio_T: Tensor, loss_mask_T: Tensor
) -> LossOutput:
    """Zero the terms off the mask, sum them and pack the result."""
    terms_T = torch.where(loss_mask_T, per_token_T, torch.zeros_like(per_token_T))
    return LossOutput(
        loss=terms_T.sum(),
        per_token_T=terms_T,
        keep_T=keep_T & loss_mask_T,
        prob_ratio_T=ratio_T.detach(),
        loss_tokens=int(loss_mask_T.sum()),
    )
