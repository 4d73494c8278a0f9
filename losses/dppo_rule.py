"""DPPO's decision: which tokens drifted so far that their gradient is dropped.

Shape legend: T targets of one sequence.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from losses.anchors import ANCHORS, Anchor
from losses.errors import LossConfigError, LossInputError

Divergence: TypeAlias = Literal[
    "binary_tv",
    "binary_kl",
    "topk_tv",
    "topk_kl",
    "ratio",
    "none",
    "ratio_ablation_positive",
    "ratio_ablation_negative",
    "ratio_ablation_both",
]
"""How drift is measured. ``ratio`` is PPO's clip as a mask, ``none`` drops nothing; the ablations
use a fixed ratio bound on one side or both and read the delta there as a least probability."""

DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)
TOPK_DIVERGENCES = ("topk_tv", "topk_kl")
ABLATION_RATIO_HIGH = 1 + 0.28
ABLATION_RATIO_LOW = 1 - 0.2
KL_SMOOTHING = 1e-8
"""Added to both complements inside the logarithm of the binary KL divergence."""


class Drift(NamedTuple):
    """Where a token's probability moved beyond its threshold. Never both; neither within it."""

    up_T: Tensor
    """[T] bool; the policy raised the token's probability beyond ``delta_high``."""
    down_T: Tensor
    """[T] bool; the policy lowered it beyond ``delta_low``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DppoRule:
    """Divergence, anchor and thresholds of one mask. Every field is stated, none has a default.

    Raises:
        LossConfigError: names the field, its value and what is allowed.
    """

    divergence: Divergence
    anchor: Anchor
    delta_low: float | None
    """Threshold on the way down: probability for TV, nats for KL, 1 - ratio for ``ratio``."""
    delta_high: float | None
    """Threshold on the way up, in the same unit."""

    def __post_init__(self) -> None:
        """Refuse combinations that have no published meaning."""
        if self.divergence not in DIVERGENCES:
            message = f"divergence: {self.divergence!r}; expected one of {list(DIVERGENCES)}"
            raise LossConfigError(message)
        allowed = self.allowed_anchors()
        if self.anchor not in allowed:
            message = (
                f"anchor: {self.anchor!r} with divergence {self.divergence!r}; "
                f"expected one of {list(allowed)}"
            )
            raise LossConfigError(message)
        for name in ("delta_low", "delta_high"):
            self.check_delta(name, getattr(self, name))

    def allowed_anchors(self) -> tuple[Anchor, ...]:
        """Return the anchors that exist for this divergence."""
        if self.divergence in ("binary_tv", "binary_kl", "ratio"):
            return ANCHORS
        return ("sampling",)

    def check_delta(self, name: str, value: float | None) -> None:
        """Refuse a threshold where there is none, or none where one is needed."""
        if self.divergence == "none":
            if value is not None:
                message = f'{name}: {value}; expected null, since divergence "none" drops nothing'
                raise LossConfigError(message)
        elif value is None or not value >= 0.0:
            message = f"{name}: {value}; expected a number >= 0"
            raise LossConfigError(message)

    def thresholds(self) -> tuple[float, float]:
        """Return (low, high); infinite for the form that has none."""
        low = float("inf") if self.delta_low is None else self.delta_low
        high = float("inf") if self.delta_high is None else self.delta_high
        return low, high


def binary_kl(current_logprobs_T: Tensor, anchor_logprobs_T: Tensor) -> Tensor:
    """KL(anchor || current) of the Bernoulli {this token, any other}, in nats.

    A service may round the logarithm of a probability of 1 to a little above 0; it counts as 0.
    """
    current_logprobs_T = current_logprobs_T.clamp(max=0.0)
    anchor_logprobs_T = anchor_logprobs_T.clamp(max=0.0)
    p_T, q_T = torch.exp(current_logprobs_T), torch.exp(anchor_logprobs_T)
    rest_T = torch.log((1.0 - q_T + KL_SMOOTHING) / (1.0 - p_T + KL_SMOOTHING))
    return q_T * (anchor_logprobs_T - current_logprobs_T) + (1 - q_T) * rest_T


@torch.no_grad()
def drift(
    rule: DppoRule,
    *,
    current_logprobs_T: Tensor,
    anchor_logprobs_T: Tensor,
    divergence_T: Tensor | None,
) -> Drift:
    """Find the tokens beyond their threshold, strictly: one exactly at delta is within it.

    Args:
        rule: divergence and thresholds.
        current_logprobs_T: [T] nats, the policy being trained.
        anchor_logprobs_T: [T] nats, what it is measured against.
        divergence_T: [T] top-K divergence, for the top-K forms alone.

    Returns:
        Direction by direction. Off the mask the answer means nothing.

    Raises:
        LossInputError: if a top-K form got no ``divergence_T``.

    Sources:
        arXiv:2602.04879, eq. 12, and its released code.
    """
    low, high = rule.thresholds()
    p_T, q_T = torch.exp(current_logprobs_T), torch.exp(anchor_logprobs_T)
    if rule.divergence == "binary_tv":
        return Drift(p_T - q_T > high, p_T - q_T < -low)
    if rule.divergence == "binary_kl":
        kl_T = binary_kl(current_logprobs_T, anchor_logprobs_T)
        return Drift((kl_T > high) & (p_T > q_T), (kl_T > low) & (p_T < q_T))
    if rule.divergence in TOPK_DIVERGENCES:
        if divergence_T is None:
            message = f"divergence_T: None; expected [T] values, needed by {rule.divergence!r}"
            raise LossInputError(message)
        return Drift((divergence_T > high) & (p_T > q_T), (divergence_T > low) & (p_T < q_T))
    return ratio_drift(rule, ratio_T=torch.exp(current_logprobs_T - anchor_logprobs_T), q_T=q_T)


def ratio_drift(rule: DppoRule, *, ratio_T: Tensor, q_T: Tensor) -> Drift:
    """Find the tokens whose probability ratio left its interval, for the ratio forms."""
    low, high = rule.thresholds()
    if rule.divergence == "none":
        never_T = torch.zeros_like(ratio_T, dtype=torch.bool)
        return Drift(never_T, never_T)
    up_T, down_T = ratio_T > 1 + high, ratio_T < 1 - low
    if rule.divergence in ("ratio_ablation_positive", "ratio_ablation_both"):
        up_T = (ratio_T > ABLATION_RATIO_HIGH) & (q_T >= high)
    if rule.divergence in ("ratio_ablation_negative", "ratio_ablation_both"):
        down_T = (ratio_T < ABLATION_RATIO_LOW) & (q_T >= low)
    return Drift(up_T, down_T)


def keep_mask(moved: Drift, advantages_T: Tensor) -> Tensor:
    """Keep a token unless its drift already went where its gradient would push it.

    A > 0 is dropped on the way up, A <= 0 on the way down; drift that comes back is never dropped,
    however large. The zero-advantage side is the released code's: such a token has no gradient to
    lose, so counts of removed gradients leave it out.
    """
    return ~torch.where(advantages_T > 0, moved.up_T, moved.down_T)
