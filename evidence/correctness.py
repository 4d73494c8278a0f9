"""Correctness preflight: the new loss or optimizer path reproduces baseline and reference.

Run as ``python -m evidence.correctness spec.json preflight.json``, it prints the validation and
exits with 0 only if it is passed or not applicable.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from evidence.applicability import Applicability, check_applicability
from evidence.canonical import MAX_BYTES, loads_strict
from evidence.errors import InputError
from evidence.gate import CheckResult, GateResult, GateStatus, SourceRef
from evidence.parity import lr_scaling_error, parity_errors
from evidence.values import (
    as_list,
    as_mapping,
    is_number,
    is_sha256,
    is_text,
    jsonable,
    show,
    spec_mapping,
)

__all__ = ["CorrectnessResult", "lr_scaling_error", "main", "parity_errors", "validate"]

EVIDENCE_SOURCE = "executor report; remote execution is not attested"
REQUIRED_CHECKS: Mapping[str, tuple[str, ...]] = {
    "loss": ("baseline_loss", "baseline_gradient", "reference_loss", "reference_gradient"),
    "optimizer": ("baseline_update", "reference_update"),
}
"""Checks of each kind of path, in the order of the answer."""

_TOLERANCES = ("atol", "rtol", "min_cosine")
_MEASURES = ("max_abs_error", "reference_max_abs", "relative_l2_error", "cosine_similarity")
_COSINE_ROUNDING = 1e-6
_LR_SCALING = "lr_scaling"


@dataclass(frozen=True, slots=True)
class CorrectnessResult:
    """The answer to a correctness preflight report.

    Attributes:
        status: ``failed`` if a measured check is outside its tolerance, else ``unverified`` if
            anything is missing, else ``passed``; ``not_applicable`` where none is needed.
        required: whether the preflight is required.
        checks: one row for each planned path and check.
        reasons: what is missing or wrong, in the order of the plan.
        applicability: status of the applicability of the check.
        reported_verdict: the agent's verdict, kept where this check withholds judgment.
    """

    status: GateStatus
    required: bool
    checks: tuple[CheckResult, ...]
    reasons: tuple[str, ...]
    applicability: str
    reported_verdict: str | None = None

    @property
    def reason(self) -> str | None:
        """All reasons as one line, None if there is none."""
        return "; ".join(self.reasons) or None

    def to_record(self) -> dict[str, Any]:
        """Return the contract's object, keys in its order."""
        record: dict[str, Any] = {
            "status": self.status,
            "required": self.required,
            "checks": [
                {
                    "path": row.path,
                    "check": row.check,
                    "status": row.status,
                    "tolerance": row.tolerance,
                    "measured": row.measured,
                }
                for row in self.checks
            ],
            "reason": self.reason,
            "evidence_source": EVIDENCE_SOURCE,
            "applicability": self.applicability,
        }
        if self.reported_verdict is not None:
            record["reported_verdict"] = self.reported_verdict
        return record

    def to_gate(self, reads: Sequence[SourceRef] = ()) -> GateResult:
        """Return the answer as a gate."""
        return GateResult(
            gate="correctness",
            status=self.status,
            reasons=self.reasons,
            checks=self.checks,
            reads=tuple(reads),
            validation=self.to_record(),
        )


def validate(spec: object, report: object, *, reported_verdict: object = None) -> CorrectnessResult:
    """Judge a correctness preflight report against the plan in the spec.

    Args:
        spec: the spec as given (or a triage document, or a parsed `Spec`).
        report: the reported ``correctness_preflight`` object; anything else counts as missing.
        reported_verdict: the agent's verdict, if it has given one.
    """
    applicability = check_applicability(spec, "correctness_preflight")
    found = as_mapping(report)
    custom = found.get("required") is True or bool(found.get("paths"))
    if applicability.status == "not_applicable" and not custom:
        return CorrectnessResult(
            "not_applicable", False, (), applicability.reasons, applicability.status
        )
    plan = as_list(as_mapping(spec_mapping(spec).get("correctness_preflight")).get("paths"))
    rows, reasons = _judge_plan(plan, found.get("paths"))
    if any(row.status == "failed" for row in rows):
        status: GateStatus = "failed"
    else:
        status = "unverified" if reasons else "passed"
    verdict = show(reported_verdict) if is_text(reported_verdict) else None
    return CorrectnessResult(
        status=status,
        required=True,
        checks=tuple(rows),
        reasons=tuple(reasons),
        applicability=_enforced(applicability),
        reported_verdict=None if status == "passed" else verdict,
    )


