"""What an update did, token by token, as counts with their denominators.

All arithmetic is float64 on the client. Counts are exact; fractions are plain float64 divisions of
two counts, so that 96 of 84496 prints as the record has it. Quantiles interpolate linearly between
order statistics (``QUANTILE_METHOD``).

Shape legend: N trained tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike

from losses.dppo import Dppo
from losses.dppo_rule import TOPK_DIVERGENCES, DppoRule, drift
from losses.errors import LossConfigError, LossInputError
from losses.grpo_clip import GrpoClip
from losses.inputs import LossInputs, LossOutput
from losses.registry import make_loss
from losses.token_arrays import Bools, Floats, TokenArrays, concatenate, minibatch_tokens

QuantileMethod: TypeAlias = Literal[
    "linear", "lower", "higher", "nearest", "midpoint", "inverted_cdf"
]
DiagnosticRecord: TypeAlias = dict[str, int | float | None]

QUANTILE_METHOD: QuantileMethod = "linear"
VERL_EPSILON = 1e-8
"""verl adds it to the count under a mean."""
LOG_RATIO_LIMIT_NATS = 20.0
PROBABILITY_BIN_EDGES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
"""Bins of the sampling probability: lower edge inclusive, upper exclusive, the last inclusive."""
BINS = len(PROBABILITY_BIN_EDGES) - 1
BIN_COUNTS = ("tokens", "masked", "exceed", "ppo")


class Fraction(NamedTuple):
    """A fraction column: two count columns, and what is added to the denominator."""

    numerator: str
    denominator: str
    epsilon: float = 0.0


COUNTS: dict[str, str] = {
    "loss_tokens": "trained tokens",
    "nonzero_advantage_tokens": "trained tokens with A != 0",
    "positive_advantage_tokens": "trained tokens with A > 0",
    "negative_advantage_tokens": "trained tokens with A < 0",
    "masked_tokens": "A != 0 and gradient removed by the loss",
    "removed_positive": "A > 0 and gradient removed",
    "removed_negative": "A < 0 and gradient removed",
    "keep_zero_tokens": "not kept, A = 0 included",
    "keep_zero_advantage_zero_tokens": "not kept and A = 0",
    "exceed": "beyond delta in either direction, whatever A",
    "exceed_dropped": "beyond delta, A != 0, in the advantage's direction: what the rule drops",
    "exceed_dropped_positive": "beyond delta, A > 0, upwards: what the rule drops",
    "exceed_dropped_negative": "beyond delta, A < 0, downwards: what the rule drops",
    "exceed_restoring": "beyond delta, A != 0, coming back",
    "exceed_zero_advantage": "beyond delta and A = 0",
    "ppo_counterfactual_tokens": "PPO's ratio clip would remove it: definition (a), A != 0",
    "ppo_counterfactual_with_zero_advantage_tokens": "the same with A = 0 counted as A < 0: (c)",
    "ppo_two_sided_tokens": "ratio outside the bounds on either side, whatever A: (b)",
    "cap_hits": "ratio above the cap",
    "nonfinite_tokens": "trained tokens with a number that is not finite: 0, since they are refused",
    "cap_hits_kept": "ratio above the cap, A != 0 and kept: the cap changed a gradient",
    **{
        f"prob_bin_{index}_{name}": f"{name} with sampling probability in bin {index}"
        for index in range(BINS)
        for name in BIN_COUNTS
    },
}
"""Count columns (int64) and what each counts."""

FRACTIONS: dict[str, Fraction] = {
    "masked_fraction": Fraction("masked_tokens", "loss_tokens"),
    "keep_zero_fraction": Fraction("keep_zero_tokens", "loss_tokens"),
    "masked_fraction_nonzero": Fraction("masked_tokens", "nonzero_advantage_tokens"),
    "pg_clipfrac_srl": Fraction("masked_tokens", "nonzero_advantage_tokens", VERL_EPSILON),
    "pg_clipfrac_lower_srl": Fraction("removed_negative", "nonzero_advantage_tokens", VERL_EPSILON),
    "pg_clipfrac_verl": Fraction("keep_zero_tokens", "loss_tokens", VERL_EPSILON),
    "exceed_fraction": Fraction("exceed", "loss_tokens"),
    "ppo_counterfactual_fraction": Fraction("ppo_counterfactual_tokens", "loss_tokens"),
    "ppo_two_sided_fraction": Fraction("ppo_two_sided_tokens", "loss_tokens"),
}
"""Fraction columns (float64), null where the denominator is 0."""

SIGNED_QUANTILES = {"q01": 0.01, "q10": 0.1, "q90": 0.9, "q99": 0.99}
ABSOLUTE_QUANTILES = {"q50": 0.5, "q90": 0.9, "q99": 0.99}
QUANTILES: tuple[str, ...] = (
    *(f"drift_{name}" for name in SIGNED_QUANTILES),
    *(f"drift_abs_{name}" for name in ABSOLUTE_QUANTILES),
)
"""Quantile columns (float64) of p_current - p_sampler and of its absolute value."""

MEANS = ("drift_mean", "drift_abs_mean", "ratio_mean", "log_ratio_mean")
"""Means over the trained tokens (float64)."""

MAXIMA = ("drift_max", "drift_abs_max", "log_ratio_abs_max", "ratio_max")
MINIMA = ("drift_min",)

COLUMNS: tuple[str, ...] = (*COUNTS, *FRACTIONS, *QUANTILES, *MEANS, *MAXIMA, *MINIMA)
"""Every name that ``token_diagnostics`` returns, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosticSettings:
    """Against which thresholds tokens are counted; the same for all arms of a comparison."""

    rule: DppoRule | None
    """The treatment's mask; None leaves the exceedance columns null, and so do tokens that come
    without what it compares with (recomputed log-probabilities, a top-K divergence)."""
    ratio_cap: float | None
    """The cap whose hits are counted; None leaves those columns null."""
    ppo_low_threshold: float
    """Lower bound on the ratio itself of the counterfactual clip (0.8 for epsilon 0.2)."""
    ppo_high_threshold: float
    """Upper bound on the ratio itself."""

    def __post_init__(self) -> None:
        """Refuse bounds that are not around 1.

        Raises:
            LossConfigError: names the bounds.
        """
        low, high = self.ppo_low_threshold, self.ppo_high_threshold
        if not 0.0 <= low <= 1.0 <= high:
            message = (
                f"ppo_low_threshold, ppo_high_threshold: {low}, {high}; "
                "expected 0 <= low <= 1 <= high (bounds on the ratio, not epsilons)"
            )
            raise LossConfigError(message)


