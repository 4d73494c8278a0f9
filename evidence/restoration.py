"""Restoration preflight: all arms of a group start from one checkpoint, with the planned optimizer.

Each arm is judged alone by `evidence.restoration_arm`; here the arms of a group are compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evidence.applicability import check_applicability
from evidence.gate import CheckResult, GateResult, GateStatus, SourceRef
from evidence.restoration_arm import ArmEvidence, Finding, judge_arm, worst
from evidence.values import as_list, as_mapping, is_count, is_text, show, spec_mapping

MISSING_ARM = "missing or duplicate arm evidence."


@dataclass(frozen=True, slots=True)
class RestorationResult:
    """The answer to an initialization provenance.

    Attributes:
        status: ``failed`` if a difference was observed, else ``unverified`` if a proof is missing,
            else ``passed``; ``not_applicable`` where no comparison of states is needed.
        required: whether the preflight is required.
        checks: one row for each planned arm, then rows for each group whose arms all reported.
        applicability: status of the applicability of the check.
        note: the reason where there is no row to carry it.
    """

    status: GateStatus
    required: bool
    checks: tuple[CheckResult, ...]
    applicability: str
    note: str | None = None

    @property
    def reason(self) -> str | None:
        """The reason of the first row that has the status of the whole."""
        rows = (row.reason for row in self.checks if row.status == self.status)
        return self.note or next(rows, None)

    def to_record(self) -> dict[str, Any]:
        """Return the contract's object, keys in its order."""
        return {
            "status": self.status,
            "required": self.required,
            "checks": [
                {"check": row.check, "status": row.status, "reason": row.reason}
                for row in self.checks
            ],
            "reason": self.reason,
            "applicability": self.applicability,
        }

    def to_gate(self, reads: Sequence[SourceRef] = ()) -> GateResult:
        """Return the answer as a gate; unlike the contract's answer it lists every reason."""
        every = [row.reason for row in self.checks if row.reason is not None]
        return GateResult(
            gate="restoration",
            status=self.status,
            reasons=tuple([self.note] if self.note else every),
            checks=self.checks,
            reads=tuple(reads),
            validation=self.to_record(),
        )


@dataclass(frozen=True, slots=True)
class _Report:
    """A provenance: its version, and its entries by the arm that they name."""

    version: object
    entries: Mapping[str, list[Mapping[str, Any]]]

    @classmethod
    def of(cls, report: object) -> _Report:
        entries: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for entry in map(as_mapping, as_list(as_mapping(report).get("arms"))):
            if isinstance(entry.get("arm"), str):
                entries[entry["arm"]].append(entry)
        return cls(as_mapping(report).get("version"), entries)


def validate(spec: object, report: object) -> RestorationResult:
    """Judge a reported initialization provenance against the restoration plan of the spec.

    Args:
        spec: the spec as given (or a triage document, or a parsed `Spec`).
        report: the reported ``initialization_provenance``; anything else counts as missing.
    """
    applicability = check_applicability(spec, "restoration_preflight")
    if applicability.status == "not_applicable":
        return RestorationResult(
            "not_applicable", False, (), applicability.status, applicability.reasons[0]
        )
    document = spec_mapping(spec)
    plan = as_mapping(document.get("restoration_preflight"))
    provenance = _Report.of(report)
    rows: list[CheckResult] = []
    for number, group in enumerate(as_list(plan.get("groups")), start=1):
        rows.extend(_judge_group(number, as_mapping(group), plan, document, provenance))
    if not rows:
        note = "The spec names no initialization group."
        return RestorationResult("unverified", True, (), applicability.status, note)
    return RestorationResult(
        status=worst(row.status for row in rows),
        required=True,
        checks=tuple(rows),
        applicability=applicability.status,
    )


def _judge_group(
    number: int,
    group: Mapping[str, Any],
    plan: Mapping[str, Any],
    document: Mapping[str, Any],
    report: _Report,
) -> list[CheckResult]:
    label = f"group {number}"
    planned = [as_mapping(arm) for arm in as_list(group.get("arms"))]
    if not planned:
        return [_row(label, Finding("unverified", "the spec names no arm."))]
    fixed_batch = True in (plan.get("fixed_batch_required"), group.get("fixed_batch_required"))
    times = Counter(arm["name"] for arm in planned if is_text(arm.get("name")))
    rows: list[CheckResult] = []
    arms: list[ArmEvidence] = []
    for arm in planned:
        evidence, row = _judge_planned(arm, times, report, fixed_batch=fixed_batch)
        rows.append(row)
        if evidence is not None:
            arms.append(evidence)
    if len(arms) < len(planned):
        return rows
    if len(planned) == 1:
        return [*rows, _row(f"{label}: lone arm", _lone_arm(document, arms[0]))]
    rows.append(_row(f"{label}: initialization", _compare_identity(arms)))
    if fixed_batch or sum(arm.output is not None for arm in arms) > 1:
        rows.append(_row(f"{label}: initial output", _compare_output(arms)))
    return rows