def _enforced(applicability: Applicability) -> str:
    """A custom path found in the run makes the check required, whatever the spec foresaw."""
    known = applicability.status
    return "required" if known == "not_applicable" else known


def _judge_plan(plan: Sequence[Any], paths: object) -> tuple[list[CheckResult], list[str]]:
    rows: list[CheckResult] = []
    reasons: list[str] = []
    if not plan:
        reasons.append("the spec has no accepted preflight plan")
    entries = as_list(paths)
    planned = Counter(map(_id_of, plan))
    reported: dict[object, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in entries:
        reported[_id_of(entry)].append(entry)
    for path in plan:
        name = as_mapping(path).get("id")
        if not is_text(name):
            reasons.append("a planned path has no id")
            continue
        if planned[name] > 1:
            reasons.append(f"{show(name)}: one planned path of this id")
        matching = reported[name]
        if len(matching) == 1:
            found_rows, found_reasons = _judge_path(path, matching[0])
        else:
            found_rows, found_reasons = _rows_unmeasured(path), [_count_reason(name, matching)]
        rows.extend(found_rows)
        reasons.extend(found_reasons)
    for entry in entries:
        if _id_of(entry) not in planned or not is_text(_id_of(entry)):
            reasons.append(f"{show(_id_of(entry))}: a path that the spec's plan names")
    return rows, reasons


def _id_of(entry: object) -> object:
    name = as_mapping(entry).get("id")
    return name if isinstance(name, str) else None


def _count_reason(name: str, matching: Sequence[object]) -> str:
    if matching:
        return f"{show(name)}: exactly one reported path, found {len(matching)}"
    return f"{show(name)}: reported path"


def _judge_path(path: Mapping[str, Any], entry: Mapping[str, Any]) -> _Judged:
    name = path["id"]
    reasons = [f"{show(name)}: {missing}" for missing in _missing_evidence(path, entry)]
    errors = as_mapping(entry.get("errors"))
    tolerances = as_mapping(path.get("tolerances"))
    rows = []
    for check in _checks_of(path):
        row, reason = _judge_check(name, check, tolerances.get(check), errors.get(check))
        rows.append(row)
        reasons.extend(reason)
    if path.get(_LR_SCALING) is not None:
        row, reason = _judge_scaling(name, path[_LR_SCALING], entry.get(_LR_SCALING))
        rows.append(row)
        reasons.extend(reason)
    return rows, reasons


_Judged = tuple[list[CheckResult], list[str]]


def _missing_evidence(path: Mapping[str, Any], entry: Mapping[str, Any]) -> list[str]:
    """List what must be stated before any error counts, in the order of the answer."""
    missing = []
    if not is_sha256(as_mapping(entry.get("fixed_input")).get("sha256")):
        missing.append("fixed_input sha256")
    for field in ("implementation_revision", "precision", "normalization"):
        if not is_text(entry.get(field)):
            missing.append(field)
    for field in ("reference_revision", "baseline_revision"):
        planned, reported = path.get(field), entry.get(field)
        if not (is_text(planned) and isinstance(reported, str) and planned == reported):
            missing.append(f"matching {field}")
    if _kind_of(path) is None:
        missing.append("a planned kind, loss or optimizer")
    return missing


def _kind_of(path: Mapping[str, Any]) -> str | None:
    kind = path.get("kind")
    return kind if isinstance(kind, str) and kind in REQUIRED_CHECKS else None


def _checks_of(path: Mapping[str, Any]) -> list[str]:
    """The checks that the kind of path requires, then any other that the plan bounds."""
    required = list(REQUIRED_CHECKS.get(_kind_of(path) or "", ()))
    others = list(as_mapping(path.get("tolerances")))
    return required + [name for name in others if name not in required]


def _rows_unmeasured(path: Mapping[str, Any]) -> list[CheckResult]:
    tolerances = as_mapping(path.get("tolerances"))
    return [
        CheckResult(
            check=check,
            status="unverified",
            path=path["id"],
            reason="not measured",
            tolerance=_tolerance_record(tolerances.get(check)),
        )
        for check in _checks_of(path)
    ]


def _judge_check(
    path: str, check: str, tolerance: object, errors: object
) -> tuple[CheckResult, list[str]]:
    status: GateStatus
    bound = _bound(tolerance, errors)
    if bound is None or not _measured(tolerance, errors):
        status, reason = "unverified", f"{show(path)}: measured {show(check)} errors"
    elif _within(bound, as_mapping(tolerance), as_mapping(errors)):
        status, reason = "passed", None
    else:
        status, reason = "failed", f"{show(path)}: {show(check)} outside its tolerance"
    row = CheckResult(
        check=check,
        status=status,
        path=path,
        reason=reason,
        tolerance=_tolerance_record(tolerance),
        measured=_measured_record(errors),
    )
    return row, [] if reason is None else [reason]


def _bound(tolerance: object, errors: object) -> float | None:
    """Return atol + rtol * reference_max_abs, None if it cannot be formed."""
    atol, rtol = (as_mapping(tolerance).get(key) for key in ("atol", "rtol"))
    largest = as_mapping(errors).get("reference_max_abs")
    if not (is_number(atol) and is_number(rtol) and is_number(largest)):
        return None
    if atol < 0 or rtol < 0 or largest < 0:
        return None
    bound = float(atol) + float(rtol) * float(largest)
    return bound if isfinite(bound) else None


def _measured(tolerance: object, errors: object) -> bool:
    """Whether the reported errors are measurements at all."""
    found = as_mapping(errors)
    error, relative, cosine = (found.get(_MEASURES[i]) for i in (0, 2, 3))
    if not all(name in found for name in _MEASURES) or not is_number(error) or error < 0:
        return False
    if relative is None:
        if found["reference_max_abs"] != 0:
            return False
    elif not is_number(relative) or relative < 0:
        return False
    minimum = as_mapping(tolerance).get("min_cosine")
    if cosine is None:
        return minimum is None
    if minimum is not None and not is_number(minimum):
        return False
    return is_number(cosine) and abs(cosine) <= 1 + _COSINE_ROUNDING


def _within(bound: float, tolerance: Mapping[str, Any], errors: Mapping[str, Any]) -> bool:
    """Whether measured errors are inside an inclusive bound and any prespecified min_cosine."""
    minimum = tolerance.get("min_cosine")
    aligned = minimum is None or errors["cosine_similarity"] >= minimum
    return bool(aligned and errors["max_abs_error"] <= bound)


def _judge_scaling(path: str, plan: object, probes: object) -> tuple[CheckResult, list[str]]:
    limit = as_mapping(plan).get("rtol")
    change = lr_scaling_error(as_list(probes))
    status: GateStatus
    if not is_number(limit) or limit < 0 or change is None:
        status, reason = "unverified", f"{show(path)}: measured lr_scaling probes"
    elif change <= limit:
        status, reason = "passed", None
    else:
        status, reason = "failed", f"{show(path)}: lr_scaling outside its tolerance"
    row = CheckResult(
        check=_LR_SCALING,
        status=status,
        path=path,
        reason=reason,
        tolerance={"rtol": jsonable(limit)},
        measured=None if change is None else {"max_relative_change": change},
    )
    return row, [] if reason is None else [reason]


def _tolerance_record(tolerance: object) -> dict[str, Any] | None:
    if not isinstance(tolerance, Mapping):
        return None
    return {key: jsonable(tolerance[key]) for key in _TOLERANCES if key in tolerance}


def _measured_record(errors: object) -> dict[str, Any] | None:
    if not isinstance(errors, Mapping):
        return None
    return {key: jsonable(errors[key]) for key in _MEASURES if key in errors}


def main(argv: Sequence[str] | None = None) -> int:
    """Validate the preflight file against the spec file; 0 only for passed or not applicable.

    Exit status 1 stands for failed or unverified, 2 for files that cannot be read.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m evidence.correctness SPEC.json PREFLIGHT.json\n")
        return 2
    try:
        spec, report = (_read(Path(name)) for name in arguments)
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    held = as_mapping(report).get("correctness_preflight")
    result = validate(spec, report if held is None else held)
    sys.stdout.write(json.dumps(result.to_record(), indent=1) + "\n")
    return 0 if result.status in ("passed", "not_applicable") else 1


def _read(path: Path) -> object:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise InputError("file", str(path), f"a readable file ({error})") from error
    return loads_strict(data, where=str(path))


if __name__ == "__main__":
    raise SystemExit(main())
