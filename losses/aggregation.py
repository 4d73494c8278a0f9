"""From per-token terms to one number, with the denominator named by the caller.

Shape legend: D sequences (ragged), T tokens of one sequence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from losses.errors import LossConfigError, LossInputError
from losses.inputs import require_shape

Aggregation: TypeAlias = Literal[
    "sum",
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
"""How terms become one number; each divides by the denominator that its name says."""

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
LENGTH_EPSILON = 1e-8
"""Added to a sequence's token count in ``seq-mean-token-mean``, as published."""
DENOMINATOR_KINDS = ("none", "loss_tokens", "constant", "sequences")


@dataclass(frozen=True, slots=True)
class Aggregated:
    """One aggregated loss and whether there was anything to aggregate."""

    loss: Tensor
    """[]; exactly 0, with a gradient, when no token is trained."""
    loss_tokens: int
    empty: bool
    """True if no token is trained: the 0 means "nothing", not "balanced"."""


def aggregate(
    per_token_D: Sequence[Tensor],
    loss_mask_D: Sequence[Tensor],
    *,
    mode: Aggregation,
    denominator: float,
) -> Aggregated:
    """Aggregate per-token terms.

    | mode | value |
    |---|---|
    | ``sum`` | sum of all trained terms; the denominator must be 1 |
    | ``token-mean`` | sum / denominator (tokens) |
    | ``seq-mean-token-sum`` | sum / denominator (sequences with a trained token) |
    | ``seq-mean-token-mean`` | sum over sequences of (their sum / (n + 1e-8)), / denominator |
    | ``seq-mean-token-sum-norm`` | sum / denominator (a constant, e.g. the longest response) |

    The caller names the denominator, since only it knows whether the count is that of this
    minibatch, of the rollout batch or of all workers: a mean over this call's own tokens would make
    the gradient depend on how a batch was split.

    Args:
        per_token_D: D tensors of [T] terms; whatever stands off the mask is ignored.
        loss_mask_D: D tensors of [T] bool.
        mode: see the table.
        denominator: what is divided by; finite and > 0.

    Returns:
        The loss, the count of trained tokens and whether that count is 0.

    Raises:
        LossConfigError: if the mode is unknown or the denominator is not finite and positive.
        LossInputError: if shapes differ.
    """
    require_denominator(mode, denominator)
    if len(per_token_D) != len(loss_mask_D):
        message = f"loss_mask_D: {len(loss_mask_D)} entries; expected {len(per_token_D)}"
        raise LossInputError(message)
    total = torch.zeros((), dtype=per_token_D[0].dtype if per_token_D else torch.float64)
    tokens = 0
    for terms_T, mask_T in zip(per_token_D, loss_mask_D, strict=True):
        require_shape("loss_mask_D", mask_T, tuple(terms_T.shape))
        count = int(mask_T.sum())
        sequence_sum = torch.where(mask_T, terms_T, torch.zeros_like(terms_T)).sum()
        if mode == "seq-mean-token-mean":
            sequence_sum = sequence_sum / (count + LENGTH_EPSILON)
        total = total + sequence_sum
        tokens += count
    return Aggregated(total / denominator, tokens, tokens == 0)


def require_denominator(mode: str, denominator: float) -> None:
    """Refuse an unknown mode and a denominator that cannot divide.

    Raises:
        LossConfigError: names the field, its value and what is allowed.
    """
    if mode not in AGGREGATIONS:
        message = f"mode: {mode!r}; expected one of {list(AGGREGATIONS)}"
        raise LossConfigError(message)
    if not (math.isfinite(denominator) and denominator > 0.0):
        message = f"denominator: {denominator}; expected a finite number > 0"
        raise LossConfigError(message)
    if mode == "sum" and denominator != 1.0:
        message = f'denominator: {denominator}; expected 1 for mode "sum", which does not divide'
        raise LossConfigError(message)


def local_denominator(mode: Aggregation, loss_mask_D: Sequence[Tensor], *, width: int) -> float:
    """Count this batch's own denominator; 1 where it holds no trained token.

    Args:
        mode: an aggregation.
        loss_mask_D: D tensors of [T] bool.
        width: padded length, the published default of ``seq-mean-token-sum-norm``.

    Raises:
        LossConfigError: if the mode is unknown.
    """
    require_denominator(mode, 1.0)
    counts = [int(mask_T.sum()) for mask_T in loss_mask_D]
    if mode == "sum":
        return 1.0
    if mode == "seq-mean-token-sum-norm":
        return float(width)
    if mode == "token-mean":
        return float(max(sum(counts), 1))
    return float(max(sum(count > 0 for count in counts), 1))


def denominator_value(config: Mapping[str, Any], *, loss_tokens: int, sequences: int) -> float:
    """Return what a summed loss is divided by, as the execution file registers it.

    ``none`` is 1 (the service's own sum), ``loss_tokens`` and ``sequences`` are the counts that the
    caller passes (of everything in one optimizer step, so that splitting it changes nothing) and
    ``constant`` is the registered ``value``. A count of 0 gives 1: the sum is 0 then.

    Raises:
        LossConfigError: names the field, its value and what is allowed.
    """
    kind = config.get("kind")
    if kind not in DENOMINATOR_KINDS:
        message = f"denominator.kind: {kind!r}; expected one of {list(DENOMINATOR_KINDS)}"
        raise LossConfigError(message)
    if kind == "none":
        return 1.0
    if kind == "loss_tokens":
        return float(max(loss_tokens, 1))
    if kind == "sequences":
        return float(max(sequences, 1))
    value = config.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float):
        message = f"denominator.value: {value!r}; expected a finite number > 0"
        raise LossConfigError(message)
    require_denominator("token-mean", float(value))
    return float(value)
