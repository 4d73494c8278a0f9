"""Feasibility: a projection from measured timings, held against the wall and GPU budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from evidence.applicability import Applicability, check_applicability
from evidence.gate import GateResult, GateStatus, SourceRef
from evidence.generation_counts import GenerationCounts, generation_counts
from evidence.timing import PhaseProjection, project_phase, project_recovery
from evidence.values import as_mapping, is_number, is_text, jsonable, same, show, spec_mapping

__all__ = ["FeasibilityResult", "GenerationCounts", "generation_counts", "validate"]

FeasibilityStatus = Literal["feasible", "infeasible", "unknown"]

RECHECKED = (
    "base_model",
    "lora_rank",
    "dataset",
    "steps",
    "batch_size",
    "max_seq_len",
    "arms",
    "n_examples",
)
"""Settings that must be recorded, and unchanged since the timing pilot; in the answer's order."""

NECESSARY_PHASES = ("setup", "training", "evaluation")
GENERATION_PHASES = ("generation", "filter", "audit")
NOT_RECORDED = "Measured feasibility not recorded"
_SECONDS_PER_MINUTE = 60
_GATE_STATUS: Mapping[FeasibilityStatus, GateStatus] = {
    "feasible": "passed",
    "infeasible": "failed",
    "unknown": "unverified",
}


@dataclass(frozen=True, slots=True)
class FeasibilityResult:
    """The answer to a feasibility report.

    Attributes:
        status: ``unknown`` while any problem stands, else whether the projection fits the budget.
        problems: what prevents a projection, or by how much it exceeds the budget.
        wall_seconds: projected total, recovery reserve included; None while unknown.
        gpu_hours: projected total where every phase has an allocation source, else None.
        known_gpu_hours: sum over the phases that have one.
        phases: projections of the valid phases, in the order of the report.
        counts: candidates and filter samples that the measured yield asks for.
        applicability: whether tasks are generated; None if nothing was reported.
        record: the report as given; None if nothing was reported.
        recorded_at: when it was recorded, as given.
        has_recorded_at: whether that was given at all.
    """

    status: FeasibilityStatus
    problems: tuple[str, ...]
    wall_seconds: float | None = None
    gpu_hours: float | None = None
    known_gpu_hours: float = 0
    phases: Mapping[str, PhaseProjection] = field(default_factory=dict)
    counts: GenerationCounts | None = None
    applicability: Applicability | None = None
    record: Any = None
    recorded_at: Any = None
    has_recorded_at: bool = False

    def to_record(self) -> dict[str, Any]:
        """Return the contract's object, keys in its order.

        Where nothing was reported it ends after ``phases``.
        """
        answer: dict[str, Any] = {
            "status": self.status,
            "problems": list(self.problems),
            "wall_seconds": self.wall_seconds,
            "gpu_hours": self.gpu_hours,
            "known_gpu_hours": self.known_gpu_hours,
            "phases": {name: phase.to_record() for name, phase in self.phases.items()},
        }
        if self.applicability is not None:
            answer["generation_counts"] = None if self.counts is None else self.counts.to_record()
            answer["generation_applicability"] = self.applicability.to_record()
            answer["record"] = jsonable(self.record)
        if self.has_recorded_at:
            answer["recorded_at"] = jsonable(self.recorded_at)
        return answer

    def to_gate(self, reads: Sequence[SourceRef] = ()) -> GateResult:
        """Return the answer as a gate."""
        return GateResult(
            gate="feasibility",
            status=_GATE_STATUS[self.status],
            reasons=self.problems,
            reads=tuple(reads),
            validation=self.to_record(),
        )


_NO_DATE = object()


def validate(spec: object, record: object, *, recorded_at: object = _NO_DATE) -> FeasibilityResult:
    """Project a reported timing pilot and hold it against the budget of the spec.

    Args:
        spec: the spec as given (or a triage document, or a parsed `Spec`).
        record: the reported feasibility object; None means that nothing was measured.
        recorded_at: when the report was recorded: seconds since 1970, or a date with its zone.
    """
    dated = recorded_at is not _NO_DATE
    when = recorded_at if dated else None
    if record is None:
        return FeasibilityResult(
            "unknown", (NOT_RECORDED,), recorded_at=when, has_recorded_at=dated
        )
    document = spec_mapping(spec)
    report = as_mapping(record)
    problems = [] if isinstance(record, Mapping) else ["Feasibility must be an object"]
    problems += _changes(report) + _endpoint(document, report)
    phases, timing_problems = _project(report)
    applicability = check_applicability(document, "generation_audit")
    counts, generation_problems = _generation(report, applicability)
    problems += timing_problems + generation_problems
    if dated and not _is_moment(when):
        problems.append("recorded_at must be seconds since 1970 or a date with its zone")
    budget_problems, fits = _fit(as_mapping(document.get("budget")), phases)
    if problems or fits is None:
        status: FeasibilityStatus = "unknown"
        totals: _Totals = (None, None, 0)
        problems += budget_problems if fits is None else []
    else:
        status = "feasible" if fits else "infeasible"
        totals = _sum(phases)
        problems += budget_problems
    return FeasibilityResult(
        status=status,
        problems=tuple(problems),
        wall_seconds=totals[0],
        gpu_hours=totals[1],
        known_gpu_hours=totals[2],
        phases=phases,
        counts=counts,
        applicability=applicability,
        record=record,
        recorded_at=when,
        has_recorded_at=dated,
    )


