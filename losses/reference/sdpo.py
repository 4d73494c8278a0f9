"""Float64 reference of SDPO: token level, logit level with analytic slopes, and its advantages."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from losses.reference.arrays import Floats, TokenTerms, floats, scattered_terms, trained


def importance_weight(student: ArrayLike, old: ArrayLike, *, is_clip: float | None) -> Floats:
    """Return min(e^(student - old), clip) with the exponent held within 20 nats; ones for None."""
    s, o = floats(student), floats(old)
    if is_clip is None:
        return np.ones(s.shape)
    return np.minimum(np.exp(np.clip(s - o, -20.0, 20.0)), is_clip)


def token_level(
    student: ArrayLike, teacher: ArrayLike, mask: ArrayLike, *, weights: ArrayLike
) -> TokenTerms:
    """Term ``w * (s - t) * s`` with constant w and (s - t); slope ``w * (s - t)``."""
    chosen = trained(mask)
    s, t = floats(student)[chosen], floats(teacher)[chosen]
    slope = floats(weights)[chosen] * (s - t)
    return scattered_terms(slope * s, slope, np.ones(s.shape, dtype=bool), mask=chosen)


def logit_level(
    student: ArrayLike,
    teacher: ArrayLike,
    mask: ArrayLike,
    *,
    alpha: float,
    support: str,
    weights: ArrayLike,
) -> tuple[Floats, Floats]:
    """Return the [B, T] divergences and their [B, T, K] slopes in the student's inputs.

    The slope is found on the closed or normalised support and pulled back through how that support
    is built from the K inputs.

    Raises:
        ValueError: if the support is unknown.
    """
    chosen = trained(mask)
    raw_s, raw_t = floats(student)[chosen], floats(teacher)[chosen]
    s, t = on_support(raw_s, support), on_support(raw_t, support)
    value, slope = divergence_and_slope(s, t, alpha=alpha)
    scale = floats(weights)[chosen]
    terms = np.zeros(chosen.shape)
    slopes = np.zeros(floats(student).shape)
    terms[chosen] = scale * value
    slopes[chosen] = scale[:, None] * pulled_back(slope, raw_s, support)
    return terms, slopes


def on_support(logprobs: Floats, support: str) -> Floats:
    """Return the log-probabilities that are compared.

    Raises:
        ValueError: if the support is unknown.
    """
    if support == "full":
        return logprobs
    mass = np.exp(logprobs).sum(axis=-1, keepdims=True)
    if support == "topk_renormalised":
        normalised: Floats = logprobs - np.log(mass)
        return normalised
    if support == "topk_tail":
        return np.concatenate([logprobs, np.log(1.0 - np.exp(capped_log(mass)))], axis=-1)
    message = f"support: {support!r}; not known"
    raise ValueError(message)


def capped_log(mass: Floats) -> Floats:
    """Return the log of the mass, at most -1e-7."""
    capped: Floats = np.minimum(np.log(mass), -1e-7)
    return capped


def divergence_and_slope(s: Floats, t: Floats, *, alpha: float) -> tuple[Floats, Floats]:
    """Return the divergence over the last axis and its slope in every entry of ``s``.

    alpha 0: sum e^t (t - s), slope -e^t. alpha 1: sum e^s (s - t), slope e^s (s - t + 1). Between,
    with M = (1-a) e^s + a e^t and m = log M: (1-a) sum e^s (s - m) + a sum e^t (t - m); m moves
    with s by (1-a) e^s / M, whose two contributions cancel the +1 of the product rule.
    """
    student, teacher = np.exp(s), np.exp(t)
    if alpha == 0.0:
        return (teacher * (t - s)).sum(axis=-1), -teacher
    if alpha == 1.0:
        return (student * (s - t)).sum(axis=-1), student * (s - t + 1.0)
    mixture = (1.0 - alpha) * student + alpha * teacher
    m = np.log(mixture)
    value = (1.0 - alpha) * (student * (s - m)).sum(axis=-1)
    value = value + alpha * (teacher * (t - m)).sum(axis=-1)
    return value, (1.0 - alpha) * student * (s - m)


def pulled_back(slope: Floats, raw: Floats, support: str) -> Floats:
    """Chain the slope on the support through to the K inputs."""
    if support == "full":
        return slope
    mass = np.exp(raw).sum(axis=-1, keepdims=True)
    if support == "topk_renormalised":
        shared: Floats = slope - slope.sum(axis=-1, keepdims=True) * np.exp(raw) / mass
        return shared
    inner, tail = slope[..., :-1], slope[..., -1:]
    open_rows = np.log(mass) <= -1e-7
    rest = np.where(open_rows, 1.0 - mass, 1.0)
    moves = np.where(open_rows, -np.exp(raw) / rest, 0.0)
    return inner + tail * moves


def aligned_advantages(
    teacher: Sequence[float | None],
    sampling: Sequence[float],
    mask: Sequence[bool],
    *,
    student_prefix: int,
    teacher_prefix: int,
    clip: float | None,
    zero_nats: bool,
) -> list[float]:
    """Return the advantage of every token after the first, one token at a time.

    ``teacher`` has an entry per token of the teacher's sequence, ``sampling`` and ``mask`` one per
    token of the student's. A missing value gives 0, or with ``zero_nats`` counts as log 1.
    """
    out = []
    for token in range(1, len(mask)):
        place = token - student_prefix + teacher_prefix
        asked = token >= student_prefix and place < len(teacher)
        value = teacher[place] if asked else None
        if asked and value is None and zero_nats:
            value = 0.0
        if not mask[token] or value is None:
            out.append(0.0)
            continue
        gap = value - sampling[token]
        out.append(gap if clip is None else max(-clip, min(clip, gap)))
    return out


def moving_average(teacher: ArrayLike, student: ArrayLike, *, rate: float) -> Floats:
    """Return the teacher moved by ``rate`` of the way to the student."""
    moved: Floats = floats(teacher) + rate * (floats(student) - floats(teacher))
    return moved