def settings_for_arms(
    configs: Sequence[Mapping[str, Any]],
    *,
    ppo_low_threshold: float | None = None,
    ppo_high_threshold: float | None = None,
) -> DiagnosticSettings:
    """Take the thresholds of a comparison's diagnostics from its arms' losses.

    The mask's rule and cap come from the ``dppo`` arms, the counterfactual clip's bounds from the
    ``grpo_clip`` arms; every arm is then diagnosed against the same numbers. Arms of one kind must
    agree. Bounds that no arm has are given here.

    Args:
        configs: the loss of each arm, as registered.
        ppo_low_threshold: lower bound on the ratio; overrides the arms'.
        ppo_high_threshold: upper bound on the ratio; overrides the arms'.

    Returns:
        Settings for all arms; without a ``dppo`` arm the rule and the cap are None.

    Raises:
        LossConfigError: if arms of one kind differ, or no bounds are known.
    """
    losses = [make_loss(config) for config in configs]
    masks = list(dict.fromkeys(loss for loss in losses if isinstance(loss, Dppo)))
    clips = list(
        dict.fromkeys(
            (loss.clip_low_threshold, loss.clip_high_threshold)
            for loss in losses
            if isinstance(loss, GrpoClip)
        )
    )
    if len(masks) > 1:
        message = f"arms: {len(masks)} different dppo losses; expected one rule for all diagnostics"
        raise LossConfigError(message)
    bounds = (ppo_low_threshold, ppo_high_threshold)
    low, high = clips[0] if len(clips) == 1 else (None, None)
    low, high = bounds[0] or low, bounds[1] or high
    if low is None or high is None:
        message = (
            f"ppo_low_threshold, ppo_high_threshold: {bounds}, and {len(clips)} different "
            "grpo_clip bounds among the arms; expected one pair"
        )
        raise LossConfigError(message)
    return DiagnosticSettings(
        rule=masks[0].rule if masks else None,
        ratio_cap=masks[0].ratio_cap if masks else None,
        ppo_low_threshold=low,
        ppo_high_threshold=high,
    )


