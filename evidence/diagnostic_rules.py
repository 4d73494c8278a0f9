"""The four fixed rules of a diagnostic, under which a mask counts as active."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from evidence.gate import CheckResult, GateStatus
from evidence.values import is_number

FIXED_RULES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "masked_fraction": {"min": 0.001, "max": 0.3},
        "ppo_counterfactual_fraction": {"min": 0.0005},
        "drift_abs_q90": {"min": 0.005},
    }
)
"""Ranges of the pooled figures, ends included. The fourth rule asks for a removed gradient that was
not 0 for each sign of the advantage that occurs."""

_SIGNS = (
    ("positive", "positive_advantage_tokens", "removed_positive"),
    ("negative", "negative_advantage_tokens", "removed_negative"),
)


@dataclass(frozen=True, slots=True)
class RulesResult:
    """What the rules say of one pool of loss calls.

    Attributes:
        status: ``passed`` if every rule holds, ``failed`` if one does not, ``unverified`` if one
            could not be judged.
        checks: one row a rule.
    """

    status: GateStatus
    checks: tuple[CheckResult, ...]

    @property
    def active(self) -> bool:
        """Whether the mask was active."""
        return self.status == "passed"

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return {"status": self.status, "checks": [check.to_record() for check in self.checks]}


def judge(figures: Mapping[str, Any]) -> RulesResult:
    """Judge pooled figures by the four rules.

    Args:
        figures: counts and fractions under the names of the columns of `updates`.
    """
    rows = [_range(name, bounds, figures.get(name)) for name, bounds in FIXED_RULES.items()]
    rows.append(_signs(figures))
    statuses = {row.status for row in rows}
    status: GateStatus = "passed"
    if "unverified" in statuses:
        status = "unverified"
    elif "failed" in statuses:
        status = "failed"
    return RulesResult(status, tuple(rows))


def _range(name: str, bounds: Mapping[str, float], value: Any) -> CheckResult:
    low, high = bounds["min"], bounds.get("max")
    status: GateStatus
    if not is_number(value):
        status, reason = "unverified", "not measured"
    elif value < low:
        status, reason = "failed", f"{value:.6g} is below {low:g}"
    elif high is not None and value > high:
        status, reason = "failed", f"{value:.6g} is above {high:g}"
    else:
        status, reason = "passed", ""
    return CheckResult(
        check=name, status=status, reason=reason or None, tolerance=dict(bounds), measured=value
    )


def _signs(figures: Mapping[str, Any]) -> CheckResult:
    """A removed non-zero gradient for each sign that occurs; none at all when no sign does."""
    names = [name for _, *pair in _SIGNS for name in pair]
    measured = {name: figures.get(name) for name in names}
    status: GateStatus = "passed"
    reason = None
    occurring = [(sign, removed) for sign, count, removed in _SIGNS if measured[count]]
    if not all(is_number(value) for value in measured.values()):
        status, reason = "unverified", "not measured"
    elif not occurring:
        status, reason = "failed", "no loss token has an advantage"
    else:
        without = [sign for sign, removed in occurring if not measured[removed]]
        if without:
            status, reason = "failed", f"no removed gradient with {' or '.join(without)} advantage"
    return CheckResult(
        check="removed_gradient_by_sign",
        status=status,
        reason=reason,
        tolerance={"min": 1},
        measured=measured,
    )
