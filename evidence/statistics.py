"""Intervals and tests for paired, bounded differences, and how many items they need.

Notation: an *item contrast* is the weighted sum of the arms' values at one item (the difference of
two arms, say). With observations in [low, high] and weights w, contrasts lie in an interval of
length ``R = sum|w| * (high - low)``; n is the number of items, k the number of criteria judged
together, alpha the chance that any of their intervals misses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from math import ceil, log, sqrt
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evidence.errors import InputError

Floats = NDArray[np.float64]

_BISECTIONS = 40
"""Halvings that place an end of an interval: 2**-40 of the range."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval, in the unit of the observations."""

    lower: float
    upper: float

    @property
    def half_width(self) -> float:
        """Half the distance between the ends."""
        return (self.upper - self.lower) / 2


def hoeffding_half_width(value_range: float, *, n: int, k: int, alpha: float) -> float:
    """Return ``R * sqrt(ln(2k / alpha) / (2n))``, the frozen rule's half width.

    Valid for any distribution of n independent contrasts within a range of R, for all k criteria
    at once.

    Args:
        value_range: R, above 0.
        n: number of items, at least 1.
        k: number of criteria, at least 1.
        alpha: chance of any miss, between 0 and 1.

    Raises:
        InputError: if an argument is outside its range.

    Sources:
        Hoeffding 1963, theorem 2; Bonferroni over criteria.
    """
    _check(value_range=value_range, n=n, k=k, alpha=alpha)
    return value_range * sqrt(log(2 * k / alpha) / (2 * n))


def item_order(seed: int, item_ids: Sequence[str]) -> list[int]:
    """Return the order in which items are looked at by a method whose answer depends on it.

    Items are sorted by the SHA-256 of the JSON text ``[seed,item_id]`` (no spaces, ASCII), so that
    the order is fixed before any result is known and does not depend on how rows are stored.

    Returns:
        Positions in ``item_ids``, first to last.
    """
    head = f"[{seed},"
    keys = [
        hashlib.sha256(f"{head}{encode_basestring_ascii(item)}]".encode("ascii")).digest()
        for item in item_ids
    ]
    return sorted(range(len(keys)), key=keys.__getitem__)


def betting_interval(
    contrasts: ArrayLike,
    *,
    alpha: float,
    low: float,
    high: float,
    truncation: Literal["mean", "constant"] = "mean",
) -> Interval:
    """Return the hedged betting interval for the mean of bounded contrasts.

    With x the contrasts scaled to [0, 1], a gambler who does not believe that the mean is m stakes
    ``L_t = sqrt(2 ln(2/alpha) / (n V_{t-1}))`` on each side, V the running variance with one made-up
    observation of mean 1/2 and variance 1/4. His capitals
    ``prod(1 + L_t (x_t - m))`` and ``prod(1 - L_t (x_t - m))``, half each, exceed ``1/alpha`` at any
    time with probability at most alpha if m is the mean; the interval holds every m for which they
    did not. It is valid at every n, and also for someone who looks after every item.

    The bets look at the past alone, so the answer depends on the order of the contrasts: fix it
    beforehand (`item_order`).

    Args:
        contrasts: [n] one per item, in the order in which they are looked at.
        alpha: chance of a miss, both sides together.
        low: smallest possible contrast.
        high: largest possible contrast.
        truncation: ``mean`` caps the bet at ``0.9 / m`` (``0.9 / (1 - m)`` on the other side),
            ``constant`` at 1.

    Returns:
        The interval within [low, high]; all of it in the rare case that no m survives.

    Raises:
        InputError: if there is no contrast, or one is outside [low, high] or not finite.

    Sources:
        Waudby-Smith and Ramdas 2024, Estimating means of bounded random variables by betting,
        section 4 (hedged capital, predictable plug-in bets for a fixed n).
    """
    x = _unit_scaled(contrasts, alpha=alpha, low=low, high=high)
    bets = np.sqrt(2 * log(2 / alpha) / (x.size * _running_variance(x)))
    limit = log(2 / alpha)
    reach = 0.9 if truncation == "mean" else None

    def refutes(m: float, data: Floats) -> bool:
        """Whether the gambler who says "the mean of data is above m" gets rich."""
        cap = 1.0 if reach is None else (reach / m if m > 0 else np.inf)
        with np.errstate(divide="ignore"):
            capital = np.cumsum(np.log1p(np.minimum(bets, cap) * (data - m)))
        return bool(capital.max() > limit)

    lower = _largest(lambda m: refutes(m, x))
    upper = 1 - _largest(lambda m: refutes(m, 1 - x))
    if lower > upper:
        lower, upper = 0.0, 1.0
    return Interval(low + (high - low) * lower, low + (high - low) * upper)


