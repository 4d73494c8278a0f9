"""Activation gate: the pilot's diagnostics lie in the ranges that the spec fixed beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evidence.applicability import check_applicability
from evidence.gate import CheckResult, GateResult, GateStatus, SourceRef
from evidence.values import (
    as_list,
    as_mapping,
    is_number,
    is_text,
    jsonable,
    same,
    show,
    spec_mapping,
)

EVIDENCE_SOURCE = "executor report; remote execution is not attested"
_BOUNDS = ("min", "max", "one_of")


@dataclass(frozen=True, slots=True)
class ActivationResult:
    """The answer to an activation calibration.

    Attributes:
        status: ``failed`` if a measured value is outside its range, else ``unverified`` if one is
            missing or no measured value, else ``passed``.
        required: whether the gate is required.
        checks: one row for each prespecified diagnostic, in the spec's order.
        reasons: what is missing or outside, in that order.
        applicability: status of the applicability of the check.
    """

    status: GateStatus
    required: bool
    checks: tuple[CheckResult, ...]
    reasons: tuple[str, ...]
    applicability: str

    @property
    def reason(self) -> str | None:
        """All reasons as one line, None if there is none."""
        return "; ".join(self.reasons) or None

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object of the same form as the correctness validation."""
        return {
            "status": self.status,
            "required": self.required,
            "checks": [
                {
                    "check": row.check,
                    "status": row.status,
                    "accepted": row.tolerance,
                    "measured": row.measured,
                }
                for row in self.checks
            ],
            "reason": self.reason,
            "evidence_source": EVIDENCE_SOURCE,
            "applicability": self.applicability,
        }

    def to_gate(self, reads: Sequence[SourceRef] = ()) -> GateResult:
        """Return the answer as a gate."""
        return GateResult(
            gate="activation",
            status=self.status,
            reasons=self.reasons,
            checks=self.checks,
            reads=tuple(reads),
            validation=self.to_record(),
        )


def validate(spec: object, report: object) -> ActivationResult:
    """Judge reported diagnostics against the activation gate of the spec.

    Bounds are inclusive; ``one_of`` asks for an equal value of the same type. A value that is not
    a finite number (text, boolean, NaN, null) was not measured.

    Args:
        spec: the spec as given (or a triage document, or a parsed `Spec`).
        report: the reported ``activation_calibration``, with its ``values`` by metric; anything
            else counts as missing.
    """
    applicability = check_applicability(spec, "activation_gate")
    if applicability.status == "not_applicable":
        return ActivationResult(
            "not_applicable", False, (), applicability.reasons, applicability.status
        )
    gate = as_mapping(spec_mapping(spec).get("activation_gate"))
    values = as_mapping(as_mapping(report).get("values"))
    rows = [_judge(check, values) for check in as_list(gate.get("checks"))]
    reasons = [row.reason for row in rows if row.reason is not None]
    if not rows:
        reasons.append("the spec's activation_gate names no diagnostic")
    if any(row.status == "failed" for row in rows):
        status: GateStatus = "failed"
    else:
        status = "unverified" if reasons else "passed"
    return ActivationResult(
        status=status,
        required=True,
        checks=tuple(rows),
        reasons=tuple(reasons),
        applicability=applicability.status,
    )


def _judge(check: object, values: Mapping[str, Any]) -> CheckResult:
    plan = as_mapping(check)
    metric = plan.get("metric")
    name = metric if is_text(metric) else "(unnamed diagnostic)"
    value = values.get(name)
    problem = _problem_of(plan, metric, value)
    status: GateStatus
    if problem is not None:
        status, reason = "unverified", f"{show(name)}: {problem}"
    elif _inside(plan, value):
        status, reason = "passed", None
    else:
        status, reason = "failed", f"{show(name)}: outside its accepted range"
    return CheckResult(
        check=name,
        status=status,
        reason=reason,
        tolerance={key: jsonable(plan[key]) for key in _BOUNDS if key in plan},
        measured=jsonable(value),
    )


def _problem_of(plan: Mapping[str, Any], metric: object, value: object) -> str | None:
    """Say why a value cannot be judged, None if it can."""
    limits = [plan[key] for key in ("min", "max") if plan.get(key) is not None]
    choices = plan.get("one_of")
    if not is_text(metric) or not all(map(is_number, limits)):
        return "a metric with finite bounds in the spec"
    if choices is not None and not as_list(choices):
        return "a list of accepted values in the spec"
    if not limits and choices is None:
        return "an accepted range in the spec"
    if limits and not is_number(value):
        return "measured value"
    if choices is not None and not (is_text(value) or is_number(value) or isinstance(value, bool)):
        return "measured value"
    return None


def _inside(plan: Mapping[str, Any], value: Any) -> bool:
    low, high, choices = (plan.get(key) for key in _BOUNDS)
    if low is not None and value < low:
        return False
    if high is not None and value > high:
        return False
    return choices is None or any(same(value, choice) for choice in choices)
