"""One minibatch: every datum through a token loss, summed and divided once.

Shape legend: D datums (ragged), T targets of one datum, N targets of all datums joined.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from losses.errors import LossConfigError, LossInputError
from losses.inputs import LossInputs, LossOutput, TokenLoss, check_inputs

CustomLossFunction: TypeAlias = Callable[[Any, list[Tensor]], tuple[Tensor, dict[str, float]]]
"""What the service's SDK calls: (data, log-probabilities) to (loss, metrics)."""

OPTIONAL_FIELDS = (
    "anchor_logprobs_T",
    "weights_T",
    "divergence_T",
    "teacher_logprobs_T",
    "teacher_logprobs_TK",
)


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """The loss of one minibatch and the decisions behind it."""

    loss: Tensor
    """[] sum over all datums divided by the denominator; carries the gradient."""
    outputs_D: list[LossOutput]
    """Undivided output of each datum, detached."""
    loss_tokens: int
    empty: bool
    """True if no token of the minibatch is trained: the loss is 0 and so is the gradient."""


def batch_loss(
    loss: TokenLoss,
    target_logprobs_D: Sequence[Tensor],
    inputs_D: Sequence[LossInputs],
    *,
    denominator: float,
    dtype: torch.dtype = torch.float64,
) -> BatchLoss:
    """Sum a token loss over the datums of a minibatch and divide once.

    The datums are joined end to end, which a token loss cannot notice, so that a minibatch costs
    milliseconds. Arithmetic is float64 by default whatever the service returned: decisions then
    agree with the diagnostics and the reference to the last token. Every datum's log-probabilities
    get a gradient, zeros where all its tokens are masked, because the service refuses a datum
    without one.

    Args:
        loss: a loss without cross-token terms.
        target_logprobs_D: D tensors of [T] (or [T, K]) nats that require a gradient.
        inputs_D: D inputs of the same lengths; an optional field is given for all or for none.
        denominator: what the sum is divided by, as registered; finite and > 0.
        dtype: what to compute in.

    Returns:
        The loss, each datum's output and whether any token was trained.

    Raises:
        LossInputError: names the datum and the field that does not fit, or says that the loss is
            not finite.
        LossConfigError: if the denominator is not finite and positive.
    """
    if not (math.isfinite(denominator) and denominator > 0.0):
        message = f"denominator: {denominator}; expected a finite number > 0"
        raise LossConfigError(message)
    if len(target_logprobs_D) != len(inputs_D) or not inputs_D:
        message = (
            f"inputs_D: {len(inputs_D)} datums for {len(target_logprobs_D)} log-probability "
            "tensors; expected as many, and at least one"
        )
        raise LossInputError(message)
    joined = joined_loss(loss, target_logprobs_D, inputs_D, dtype=dtype)
    lengths = [int(target_T.shape[0]) for target_T in target_logprobs_D]
    return BatchLoss(
        loss=joined.loss / denominator,
        outputs_D=split_output(joined, lengths, inputs_D),
        loss_tokens=joined.loss_tokens,
        empty=joined.loss_tokens == 0,
    )


def joined_loss(
    loss: TokenLoss,
    target_logprobs_D: Sequence[Tensor],
    inputs_D: Sequence[LossInputs],
    *,
    dtype: torch.dtype,
) -> LossOutput:
    """Compute the loss of all datums joined end to end.

    Raises:
        LossInputError: names the datum and the field that does not fit, or says that the loss is
            not finite.
    """
    for index, (target_T, inputs) in enumerate(zip(target_logprobs_D, inputs_D, strict=True)):
        require_lengths(index, int(target_T.shape[0]), inputs)
    try:
        joined = loss(torch.cat([t.to(dtype) for t in target_logprobs_D]), join_inputs(inputs_D))
    except LossInputError:
        # The joined position says nothing to the caller: find the datum, or pass the error on.
        for index, (target_T, inputs) in enumerate(zip(target_logprobs_D, inputs_D, strict=True)):
            check_datum(index, target_T, inputs)
        raise
    if not math.isfinite(float(joined.loss.detach())):
        message = f"loss: {float(joined.loss.detach())}; expected a finite sum (a ratio overflowed)"
        raise LossInputError(message)
    return joined


