"""A recount of the diagnostics, one token at a time, for comparison with the vectorised one."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One trained token."""

    target_logprob: float
    sampling_logprob: float
    advantage: float
    keep: bool
    anchor_logprob: float | None = None
    """What the rule compares with, where that is not the sampling value."""


def recount(
    tokens: Iterable[Token], *, delta_low: float, delta_high: float, ppo: tuple[float, float]
) -> dict[str, int]:
    """Count decisions, exceedances of the binary TV rule and PPO's clip by plain loops.

    Args:
        tokens: trained tokens.
        delta_low: threshold of the probability's fall.
        delta_high: threshold of its rise.
        ppo: bounds on the ratio itself, low and high.
    """
    names = (
        "loss_tokens",
        "nonzero_advantage_tokens",
        "masked_tokens",
        "removed_positive",
        "removed_negative",
        "keep_zero_tokens",
        "keep_zero_advantage_zero_tokens",
        "exceed",
        "exceed_dropped",
        "exceed_restoring",
        "exceed_zero_advantage",
        "ppo_counterfactual_tokens",
        "ppo_two_sided_tokens",
    )
    counts = dict.fromkeys(names, 0)
    for token in tokens:
        counts["loss_tokens"] += 1
        counts["nonzero_advantage_tokens"] += token.advantage != 0
        if not token.keep:
            count_dropped(counts, token.advantage)
        count_exceedance(counts, token, delta_low=delta_low, delta_high=delta_high)
        count_ppo(counts, token, ppo=ppo)
    return counts


def count_dropped(counts: dict[str, int], advantage: float) -> None:
    """Add one token that was not kept."""
    counts["keep_zero_tokens"] += 1
    if advantage == 0:
        counts["keep_zero_advantage_zero_tokens"] += 1
        return
    counts["masked_tokens"] += 1
    counts["removed_positive" if advantage > 0 else "removed_negative"] += 1


def count_exceedance(
    counts: dict[str, int], token: Token, *, delta_low: float, delta_high: float
) -> None:
    """Add one token to the exceedances, if it is one."""
    start = token.sampling_logprob if token.anchor_logprob is None else token.anchor_logprob
    moved = math.exp(token.target_logprob) - math.exp(start)
    if not (moved > delta_high or -moved > delta_low):
        return
    counts["exceed"] += 1
    if token.advantage == 0:
        counts["exceed_zero_advantage"] += 1
    elif (token.advantage > 0) == (moved > 0):
        counts["exceed_dropped"] += 1
    else:
        counts["exceed_restoring"] += 1


def count_ppo(counts: dict[str, int], token: Token, *, ppo: tuple[float, float]) -> None:
    """Add one token to PPO's counterfactual counts."""
    low, high = ppo
    gap = token.target_logprob - token.sampling_logprob
    ratio = math.exp(gap) if gap < 700.0 else math.inf
    outside = ratio < low or ratio > high
    counts["ppo_two_sided_tokens"] += outside
    if outside and token.advantage != 0 and (token.advantage > 0) == (ratio > high):
        counts["ppo_counterfactual_tokens"] += 1