def quantile(values_N: ArrayLike, q: float, *, method: QuantileMethod = QUANTILE_METHOD) -> float:
    """Return a quantile in float64 by the named method; ``linear`` unless told otherwise.

    NumPy rather than torch: ``torch.quantile`` refuses large inputs.
    """
    return float(np.quantile(np.asarray(values_N, dtype=np.float64), q, method=method))


def minibatch_diagnostics(
    target_logprobs_D: Sequence[torch.Tensor],
    inputs_D: Sequence[LossInputs],
    outputs_D: Sequence[LossOutput],
    *,
    settings: DiagnosticSettings,
) -> DiagnosticRecord:
    """Diagnose one minibatch from what its loss was given and decided."""
    return token_diagnostics(
        minibatch_tokens(target_logprobs_D, inputs_D, outputs_D), settings=settings
    )


def pooled_diagnostics(
    tokens_U: Sequence[TokenArrays], *, settings: DiagnosticSettings
) -> DiagnosticRecord:
    """Diagnose several updates as one pool of tokens: every token counts once, quantiles too."""
    return token_diagnostics(concatenate(tokens_U), settings=settings)


def token_diagnostics(tokens: TokenArrays, *, settings: DiagnosticSettings) -> DiagnosticRecord:
    """Count, divide and describe the trained tokens of one update (or of a pool).

    p is the probability under the policy *before* the optimizer step, q the sampling probability.
    The identity ``exceed = exceed_dropped + exceed_restoring + exceed_zero_advantage`` always holds.

    Args:
        tokens: trained tokens.
        settings: thresholds of the counts.

    Returns:
        One entry per name in ``COLUMNS``; null where it cannot be had (no trained token, no rule or
        nothing that the rule compares with, no cap). Sampling log-probabilities never stand in for
        an anchor that was not recorded.
    """
    signs = np.sign(tokens.advantages_N)
    log_ratio_N = tokens.target_logprobs_N - tokens.sampling_logprobs_N
    p_N, q_N = np.exp(tokens.target_logprobs_N), np.exp(tokens.sampling_logprobs_N)
    with np.errstate(over="ignore"):
        ratio_N = np.exp(log_ratio_N)
    record: DiagnosticRecord = dict.fromkeys(COLUMNS)
    record |= decision_counts(tokens, signs)
    ppo_N = ppo_clipped(ratio_N, signs, settings=settings)
    record |= ppo_counts(ratio_N, signs, ppo_N, settings=settings)
    exceed_N = None
    if settings.rule is not None and can_exceed(tokens, settings.rule):
        up_N, down_N = exceedances(tokens, settings.rule)
        exceed_N = up_N | down_N
        record |= exceedance_counts(up_N, down_N, signs)
    if settings.ratio_cap is not None:
        capped_N = np.exp(np.minimum(log_ratio_N, LOG_RATIO_LIMIT_NATS)) > settings.ratio_cap
        record["cap_hits"] = count(capped_N)
        record["cap_hits_kept"] = count(capped_N & tokens.keep_N & (signs != 0))
    masked_N = ~tokens.keep_N & (signs != 0)
    record |= bin_counts(q_N, masked_N=masked_N, exceed_N=exceed_N, ppo_N=ppo_N)
    record |= fractions(record)
    if len(tokens) > 0:
        record |= drift_figures(p_N - q_N)
        record["log_ratio_mean"] = float(log_ratio_N.mean())
        record["log_ratio_abs_max"] = float(np.abs(log_ratio_N).max())
        record["ratio_mean"] = float(ratio_N.mean())
        record["ratio_max"] = float(ratio_N.max())
    return record


def count(chosen_N: Bools) -> int:
    """Return how many entries are True."""
    return int(np.count_nonzero(chosen_N))


def decision_counts(tokens: TokenArrays, signs_N: Floats) -> DiagnosticRecord:
    """Count the loss's own decisions, zero-advantage tokens kept apart."""
    not_kept_N = ~tokens.keep_N
    positive = count(not_kept_N & (signs_N > 0))
    negative = count(not_kept_N & (signs_N < 0))
    return {
        "loss_tokens": len(tokens),
        "nonfinite_tokens": 0,
        "nonzero_advantage_tokens": count(signs_N != 0),
        "positive_advantage_tokens": count(signs_N > 0),
        "negative_advantage_tokens": count(signs_N < 0),
        "masked_tokens": positive + negative,
        "removed_positive": positive,
        "removed_negative": negative,
        "keep_zero_tokens": count(not_kept_N),
        "keep_zero_advantage_zero_tokens": count(not_kept_N & (signs_N == 0)),
    }