def require_lengths(index: int, length: int, inputs: LossInputs) -> None:
    """Refuse a datum whose fields differ in length: joined end to end, they would shift the rest.

    Raises:
        LossInputError: names the datum, the field, its length and the expected one.
    """
    for name in ("sampling_logprobs_T", "advantages_T", "loss_mask_T", *OPTIONAL_FIELDS):
        value = getattr(inputs, name)
        if value is not None and int(value.shape[0]) != length:
            message = f"datum {index}: {name}: {int(value.shape[0])} tokens; expected {length}"
            raise LossInputError(message)


def check_datum(index: int, target_T: Tensor, inputs: LossInputs) -> None:
    """Check one datum and put its index in front of any complaint.

    Raises:
        LossInputError: names the datum and the field.
    """
    try:
        check_inputs(target_T, inputs, dims=target_T.dim())
    except LossInputError as error:
        message = f"datum {index}: {error}"
        raise LossInputError(message) from error


def join_inputs(inputs_D: Sequence[LossInputs]) -> LossInputs:
    """Join the inputs of several sequences end to end.

    Raises:
        LossInputError: if an optional field is given for some sequences only.
    """
    optional: dict[str, Tensor | None] = {}
    for name in OPTIONAL_FIELDS:
        values = [getattr(inputs, name) for inputs in inputs_D]
        given = [value for value in values if value is not None]
        if given and len(given) != len(values):
            missing = next(i for i, value in enumerate(values) if value is None)
            message = f"datum {missing}: {name}: None; expected a tensor, as in the other datums"
            raise LossInputError(message)
        optional[name] = torch.cat(given) if given else None
    return LossInputs(
        sampling_logprobs_T=torch.cat([inputs.sampling_logprobs_T for inputs in inputs_D]),
        advantages_T=torch.cat([inputs.advantages_T for inputs in inputs_D]),
        loss_mask_T=torch.cat([inputs.loss_mask_T for inputs in inputs_D]),
        **optional,
    )


def split_output(
    joined: LossOutput, lengths: Sequence[int], inputs_D: Sequence[LossInputs]
) -> list[LossOutput]:
    """Cut the joined output back into the datums, without gradient."""
    per_token_D = torch.split(joined.per_token_T.detach(), list(lengths))
    keep_D = torch.split(joined.keep_T, list(lengths))
    ratio_D = torch.split(joined.prob_ratio_T, list(lengths))
    return [
        LossOutput(
            loss=per_token_T.sum(),
            per_token_T=per_token_T,
            keep_T=keep_T,
            prob_ratio_T=ratio_T,
            loss_tokens=int(inputs.loss_mask_T.sum()),
        )
        for per_token_T, keep_T, ratio_T, inputs in zip(
            per_token_D, keep_D, ratio_D, inputs_D, strict=True
        )
    ]


@dataclass(slots=True)
class CustomLoss:
    """A minibatch's loss in the form that the service's SDK calls, keeping what it computed.

    The inputs stay on this side: only the log-probabilities cross, and their gradient goes back as
    cross-entropy weights.
    """

    loss: TokenLoss
    inputs_D: Sequence[LossInputs]
    denominator: float
    calls: list[BatchLoss] = field(default_factory=list)
    """What each call computed, in order."""

    def __call__(self, data: Any, logprobs_D: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Compute the loss of the minibatch from the log-probabilities the service returned."""
        result = batch_loss(self.loss, logprobs_D, self.inputs_D, denominator=self.denominator)
        self.calls.append(result)
        return result.loss, {}


def cross_entropy_weights(target_logprobs_D: Sequence[Tensor]) -> list[Tensor]:
    """Return -dL/dlogprob of each datum after ``backward``: what the SDK sends to the service.

    A service that sums ``-logprob * weight`` without any further normalisation then has the
    gradient of L.

    Raises:
        LossInputError: names the first datum that got no gradient.
    """
    weights_D = []
    for index, target_T in enumerate(target_logprobs_D):
        if target_T.grad is None:
            message = f"datum {index}: no gradient; expected one after backward, zeros if masked"
            raise LossInputError(message)
        weights_D.append(-target_T.grad)
    return weights_D
