"""Float64 reference of the aggregations: one weight per sequence, applied to terms and slopes."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from losses.reference.arrays import Floats, floats, trained


class LossAndGradient(NamedTuple):
    """An aggregated loss and its gradient."""

    loss: float
    gradient: Floats


def sequence_weights(mask: ArrayLike, *, mode: str, denominator: float) -> Floats:
    """Return what each row's sum of terms is multiplied with.

    Raises:
        ValueError: if the mode is unknown.
    """
    lengths = trained(mask).sum(axis=1).astype(np.float64)
    if mode == "seq-mean-token-mean":
        shares: Floats = (lengths > 0) / (lengths + 1e-8) / denominator
        return shares
    if mode in ("sum", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        return np.full(lengths.shape, 1.0 / denominator)
    message = f"mode: {mode!r}; not known"
    raise ValueError(message)


def aggregate(
    term: ArrayLike, slope: ArrayLike, mask: ArrayLike, *, mode: str, denominator: float
) -> LossAndGradient:
    """Aggregate [B, T] terms and their [B, T, ...] slopes; both are zero off the mask."""
    weights = sequence_weights(mask, mode=mode, denominator=denominator)
    terms, slopes = floats(term), floats(slope)
    loss = float(sum(float(w) * float(row.sum()) for w, row in zip(weights, terms, strict=True)))
    expanded = weights.reshape((-1,) + (1,) * (slopes.ndim - 1))
    return LossAndGradient(loss, expanded * slopes)
