"""The verdict on the spec's hypothesis: what the run claims, less what its checks withhold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evidence.deviations import OTHER_HYPOTHESIS
from evidence.output import DEFINITIVE, VERDICTS
from evidence.values import as_list, as_mapping, is_text, show

_GRANTING = frozenset(
    {"passed", "not_applicable", "valid", "comparable", "verified", "feasible", "consistent"}
)
_FLAGGING = frozenset({"deviations"})
"""Checks that are reported beside a verdict and withhold nothing."""


@dataclass(frozen=True, slots=True)
class VerdictResult:
    """What is recorded for the hypothesis.

    Attributes:
        verdict: ``supported``, ``refuted`` or ``inconclusive``. Never more than was claimed.
        reasons: why it is not what was claimed.
        reported_verdict: the claim, kept where a check withholds it; else None.
        changed_experiment_verdict: the claim, kept for the experiment that was run in place of
            the spec's; else None.
    """

    verdict: str
    reasons: tuple[str, ...] = ()
    reported_verdict: str | None = None
    changed_experiment_verdict: str | None = None

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object; the kept claims appear only where there is one."""
        record: dict[str, Any] = {"verdict": self.verdict, "reasons": list(self.reasons)}
        if self.reported_verdict is not None:
            record["reported_verdict"] = self.reported_verdict
        if self.changed_experiment_verdict is not None:
            record["changed_experiment_verdict"] = self.changed_experiment_verdict
        return record


def judge(report: object, *, gates: Mapping[str, object] | None = None) -> VerdictResult:
    """Say which verdict a final output earns for the spec's hypothesis.

    A claim of ``supported`` or ``refuted`` stands only if the spec's hypothesis was tested, every
    check passed or does not apply, and the recomputed decision, where there is one, says the same.

    Args:
        report: the structured output.
        gates: status by name of check; ``decision`` holds the recomputed decision's status.
    """
    output = as_mapping(report)
    claim = output.get("verdict")
    if not isinstance(claim, str) or claim not in VERDICTS:
        return VerdictResult("inconclusive", ("The output has no valid verdict.",))
    other = _other_hypothesis(output)
    withheld = _withheld(claim, gates or {}) if claim in DEFINITIVE else []
    if claim in DEFINITIVE and output.get("status") != "succeeded":
        withheld.append("The execution did not succeed.")
    return VerdictResult(
        verdict="inconclusive" if other or withheld else claim,
        reasons=tuple(other + withheld),
        reported_verdict=claim if withheld else None,
        changed_experiment_verdict=claim if other else None,
    )


def _other_hypothesis(output: Mapping[str, Any]) -> list[str]:
    reasons = []
    tested = output.get("original_hypothesis_tested")
    if tested is not None and tested is not True:
        instead = output.get("tested_instead")
        said = f": {show(instead)}" if is_text(instead) else ""
        reasons.append(f"The original hypothesis was not tested{said}.")
    changed = [as_mapping(entry).get("field") for entry in as_list(output.get("deviations"))]
    reasons += [
        f"The {field} was changed, so the original hypothesis was not tested."
        for field in OTHER_HYPOTHESIS
        if field in changed
    ]
    return reasons


def _withheld(claim: str, gates: Mapping[str, object]) -> list[str]:
    reasons = []
    for name, status in gates.items():
        if name == "decision":
            granted = status in (claim, "not_applicable")
        else:
            granted = name in _FLAGGING or (isinstance(status, str) and status in _GRANTING)
        if not granted:
            reasons.append(f"{show(name)} is {show(status)}.")
    return reasons