def _judge_planned(
    arm: Mapping[str, Any],
    times: Mapping[str, int],
    report: _Report,
    *,
    fixed_batch: bool,
) -> tuple[ArmEvidence | None, CheckResult]:
    name = arm.get("name")
    if not is_text(name):
        return None, _row("(unnamed arm)", Finding("unverified", "the spec's arm has no name."))
    matching = report.entries.get(name, [])
    if len(matching) != 1 or times[name] > 1:
        return None, _row(name, Finding("unverified", MISSING_ARM))
    evidence = judge_arm(arm, matching[0], version=report.version, fixed_batch=fixed_batch)
    return evidence, _row(name, evidence.finding)


def _row(check: str, finding: Finding) -> CheckResult:
    reason = None if finding.problem is None else f"{show(check)}: {finding.problem}"
    return CheckResult(check=check, status=finding.status, reason=reason)


def _lone_arm(document: Mapping[str, Any], arm: ArmEvidence) -> Finding:
    features = as_mapping(document.get("experiment_features"))
    resumed = (
        features.get("checkpoint_restore") is True and features.get("paired_training_arms") is False
    )
    if resumed and is_count(arm.restore_count) and arm.restore_count >= 1:
        return Finding("passed")
    return Finding(
        "unverified",
        "one arm alone needs checkpoint_restore=true, paired_training_arms=false and a restore.",
    )


def _compare_identity(arms: Sequence[ArmEvidence]) -> Finding:
    """Compare every available identity; arms must be connected by shared hashes or URIs."""
    if len({arm.base for arm in arms if arm.base is not None}) > 1:
        return Finding("failed", "the arms name different base checkpoints.")
    hashes = [arm.adapter for arm in arms if arm.adapter is not None]
    if len(set(hashes)) > 1:
        return Finding("failed", "the arms have different adapters.")
    if any(arm.adapter is None and arm.uri is None for arm in arms):
        return Finding("unverified", "not every arm proves which checkpoint it started from.")
    parts = _components(arms)
    if len(parts) == 1:
        return Finding("passed")
    loaded = [part for part in parts if any(arm.uri is not None for arm in part)]
    if len(loaded) > 1:
        return Finding("failed", "the arms loaded different checkpoints.")
    return Finding("unverified", "the arms' proofs share no adapter hash and no checkpoint URI.")


def _components(arms: Sequence[ArmEvidence]) -> list[list[ArmEvidence]]:
    """Split arms into the sets that shared identities connect."""
    sharing: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    for number, arm in enumerate(arms):
        for identity in (("adapter", arm.adapter), ("uri", arm.uri)):
            if identity[1] is not None:
                sharing[identity].append(number)
    part_of = list(range(len(arms)))
    for linked in sharing.values():
        for other in linked[1:]:
            part_of[_root(part_of, other)] = _root(part_of, linked[0])
    parts: dict[int, list[ArmEvidence]] = defaultdict(list)
    for number, arm in enumerate(arms):
        parts[_root(part_of, number)].append(arm)
    return list(parts.values())


def _root(part_of: list[int], number: int) -> int:
    """Return the arm that stands for a part, shortening the way to it."""
    while part_of[number] != number:
        part_of[number] = part_of[part_of[number]]
        number = part_of[number]
    return number


def _compare_output(arms: Sequence[ArmEvidence]) -> Finding:
    """Compare outputs of the arms on the same fixed batch before the first update."""
    outputs: dict[str, set[str]] = {}
    for arm in arms:
        if arm.output is not None:
            batch, output = arm.output
            outputs.setdefault(batch, set()).add(output)
    if any(len(found) > 1 for found in outputs.values()):
        return Finding("failed", "the arms give different outputs on the same batch.")
    if any(arm.output is None for arm in arms):
        return Finding("unverified", "not every arm recorded its output on the fixed batch.")
    if len(outputs) > 1:
        return Finding("unverified", "the arms recorded outputs on different batches.")
    return Finding("passed")