def ppo_clipped(ratio_N: Floats, signs_N: Floats, *, settings: DiagnosticSettings) -> Bools:
    """Tokens whose gradient PPO's ratio clip would remove: definition (a), direction-aware."""
    above_N = (signs_N > 0) & (ratio_N > settings.ppo_high_threshold)
    below_N = (signs_N < 0) & (ratio_N < settings.ppo_low_threshold)
    return above_N | below_N


def ppo_counts(
    ratio_N: Floats, signs_N: Floats, ppo_N: Bools, *, settings: DiagnosticSettings
) -> DiagnosticRecord:
    """Count PPO's counterfactual under each of its three definitions."""
    high_N = ratio_N > settings.ppo_high_threshold
    low_N = ratio_N < settings.ppo_low_threshold
    return {
        "ppo_counterfactual_tokens": count(ppo_N),
        "ppo_counterfactual_with_zero_advantage_tokens": count(ppo_N | (low_N & (signs_N == 0))),
        "ppo_two_sided_tokens": count(high_N | low_N),
    }


def can_exceed(tokens: TokenArrays, rule: DppoRule) -> bool:
    """Whether tokens carry what a rule compares with; those of an arm with another loss may not."""
    if rule.divergence in TOPK_DIVERGENCES:
        return tokens.divergence_N is not None
    return rule.anchor == "sampling" or tokens.anchor_logprobs_N is not None


def exceedances(tokens: TokenArrays, rule: DppoRule) -> tuple[Bools, Bools]:
    """Return which tokens are beyond their delta upwards and downwards, in float64.

    Raises:
        LossInputError: if the rule's anchor or divergence was not recorded.
    """
    anchor_N = tokens.sampling_logprobs_N
    if rule.anchor == "recompute":
        if tokens.anchor_logprobs_N is None:
            message = 'anchor_logprobs_N: None; expected values, needed by anchor "recompute"'
            raise LossInputError(message)
        anchor_N = tokens.anchor_logprobs_N
    moved = drift(
        rule,
        current_logprobs_T=torch.from_numpy(tokens.target_logprobs_N),
        anchor_logprobs_T=torch.from_numpy(anchor_N),
        divergence_T=None if tokens.divergence_N is None else torch.from_numpy(tokens.divergence_N),
    )
    return moved.up_T.numpy(), moved.down_T.numpy()


def exceedance_counts(up_N: Bools, down_N: Bools, signs_N: Floats) -> DiagnosticRecord:
    """Split the tokens beyond delta into dropped, restoring and without advantage."""
    exceed_N = up_N | down_N
    dropped_pos_N, dropped_neg_N = up_N & (signs_N > 0), down_N & (signs_N < 0)
    restoring_N = exceed_N & (signs_N != 0) & ~dropped_pos_N & ~dropped_neg_N
    return {
        "exceed": count(exceed_N),
        "exceed_dropped": count(dropped_pos_N | dropped_neg_N),
        "exceed_dropped_positive": count(dropped_pos_N),
        "exceed_dropped_negative": count(dropped_neg_N),
        "exceed_restoring": count(restoring_N),
        "exceed_zero_advantage": count(exceed_N & (signs_N == 0)),
    }


def bin_counts(
    q_N: Floats, *, masked_N: Bools, exceed_N: Bools | None, ppo_N: Bools
) -> DiagnosticRecord:
    """Count tokens, removed ones, exceedances and PPO's by sampling probability."""
    edges = np.asarray(PROBABILITY_BIN_EDGES[1:-1])
    bin_N = np.searchsorted(edges, q_N, side="right")
    chosen = {"tokens": None, "masked": masked_N, "exceed": exceed_N, "ppo": ppo_N}
    record: DiagnosticRecord = {}
    for name, chosen_N in chosen.items():
        if name == "exceed" and chosen_N is None:
            continue
        totals = np.bincount(bin_N if chosen_N is None else bin_N[chosen_N], minlength=BINS)
        record |= {f"prob_bin_{index}_{name}": int(totals[index]) for index in range(BINS)}
    return record


