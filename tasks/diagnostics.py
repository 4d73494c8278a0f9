"""What an update did to its tokens, under the same thresholds for every arm of the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from losses.diagnostics import QUANTILE_METHOD, DiagnosticSettings
from losses.dppo import Dppo
from losses.dppo_rule import DppoRule
from losses.grpo_clip import GrpoClip
from losses.registry import make_loss
from tasks.arms import ArmPlan

PPO_LOW, PPO_HIGH = 0.8, 1.2
"""Bounds of the counterfactual ratio clip where no arm of the comparison states its own."""


def diagnostic_settings(arms: Sequence[ArmPlan]) -> DiagnosticSettings:
    """The thresholds that tokens of every arm are counted against.

    The mask is that of the arm that has one (the treatment first), the ratio clip that of the arm
    that clips.
    """
    ordered = sorted(arms, key=lambda arm: arm.role != "treatment")
    losses = [make_loss(arm.loss) for arm in ordered if arm.loss is not None]
    rule: DppoRule | None = None
    cap: float | None = None
    low, high = PPO_LOW, PPO_HIGH
    for loss in reversed(losses):
        if isinstance(loss, Dppo):
            rule, cap = loss.rule, loss.ratio_cap
        if isinstance(loss, GrpoClip):
            low, high = loss.clip_low_threshold, loss.clip_high_threshold
    return DiagnosticSettings(
        rule=rule, ratio_cap=cap, ppo_low_threshold=low, ppo_high_threshold=high
    )


def update_columns(record: Mapping[str, Any]) -> dict[str, Any]:
    """A diagnostic record as columns of `updates`; their names are the same."""
    return {**record, "quantile_method": QUANTILE_METHOD, "info_json": None}