def empirical_bernstein_interval(
    contrasts: ArrayLike, *, alpha: float, low: float, high: float
) -> Interval:
    """Return the predictable plug-in empirical Bernstein interval for the mean of contrasts.

    With bets L_t as in `betting_interval` for alpha/2, capped at 1/2, and x scaled to [0, 1]: the
    weighted mean ``sum(L x) / sum(L)``, plus and minus
    ``(ln(2/alpha) + sum((x_t - mean_{t-1})^2 (-ln(1 - L_t) - L_t))) / sum(L)``.

    Args:
        contrasts: [n] one per item, in an order fixed beforehand.
        alpha: chance of a miss, both sides together.
        low: smallest possible contrast.
        high: largest possible contrast.

    Raises:
        InputError: if there is no contrast, or one is outside [low, high] or not finite.

    Sources:
        Waudby-Smith and Ramdas 2024, theorem 2.
    """
    x = _unit_scaled(contrasts, alpha=alpha, low=low, high=high)
    lower = _bernstein_lower(x, alpha=alpha / 2)
    upper = 1 - _bernstein_lower(1 - x, alpha=alpha / 2)
    return Interval(
        low + (high - low) * max(lower, 0.0), low + (high - low) * min(max(upper, 0.0), 1.0)
    )


def clopper_pearson_discordant(gains: int, losses: int, *, n: int, alpha: float) -> Interval:
    """Return an exact interval for the difference of two paired 0/1 rates.

    Of n items, ``gains`` were right in the first arm alone and ``losses`` in the second alone. The
    two rates get a Clopper-Pearson interval each at ``1 - alpha/2``; the difference lies between the
    extremes of their differences.

    Raises:
        InputError: if the counts do not fit n.

    Sources:
        Clopper and Pearson 1934; Bonferroni over the two rates.
    """
    from scipy.special import betaincinv  # noqa: PLC0415 - 0.4 s that most commands never need

    if not (gains >= 0 and losses >= 0 and 0 < gains + losses + 1 <= n + 1):
        raise InputError("gains + losses", f"{gains} + {losses}", f"counts of at most {n} items")
    tail = alpha / 4

    def bounds(count: int) -> tuple[float, float]:
        lower = betaincinv(count, n - count + 1, tail) if count else 0.0
        upper = betaincinv(count + 1, n - count, 1 - tail) if count < n else 1.0
        return float(lower), float(upper)

    (gain_low, gain_high), (loss_low, loss_high) = bounds(gains), bounds(losses)
    return Interval(gain_low - loss_high, gain_high - loss_low)


def mcnemar_exact(gains: int, losses: int) -> float:
    """Return the two-sided p-value of "neither arm is better" for paired 0/1 outcomes.

    Under it each discordant item is a fair coin: ``min(1, 2 P(X <= min(gains, losses)))`` with X
    binomial of ``gains + losses`` throws.

    Sources:
        McNemar 1947, exact form.
    """
    from scipy.special import bdtr  # noqa: PLC0415 - 0.4 s that most commands never need

    discordant = gains + losses
    if discordant == 0:
        return 1.0
    return min(1.0, 2 * float(bdtr(min(gains, losses), discordant, 0.5)))


def items_to_settle(distance: float, *, value_range: float, k: int, alpha: float) -> int:
    """Return the n at which a contrast at ``distance`` from the margin just settles.

    ``R^2 ln(2k/alpha) / (2 D^2)``, rounded up: an observed effect at that distance is then on one
    side, which a true effect at that distance gives in about half of all runs.
    """
    _check(value_range=value_range, k=k, alpha=alpha, distance=distance)
    return ceil(value_range**2 * log(2 * k / alpha) / (2 * distance**2))


