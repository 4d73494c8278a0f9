"""What lies between a sampler and a trainer that hold the same weights: nothing, or which mistake.

The two score the same tokens before anything has been trained on them, so every difference has a
cause other than learning. Each cause leaves its own mark: a shift by one token makes the numbers
agree again when one side is moved; a tempered distribution stretches log-probabilities by 1/T;
bfloat16 leaves numbers whose lower half is empty; weights of another version do none of these.

Shape legend: N trained tokens, in sequence order.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from losses.diagnostics import quantile
from losses.token_arrays import Floats

SHIFTS = (-1, 0, 1)
BFLOAT16_EMPTY_BITS = 0x0000FFFF
"""Bits of a float32 that bfloat16 does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far two sides are apart on the same tokens."""

    tokens: int
    nats_q50: float
    nats_q90: float
    nats_max: float
    probability_q90: float
    probability_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The marks of every cause, measured on one set of tokens."""

    gap: Gap
    shift_nats: dict[str, float | None]
    """Mean |difference| on neighbouring pairs when the trainer's values are moved by -1, 0 or +1."""
    slope: float | None
    """Slope of the sampler's on the trainer's log-probabilities: 1 for equal ones, 1/T tempered."""
    bfloat16_sampling: float | None
    """Share of the sampler's non-zero values that bfloat16 can hold; about 2^-16 in float32."""
    bfloat16_trainer: float | None

    def to_record(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "tokens": self.gap.tokens,
            "nats_q50": self.gap.nats_q50,
            "nats_q90": self.gap.nats_q90,
            "nats_max": self.gap.nats_max,
            "probability_q90": self.gap.probability_q90,
            "probability_max": self.gap.probability_max,
            "shift_nats": dict(self.shift_nats),
            "slope": self.slope,
            "bfloat16_sampling": self.bfloat16_sampling,
            "bfloat16_trainer": self.bfloat16_trainer,
        }


def gap(first: ArrayLike, second: ArrayLike) -> Gap | None:
    """Compare log-probabilities of the same tokens; None where there is no token."""
    one, two = (np.asarray(values, dtype=np.float64) for values in (first, second))
    if one.size == 0:
        return None
    nats = np.abs(one - two)
    probabilities = np.abs(np.exp(one) - np.exp(two))
    return Gap(
        tokens=int(one.size),
        nats_q50=quantile(nats, 0.5),
        nats_q90=quantile(nats, 0.9),
        nats_max=float(nats.max()),
        probability_q90=quantile(probabilities, 0.9),
        probability_max=float(probabilities.max()),
    )


def mismatch(
    trainer_N: ArrayLike, sampling_N: ArrayLike, *, sequence_N: NDArray[np.int64]
) -> Mismatch | None:
    """Measure every mark on tokens that both sides scored with the same weights.

    Args:
        trainer_N: [N] nats.
        sampling_N: [N] nats, as returned with the samples.
        sequence_N: [N] which sequence each token belongs to; tokens of one are neighbours.

    Returns:
        The marks; None where there is no token.
    """
    trainer, sampling = (np.asarray(v, dtype=np.float64) for v in (trainer_N, sampling_N))
    found = gap(trainer, sampling)
    if found is None:
        return None
    return Mismatch(
        gap=found,
        shift_nats=shift_residuals(trainer, sampling, sequence_N),
        slope=slope_of(trainer, sampling),
        bfloat16_sampling=bfloat16_share(sampling),
        bfloat16_trainer=bfloat16_share(trainer),
    )


def shift_residuals(
    trainer_N: Floats, sampling_N: Floats, sequence_N: NDArray[np.int64]
) -> dict[str, float | None]:
    """Mean |trainer[i + shift] - sampling[i]| within sequences, for each shift; nats.

    A trainer that is late by one token agrees at +1: what belongs to token i stands at i + 1.
    """
    residuals: dict[str, float | None] = {}
    for shift in SHIFTS:
        moved = np.arange(trainer_N.size) + shift
        inside = (moved >= 0) & (moved < trainer_N.size)
        here = np.flatnonzero(inside)
        there = moved[inside]
        same = sequence_N[here] == sequence_N[there]
        differences = np.abs(trainer_N[there[same]] - sampling_N[here[same]])
        residuals[f"{shift:+d}"] = float(differences.mean()) if differences.size else None
    return residuals


def slope_of(trainer_N: Floats, sampling_N: Floats) -> float | None:
    """Least-squares slope of sampling on trainer log-probabilities; None without any spread."""
    centred = trainer_N - trainer_N.mean()
    spread = float(centred @ centred)
    if spread <= 1e-12 * max(1, trainer_N.size):
        return None
    return float(centred @ (sampling_N - sampling_N.mean())) / spread


def bfloat16_share(values_N: Floats) -> float | None:
    """Share of the non-zero values whose float32 form has an empty lower half."""
    narrow = np.asarray(values_N, dtype=np.float32)
    nonzero = narrow[narrow != 0]
    if nonzero.size == 0:
        return None
    bits = nonzero.view(np.uint32) & BFLOAT16_EMPTY_BITS
    return float(np.count_nonzero(bits == 0) / nonzero.size)
