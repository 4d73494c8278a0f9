"""The trained tokens of one or more updates as flat float64 arrays.

Shape legend: D datums (ragged), T targets of one datum, N trained tokens of all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from losses.errors import LossInputError
from losses.inputs import LossInputs, LossOutput

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenArrays:
    """What a diagnostic reads: trained tokens alone, in float64, in one order for all fields.

    Raises:
        LossInputError: if lengths differ or a number is not finite.
    """

    target_logprobs_N: Floats
    """Nats, under the policy *before* the update."""
    sampling_logprobs_N: Floats
    """Nats, as returned with the sample."""
    advantages_N: Floats
    keep_N: Bools
    """The loss's own decision; never derived again."""
    anchor_logprobs_N: Floats | None = None
    """Nats; what the mask compared with, where that is not the sampling value."""
    divergence_N: Floats | None = None
    """Top-K divergence, for the top-K forms."""

    def __post_init__(self) -> None:
        """Refuse arrays that do not fit together."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is None:
                continue
            if value.shape != self.target_logprobs_N.shape:
                message = (
                    f"{entry.name}: shape {value.shape}; expected {self.target_logprobs_N.shape}"
                )
                raise LossInputError(message)
            if value.dtype != np.bool_ and not bool(np.isfinite(value).all()):
                first = int(np.flatnonzero(~np.isfinite(value))[0])
                message = f"{entry.name}: {value[first]} on trained token {first}; expected finite"
                raise LossInputError(message)

    def __len__(self) -> int:
        """Return the number of trained tokens."""
        return int(self.target_logprobs_N.shape[0])


def token_arrays(
    *,
    target_logprobs: ArrayLike,
    sampling_logprobs: ArrayLike,
    advantages: ArrayLike,
    loss_mask: ArrayLike,
    keep: ArrayLike,
    anchor_logprobs: ArrayLike | None = None,
    divergence: ArrayLike | None = None,
) -> TokenArrays:
    """Keep the trained tokens of equally shaped arrays, flattened.

    Args:
        target_logprobs: nats, any shape.
        sampling_logprobs: nats, the same shape.
        advantages: the same shape.
        loss_mask: non-zero where a token is trained.
        keep: non-zero where the loss kept the token's gradient.
        anchor_logprobs: nats, where the mask was anchored elsewhere.
        divergence: top-K divergence of each position.

    Raises:
        LossInputError: if shapes differ or a trained token holds a non-finite number.
    """
    chosen = np.asarray(loss_mask).astype(np.bool_)

    def compress(name: str, values: ArrayLike) -> Floats:
        array = np.asarray(values, dtype=np.float64)
        if array.shape != chosen.shape:
            message = f"{name}: shape {array.shape}; expected {chosen.shape}, as the loss mask"
            raise LossInputError(message)
        return array[chosen]

    return TokenArrays(
        target_logprobs_N=compress("target_logprobs", target_logprobs),
        sampling_logprobs_N=compress("sampling_logprobs", sampling_logprobs),
        advantages_N=compress("advantages", advantages),
        keep_N=compress("keep", keep).astype(np.bool_),
        anchor_logprobs_N=None
        if anchor_logprobs is None
        else compress("anchor_logprobs", anchor_logprobs),
        divergence_N=None if divergence is None else compress("divergence", divergence),
    )


def joined(tensors: Sequence[Tensor]) -> NDArray[np.generic]:
    """Return the tensors end to end as one array."""
    parts = [tensor.detach().cpu().numpy() for tensor in tensors]
    return np.concatenate(parts) if parts else np.zeros(0)


def minibatch_tokens(
    target_logprobs_D: Sequence[Tensor],
    inputs_D: Sequence[LossInputs],
    outputs_D: Sequence[LossOutput],
) -> TokenArrays:
    """Return the trained tokens of one minibatch, in datum order.

    Args:
        target_logprobs_D: D tensors of [T] nats, as the service returned them.
        inputs_D: what the loss was given.
        outputs_D: what it decided.

    Raises:
        LossInputError: if lengths differ or a trained token holds a non-finite number.
    """
    anchors = [i.anchor_logprobs_T for i in inputs_D if i.anchor_logprobs_T is not None]
    topk = [i.divergence_T for i in inputs_D if i.divergence_T is not None]
    return token_arrays(
        target_logprobs=joined(target_logprobs_D),
        sampling_logprobs=joined([i.sampling_logprobs_T for i in inputs_D]),
        advantages=joined([i.advantages_T for i in inputs_D]),
        loss_mask=joined([i.loss_mask_T for i in inputs_D]),
        keep=joined([output.keep_T for output in outputs_D]),
        anchor_logprobs=joined(anchors) if anchors else None,
        divergence=joined(topk) if topk else None,
    )


def concatenate(parts: Sequence[TokenArrays]) -> TokenArrays:
    """Join the tokens of several updates in order; an optional field must be in all or in none.

    Raises:
        LossInputError: if an optional field is in some parts only.
    """
    merged: dict[str, NDArray[np.generic] | None] = {}
    for entry in fields(TokenArrays):
        values = [getattr(part, entry.name) for part in parts]
        given = [value for value in values if value is not None]
        if given and len(given) != len(values):
            message = f"{entry.name}: given for {len(given)} of {len(values)} updates; expected all"
            raise LossInputError(message)
        if given:
            merged[entry.name] = np.concatenate(given)
        elif entry.name == "keep_N":
            merged[entry.name] = np.zeros(0, dtype=np.bool_)
        else:
            merged[entry.name] = np.zeros(0) if entry.name in REQUIRED else None
    return TokenArrays(**merged)  # type: ignore[arg-type]


REQUIRED = ("target_logprobs_N", "sampling_logprobs_N", "advantages_N")