def fractions(record: Mapping[str, int | float | None]) -> DiagnosticRecord:
    """Divide the counts of a record; null where a count is missing or the denominator is 0."""
    result: DiagnosticRecord = {}
    for name, (numerator, denominator, epsilon) in FRACTIONS.items():
        above, below = record.get(numerator), record.get(denominator)
        if above is None or below is None or below == 0:
            result[name] = None
        else:
            result[name] = above / (below + epsilon)
    return result


def drift_figures(difference_N: Floats) -> DiagnosticRecord:
    """Describe p - q: mean, extremes and tails, signed and absolute."""
    absolute_N = np.abs(difference_N)
    signed = np.quantile(difference_N, list(SIGNED_QUANTILES.values()), method=QUANTILE_METHOD)
    tails = np.quantile(absolute_N, list(ABSOLUTE_QUANTILES.values()), method=QUANTILE_METHOD)
    return {
        "drift_mean": float(difference_N.mean()),
        "drift_min": float(difference_N.min()),
        "drift_max": float(difference_N.max()),
        "drift_abs_mean": float(absolute_N.mean()),
        "drift_abs_max": float(absolute_N.max()),
        **{
            f"drift_{name}": float(value)
            for name, value in zip(SIGNED_QUANTILES, signed, strict=True)
        },
        **{
            f"drift_abs_{name}": float(value)
            for name, value in zip(ABSOLUTE_QUANTILES, tails, strict=True)
        },
    }


def pool_counts(records: Sequence[Mapping[str, Any]]) -> DiagnosticRecord:
    """Pool the records of several updates without their tokens.

    Counts add up (null as soon as one is missing), fractions are divided again from the pooled
    counts, means are weighted by trained tokens and extremes stay extremes. Quantiles cannot be
    pooled from quantiles and are null: use ``pooled_diagnostics`` for those.

    Args:
        records: what ``token_diagnostics`` returned for each update.
    """
    pooled: DiagnosticRecord = dict.fromkeys(COLUMNS)
    for name in COUNTS:
        values = [record.get(name) for record in records]
        if values and None not in values:
            pooled[name] = sum(int(value) for value in values if value is not None)
    pooled |= fractions(pooled)
    weighted = [record for record in records if record.get("loss_tokens")]
    for name in MEANS:
        if weighted and all(record.get(name) is not None for record in weighted):
            total = sum(float(record[name]) * int(record["loss_tokens"]) for record in weighted)
            pooled[name] = total / sum(int(record["loss_tokens"]) for record in weighted)
    for names, choose in ((MAXIMA, max), (MINIMA, min)):
        for name in names:
            extremes = [float(record[name]) for record in weighted if record.get(name) is not None]
            if extremes:
                pooled[name] = choose(extremes)
    return pooled


@dataclass(frozen=True, slots=True)
class ProbabilityBin:
    """One row of the table by sampling probability."""

    lower: float
    upper: float
    tokens: int
    masked: int
    exceed: int | None
    ppo: int


def probability_bins(record: Mapping[str, Any]) -> list[ProbabilityBin]:
    """Return the bins of a record (of one update or pooled) as rows."""
    return [
        ProbabilityBin(
            PROBABILITY_BIN_EDGES[index],
            PROBABILITY_BIN_EDGES[index + 1],
            *(record[f"prob_bin_{index}_{name}"] for name in BIN_COUNTS),
        )
        for index in range(BINS)
    ]


def record_figures(pooled: Mapping[str, Any], *, prefix: str) -> DiagnosticRecord:
    """Return a pooled record under the names that the bounded diagnostic reports.

    Args:
        pooled: diagnostics pooled over the loss calls of one epoch.
        prefix: e.g. ``"epoch2"``.
    """
    names = {
        "n_loss_tokens": "loss_tokens",
        "dppo_masked_token_fraction": "masked_fraction",
        "dppo_masked_nonzero_adv_fraction": "masked_fraction_nonzero",
        "removed_nonzero_grad_pos": "removed_positive",
        "removed_nonzero_grad_neg": "removed_negative",
        "abs_drift_gt_delta_tokens": "exceed",
        "ppo_counterfactual_clip_fraction": "ppo_counterfactual_fraction",
        "policy_drift_abs_p_q90": "drift_abs_q90",
        "policy_drift_abs_p_q99": "drift_abs_q99",
        "policy_drift_abs_p_max": "drift_abs_max",
        "ratio_cap_hits": "cap_hits",
    }
    return {f"{prefix}_{name}": pooled[column] for name, column in names.items()}
