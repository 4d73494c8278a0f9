"""Plumbing of the reference: plain float64 arrays of the trained tokens, and back.

The reference shares no code with the torch losses. It compresses to the trained tokens, works on
those alone, and scatters the results into zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Undivided terms of one loss, their slopes and decisions; zeros and False off the mask."""

    term: Floats
    slope: Floats
    """d term / d current log-probability, from the formula, not by differentiation."""
    keep: Bools


def floats(values: ArrayLike) -> Floats:
    """Return the values as a float64 array."""
    return np.asarray(values, dtype=np.float64)


def trained(mask: ArrayLike) -> Bools:
    """Return the mask as booleans; any non-zero number counts as trained."""
    return np.asarray(mask).astype(np.float64).astype(np.bool_)


def scatter(values: NDArray[np.generic], mask: Bools) -> Floats:
    """Put the values of the trained tokens back where they belong, zeros elsewhere."""
    out = np.zeros(mask.shape, dtype=np.float64)
    out[mask] = values
    return out


def scattered_terms(term: Floats, slope: Floats, keep: Bools, *, mask: Bools) -> TokenTerms:
    """Scatter the three results of the trained tokens."""
    return TokenTerms(scatter(term, mask), scatter(slope, mask), scatter(keep, mask) != 0)


def central_difference(
    function: Callable[[Floats], float], point: ArrayLike, *, step: float = 1e-6
) -> Floats:
    """Differentiate a scalar function numerically, entry by entry: a check on the slopes."""
    base = floats(point)
    slope = np.zeros_like(base)
    for index in np.ndindex(base.shape):
        above, below = base.copy(), base.copy()
        above[index] += step
        below[index] -= step
        slope[index] = (function(above) - function(below)) / (2.0 * step)
    return slope
