"""Float64 reference of the policy losses: terms, analytic slopes and decisions.

Arrays may have any one shape. ``mask`` marks the trained tokens; nothing else is looked at.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from losses.reference.arrays import Bools, Floats, TokenTerms, floats, scattered_terms, trained


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskForm:
    """Which tokens DPPO drops, and the cap of its ratio."""

    divergence: str
    delta_low: float | None
    delta_high: float | None
    ratio_cap: float | None


def importance_sampling(
    current: ArrayLike, sampling: ArrayLike, advantages: ArrayLike, mask: ArrayLike
) -> TokenTerms:
    """Term ``-e^(current - sampling) * A``; the slope is the term itself."""
    chosen = trained(mask)
    adv = floats(advantages)[chosen]
    ratio = np.exp(floats(current)[chosen] - floats(sampling)[chosen])
    term = np.negative(adv * ratio)
    return scattered_terms(term, term, np.ones(term.shape, dtype=bool), mask=chosen)


def cispo(
    current: ArrayLike,
    sampling: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    low: float,
    high: float,
) -> TokenTerms:
    """Term ``-w * A * current`` with the constant w = clip(ratio, low, high); slope ``-w * A``."""
    chosen = trained(mask)
    lp = floats(current)[chosen]
    weight = np.minimum(np.maximum(np.exp(lp - floats(sampling)[chosen]), low), high)
    slope = np.negative(weight * floats(advantages)[chosen])
    return scattered_terms(slope * lp, slope, np.ones(lp.shape, dtype=bool), mask=chosen)


def clipped_surrogate(
    current: ArrayLike,
    anchor: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    low: float,
    high: float,
    dual_clip: float | None = None,
    log_ratio_limit: float | None = None,
) -> TokenTerms:
    """GRPO's clip by cases instead of by min and max.

    A > 0: above ``high`` the term is the constant ``-high * A``. A < 0: below ``low`` it is
    ``-low * A``, above ``dual_clip`` it is ``-dual_clip * A``. A = 0: the term is 0. Everywhere
    else it is ``-ratio * A`` with the same slope, except beyond the limit, where the slope is 0.
    """
    chosen = trained(mask)
    adv = floats(advantages)[chosen]
    log_ratio = floats(current)[chosen] - floats(anchor)[chosen]
    beyond = np.zeros(adv.shape, dtype=bool)
    if log_ratio_limit is not None:
        beyond = np.abs(log_ratio) > log_ratio_limit
        log_ratio = np.sign(log_ratio) * np.minimum(np.abs(log_ratio), log_ratio_limit)
    ratio = np.exp(log_ratio)
    charged = ratio.copy()
    held = np.zeros(adv.shape, dtype=bool)
    rising, falling = adv > 0, adv < 0
    for where, bound in ((rising & (ratio > high), high), (falling & (ratio < low), low)):
        charged[where] = bound
        held |= where
    if dual_clip is not None:
        steep = falling & (ratio > dual_clip)
        charged[steep] = dual_clip
        held |= steep
    held |= beyond & (adv != 0)
    term = np.zeros(adv.shape)
    moving = adv != 0
    term[moving] = -(charged[moving] * adv[moving])
    return scattered_terms(term, np.where(held, 0.0, term), ~held, mask=chosen)


def dppo(
    current: ArrayLike,
    sampling: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    form: MaskForm,
    anchor: ArrayLike | None = None,
    topk: ArrayLike | None = None,
) -> TokenTerms:
    """Term ``-A * r * keep * current`` with constant r and keep; slope ``-A * r * keep``.

    r = min(e^min(current - sampling, 20), cap). ``anchor`` (default: sampling) is what the mask
    compares with; ``topk`` holds the divergence of the top-K forms.
    """
    chosen = trained(mask)
    lp, mu = floats(current)[chosen], floats(sampling)[chosen]
    adv = floats(advantages)[chosen]
    reference = mu if anchor is None else floats(anchor)[chosen]
    beyond = beyond_delta(
        lp,
        reference,
        towards=np.where(adv > 0, 1.0, -1.0),
        form=form,
        topk=None if topk is None else floats(topk)[chosen],
    )
    ratio = np.exp(np.minimum(lp - mu, 20.0))
    if form.ratio_cap is not None:
        ratio = np.minimum(ratio, form.ratio_cap)
    slope = np.where(beyond, 0.0, -(adv * ratio))
    return scattered_terms(slope * lp, slope, ~beyond, mask=chosen)


def beyond_delta(
    lp: Floats,
    reference: Floats,
    *,
    towards: Floats,
    form: MaskForm,
    topk: Floats | None,
) -> Bools:
    """Whether each token moved past its delta in the direction +1 or -1 of ``towards``.

    Raises:
        ValueError: if the divergence is unknown.
    """
    divergence = form.divergence
    if divergence == "none":
        return np.zeros(lp.shape, dtype=bool)
    up = towards > 0
    high = np.inf if form.delta_high is None else form.delta_high
    low = np.inf if form.delta_low is None else form.delta_low
    p, q = np.exp(lp), np.exp(reference)
    moved_there = np.where(up, p > q, p < q)
    limit = np.where(up, high, low)
    if divergence == "binary_tv":
        return np.where(up, p - q, q - p) > limit
    if divergence == "binary_kl":
        likely, start = np.minimum(lp, 0.0), np.minimum(reference, 0.0)
        left, missed = 1.0 - np.exp(likely), 1.0 - np.exp(start)
        same = np.exp(start) * (start - likely)
        rest = missed * (np.log(missed + 1e-8) - np.log(left + 1e-8))
        beyond: Bools = moved_there & (same + rest > limit)
        return beyond
    if divergence in ("topk_tv", "topk_kl") and topk is not None:
        return moved_there & (topk > limit)
    if divergence.startswith("ratio"):
        return ratio_beyond(lp - reference, q, up=up, name=divergence, low=low, high=high)
    message = f"divergence: {divergence!r} (top-K values given: {topk is not None}); not known"
    raise ValueError(message)


def ratio_beyond(
    log_ratio: Floats, q: Floats, *, up: Bools, name: str, low: float, high: float
) -> Bools:
    """Whether the ratio left its interval on the side of ``up``, for the four ratio forms.

    Raises:
        ValueError: if the form is unknown.
    """
    ratio = np.exp(log_ratio)
    plain_up, plain_down = ratio > 1 + high, ratio < 1 - low
    likely_up = (ratio > 1 + 0.28) & (q >= high)
    likely_down = (ratio < 1 - 0.2) & (q >= low)
    table = {
        "ratio": (plain_up, plain_down),
        "ratio_ablation_positive": (likely_up, plain_down),
        "ratio_ablation_negative": (plain_up, likely_down),
        "ratio_ablation_both": (likely_up, likely_down),
    }
    if name not in table:
        message = f"divergence: {name!r}; expected one of {sorted(table)}"
        raise ValueError(message)
    rising, falling = table[name]
    chosen: Bools = np.where(up, rising, falling)
    return chosen


def topk_divergences(
    logits: ArrayLike, token_ids: ArrayLike, sampling_logprobs: ArrayLike
) -> tuple[Floats, Floats]:
    """Return (KL, TV) over the listed tokens and one rest bucket, by a sum over explicit buckets.

    ``logits`` is [..., V], the other two [..., K].
    """
    z = floats(logits)
    z = z - z.max(axis=-1, keepdims=True)
    current = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    listed = np.take_along_axis(current, np.asarray(token_ids, dtype=np.int64), axis=-1)
    p = with_rest_bucket(np.exp(listed))
    q = with_rest_bucket(np.exp(floats(sampling_logprobs)))
    kl = (q * (np.log(q) - np.log(p))).sum(axis=-1)
    return kl, 0.5 * np.abs(p - q).sum(axis=-1)


def with_rest_bucket(masses: Floats) -> Floats:
    """Append what is left of the mass, at least 1e-12."""
    rest = np.maximum(1.0 - masses.sum(axis=-1, keepdims=True), 1e-12)
    return np.concatenate([masses, rest], axis=-1)