def items_for_power(
    distance: float, *, value_range: float, k: int, alpha: float, power: float = 0.8
) -> int:
    """Return the n that settles in a share ``power`` of runs whatever the distribution.

    ``R^2 / (2 D^2) * (sqrt(ln(2k/alpha)) + sqrt(ln(1/(1 - power))))^2``, rounded up.
    """
    _check(value_range=value_range, k=k, alpha=alpha, distance=distance, power=power)
    spread = sqrt(log(2 * k / alpha)) + sqrt(log(1 / (1 - power)))
    return ceil(value_range**2 / (2 * distance**2) * spread**2)


def items_for_power_at_deviation(
    distance: float,
    *,
    deviation: float,
    value_range: float,
    k: int,
    alpha: float,
    power: float = 0.8,
) -> int:
    """Return the n that settles in a share ``power`` of runs when contrasts have this deviation.

    ``((R sqrt(ln(2k/alpha) / 2) + z s) / D)^2`` with z the normal quantile of ``power`` and s the
    standard deviation of a contrast, rounded up.
    """
    _check(value_range=value_range, k=k, alpha=alpha, distance=distance, power=power)
    z = NormalDist().inv_cdf(power)
    reach = value_range * sqrt(log(2 * k / alpha) / 2) + z * deviation
    return ceil((reach / distance) ** 2)


def _check(**given: float) -> None:
    """Refuse planning arguments that have no meaning, by name."""
    for name, value in given.items():
        below_one = name in ("alpha", "power")
        least = 1 if name in ("n", "k") else 0
        good = value >= least if least else value > 0
        if not good or not value < (1 if below_one else float("inf")):
            expected = "between 0 and 1" if below_one else f"a finite number above {least and 0}"
            raise InputError(name, value, expected)


def _unit_scaled(contrasts: ArrayLike, *, alpha: float, low: float, high: float) -> Floats:
    """Scale contrasts from [low, high] to [0, 1]."""
    _check(alpha=alpha, value_range=high - low)
    x = np.asarray(contrasts, dtype=np.float64)
    if x.ndim != 1 or x.size == 0:
        raise InputError("contrasts", list(x.shape), "a list of at least one number")
    if not np.isfinite(x).all():
        raise InputError("contrasts", float(x[~np.isfinite(x)][0]), "finite numbers")
    scaled = (x - low) / (high - low)
    slack = 1e-9
    outside = (scaled < -slack) | (scaled > 1 + slack)
    if outside.any():
        raise InputError("contrasts", float(x[outside][0]), f"numbers from {low} to {high}")
    return np.clip(scaled, 0.0, 1.0)


def _running_variance(x: Floats) -> Floats:
    """Return the variance estimate that the bet at each position may know: that before it."""
    count = np.arange(1, x.size + 1)
    mean = (0.5 + np.cumsum(x)) / (count + 1)
    variance = (0.25 + np.cumsum((x - mean) ** 2)) / (count + 1)
    return np.concatenate(([0.25], variance[:-1]))


def _bernstein_lower(x: Floats, *, alpha: float) -> float:
    bets = np.minimum(np.sqrt(2 * log(1 / alpha) / (x.size * _running_variance(x))), 0.5)
    mean_before = np.concatenate(([0.0], (np.cumsum(x) / np.arange(1, x.size + 1))[:-1]))
    penalty = ((x - mean_before) ** 2 * (-np.log1p(-bets) - bets)).sum()
    return float(((bets * x).sum() - log(1 / alpha) - penalty) / bets.sum())


def _largest(refuted: Callable[[float], bool]) -> float:
    """Return the largest m in [0, 1] up to which every m is refuted, 0 where none is.

    The capital of the bet "the mean is above m" falls as m grows, so the refuted values are those
    below one number; the value returned is at most that number, so the interval errs to wide.
    """
    inside, outside = 0.0, 1.0
    if not refuted(0.0):
        return 0.0
    for _ in range(_BISECTIONS):
        middle = (inside + outside) / 2
        if refuted(middle):
            inside = middle
        else:
            outside = middle
    return inside