_Totals = tuple[float | None, float | None, float]


def _changes(report: Mapping[str, Any]) -> list[str]:
    timed, effective = as_mapping(report.get("config")), as_mapping(report.get("effective_config"))
    return [
        f"Re-projection required: {key} changed or was not recorded"
        for key in RECHECKED
        if timed.get(key) is None
        or effective.get(key) is None
        or not same(timed[key], effective[key])
    ]


def _endpoint(document: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    planned = document.get("primary_endpoint")
    if planned is None:
        planned = as_mapping(document.get("eval")).get("metric")
    found = report.get("primary_endpoint")
    problems = []
    if not (is_text(planned) and isinstance(found, str) and planned == found):
        problems.append("Primary endpoint changed or was not recorded")
    if not is_text(report.get("source")):
        problems.append("Timing source was not recorded")
    return problems


def _project(report: Mapping[str, Any]) -> tuple[dict[str, PhaseProjection], list[str]]:
    phases: dict[str, PhaseProjection] = {}
    problems = []
    measurements = as_mapping(report.get("measurements"))
    for name, measurement in measurements.items():
        if name not in NECESSARY_PHASES + GENERATION_PHASES:
            problems.append(f"Unknown timing phase: {show(name)}")
            continue
        phase = project_phase(measurement)
        if phase is None:
            problems.append(f"Invalid measured timing/counts for {name}")
        else:
            phases[name] = phase
    problems += [
        f"Measured timing not recorded for {name}"
        for name in NECESSARY_PHASES
        if name not in measurements
    ]
    recovery = project_recovery(report.get("recovery"))
    if recovery is None:
        problems.append("Recovery reserve was not recorded")
    else:
        phases["recovery"] = recovery
    return phases, problems


def _generation(
    report: Mapping[str, Any], applicability: Applicability
) -> tuple[GenerationCounts | None, list[str]]:
    """Size the generation of tasks; required unless the spec declares that none is trained on."""
    reported = report.get("generation")
    if reported is None and not applicability.enforce:
        return None, []
    counts = generation_counts(reported)
    problems = [counts.problem] if counts.problem is not None else []
    measurements = as_mapping(report.get("measurements"))
    sizes = {"generation": counts.candidates, "filter": counts.filter_samples, "audit": None}
    for name in GENERATION_PHASES:
        needed = sizes[name]
        planned = as_mapping(measurements.get(name)).get("planned_units")
        if name not in measurements:
            if needed != 0 and (name != "audit" or applicability.enforce):
                problems.append(f"Measured timing not recorded for {name}")
        elif needed is not None and is_number(planned) and planned < needed:
            problems.append(f"Re-projection required: {name} needs {needed} planned units")
    return counts, problems


def _sum(phases: Mapping[str, PhaseProjection]) -> tuple[float, float | None, float]:
    known = [phase.gpu_hours for phase in phases.values() if phase.gpu_hours is not None]
    hours: float = sum(known)
    wall = sum(phase.wall_seconds for phase in phases.values())
    return wall, hours if len(known) == len(phases) else None, hours


def _fit(
    budget: Mapping[str, Any], phases: Mapping[str, PhaseProjection]
) -> tuple[list[str], bool | None]:
    """Compare with the budget; GPU hours that are not known do not block by themselves."""
    minutes, gpu_limit = budget.get("max_wall_minutes"), budget.get("gpu_hours")
    if not is_number(minutes) or minutes <= 0:
        return ["The spec's budget states no max_wall_minutes"], None
    if gpu_limit is not None and not is_number(gpu_limit):
        return ["The spec's budget states no valid gpu_hours"], None
    wall, _, known = _sum(phases)
    if not (is_number(wall) and is_number(known)):
        return ["The projected total is no finite number"], None
    limit = minutes * _SECONDS_PER_MINUTE
    problems = []
    if not wall <= limit:
        problems.append(f"Projected {wall:.1f} s of wall time exceed the budget of {limit:g} s")
    if gpu_limit is not None and not known <= gpu_limit:
        problems.append(f"Projected {known:.3f} known GPU-hours exceed the budget of {gpu_limit:g}")
    return problems, not problems


def _is_moment(value: object) -> bool:
    if value is None or is_number(value):
        return True
    if not isinstance(value, str):
        return False
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False
