"""What is left of an experiment's budget, counted before a diagnostic asks a service for anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from evidence.diagnostic_file import DiagnosticFile
from evidence.errors import InputError
from evidence.execution import ExecutionFile
from evidence.run import Run
from evidence.spec import Spec


class BudgetExhausted(Exception):
    """Nothing is left of the experiment's budget; nothing was asked of the service."""


@dataclass(frozen=True, slots=True)
class RemainingBudget:
    """What a diagnostic may use.

    Attributes:
        cap_minutes: its hard cap: the settings' one, or what is left if that is less.
        used_minutes: wall minutes used before.
        budget_minutes: the experiment's wall budget; None for no limit.
        used_gpu_hours: GPU-hours used before; None where nobody says.
        budget_gpu_hours: the experiment's; None for no limit.
    """

    cap_minutes: float
    used_minutes: float
    budget_minutes: float | None
    used_gpu_hours: float | None
    budget_gpu_hours: float | None

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return {name: getattr(self, name) for name in self.__slots__}


def remaining_budget(
    spec: Spec, execution: ExecutionFile, settings: DiagnosticFile, *, earlier: Run | None
) -> RemainingBudget:
    """Count what is left, from the earlier run's files or the settings.

    Raises:
        BudgetExhausted: if nothing is.
    """
    used = settings.budget_used.wall_minutes
    gpu_hours = settings.budget_used.gpu_hours
    if earlier is not None:
        used += minutes_of(earlier)
        gpu_hours = _gpu_hours(earlier) if gpu_hours is None else gpu_hours
    budget = spec.budget
    limits = [settings.wall_minutes]
    if budget.max_wall_minutes is not None:
        limits.append(budget.max_wall_minutes - used)
    gpus = execution.feasibility.gpu_count
    if budget.gpu_hours is not None and gpus:
        limits.append(60.0 * (budget.gpu_hours - (gpu_hours or 0.0)) / gpus)
    if min(limits) <= 0:
        raise BudgetExhausted(
            f"nothing is left of the budget: {used:.4g} of {budget.max_wall_minutes} wall minutes "
            f"and {gpu_hours} of {budget.gpu_hours} GPU-hours are used"
        )
    return RemainingBudget(
        cap_minutes=min(limits),
        used_minutes=used,
        budget_minutes=budget.max_wall_minutes,
        used_gpu_hours=gpu_hours,
        budget_gpu_hours=budget.gpu_hours,
    )


def minutes_of(run: Run) -> float:
    """Wall minutes from the first to the last event of a run."""
    events = run.events()
    if not events:
        return 0.0
    first, last = (datetime.fromisoformat(events[index]["at"]) for index in (0, -1))
    return max(0.0, (last - first).total_seconds() / 60.0)


def _gpu_hours(run: Run) -> float | None:
    usage = (run.result() or {}).get("observed_usage")
    value = usage.get("gpu_hours") if isinstance(usage, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def check_earlier(earlier: Run, spec: Spec) -> None:
    """Refuse an earlier run of another experiment.

    Raises:
        InputError: if its spec is not this one, nor derived from it.
    """
    if spec.digest in (earlier.spec_sha256, earlier.identity.get("original_spec_sha256")):
        return
    raise InputError("--from-run", earlier.spec_sha256, f"a run of the spec {spec.digest}")
