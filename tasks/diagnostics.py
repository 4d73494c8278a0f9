"""What an update did to its tokens, under the same thresholds for every arm of the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evidence.canonical import canonical_bytes
from evidence.tables import UPDATES
from losses.diagnostics import QUANTILE_METHOD, DiagnosticSettings
from losses.dppo import Dppo
from losses.dppo_rule import DppoRule
from losses.grpo_clip import GrpoClip
from losses.registry import make_loss
from tasks.arms import ArmPlan

PPO_LOW, PPO_HIGH = 0.8, 1.2
"""Bounds of the counterfactual ratio clip where no arm of the comparison states its own."""

_ALIASES = {
    "masked_fraction": "masked_token_fraction",
    "masked_fraction_nonzero": "masked_nonzero_adv_fraction",
    "keep_zero_tokens": "not_kept_tokens",
    "removed_positive": "removed_nonzero_grad_pos",
    "removed_negative": "removed_nonzero_grad_neg",
    "exceed": "exceed_delta_tokens",
    "exceed_restoring": "exceed_delta_restoring_tokens",
    "exceed_zero_advantage": "exceed_delta_zero_advantage_tokens",
    "ppo_counterfactual_fraction": "ppo_counterfactual_clip_fraction",
    "drift_mean": "policy_drift_p_mean",
    "drift_q90": "policy_drift_p_q90",
    "drift_q99": "policy_drift_p_q99",
    "drift_max": "policy_drift_p_max",
    "drift_min": "policy_drift_p_min",
    "drift_abs_mean": "policy_drift_abs_p_mean",
    "drift_abs_q90": "policy_drift_abs_p_q90",
    "drift_abs_q99": "policy_drift_abs_p_q99",
    "drift_abs_max": "policy_drift_abs_p_max",
    "ratio_max": "prob_ratio_max",
    "cap_hits": "ratio_cap_hits",
}
"""Column of `updates` to the name under which the diagnostics report it."""


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
    """A diagnostic record as columns of `updates`; the whole record goes along as JSON."""
    known = {column.name for column in UPDATES.columns}
    columns = {name: value for name, value in record.items() if name in known}
    for column, name in _ALIASES.items():
        if column in known and name in record:
            columns[column] = record[name]
    derived = {
        "keep_zero_fraction": _ratio(record, "not_kept_tokens", "loss_tokens"),
        "exceed_dropped": _sum(record, "exceed_delta_dropped_pos", "exceed_delta_dropped_neg"),
        "quantile_method": QUANTILE_METHOD,
        "info_json": canonical_bytes(dict(record)).decode("ascii"),
    }
    return columns | {name: value for name, value in derived.items() if name in known}


def _ratio(record: Mapping[str, Any], above: str, below: str) -> float | None:
    return record[above] / record[below] if record.get(below) else None


def _sum(record: Mapping[str, Any], *names: str) -> int | None:
    values = [record.get(name) for name in names]
    return None if None in values else sum(int(value) for value in values if value is not None)
