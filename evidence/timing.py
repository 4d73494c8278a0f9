"""Project one measured phase of a run to its planned size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evidence.values import is_number, is_text

_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class PhaseProjection:
    """The projection of one phase.

    Attributes:
        wall_seconds: projected wall time.
        gpu_hours: projected GPU hours; None without a count and the evidence of its allocation.
        planned_units: units that were planned, as reported; None for the recovery reserve.
        planned_samples: projected samples; None for the recovery reserve.
    """

    wall_seconds: float
    gpu_hours: float | None
    planned_units: float | None = None
    planned_samples: float | None = None

    def to_record(self) -> dict[str, Any]:
        """Return the contract's object, keys in its order."""
        if self.planned_units is None:
            return {"wall_seconds": self.wall_seconds, "gpu_hours": self.gpu_hours}
        return {
            "wall_seconds": self.wall_seconds,
            "planned_units": self.planned_units,
            "planned_samples": self.planned_samples,
            "gpu_hours": self.gpu_hours,
        }


def project_phase(measurement: object) -> PhaseProjection | None:
    """Scale a timed phase: wall = seconds * planned_units / units, and samples alike.

    Args:
        measurement: reported ``seconds``, ``units``, ``planned_units``, ``samples``, ``gpu_count``
            and ``allocation_source``.

    Returns:
        None if the timing or a count is no measurement: not a finite number, negative, or no unit
        timed or planned.
    """
    if not isinstance(measurement, Mapping):
        return None
    names = ("seconds", "units", "planned_units", "samples")
    numbers: list[Any] = [measurement.get(name) for name in names]
    if not all(is_number(number) and number >= 0 for number in numbers):
        return None
    seconds, units, planned, samples = numbers
    if not (units > 0 and planned > 0):
        return None
    try:
        wall, scaled = seconds * planned / units, samples * planned / units
    except OverflowError:
        return None
    return _with_gpus(measurement, wall, planned=planned, samples=scaled)


def project_recovery(recovery: object) -> PhaseProjection | None:
    """Take the recovery reserve as it is, unscaled; None if it is no measurement of time."""
    if not isinstance(recovery, Mapping):
        return None
    seconds = recovery.get("seconds")
    if not is_number(seconds) or seconds < 0:
        return None
    return _with_gpus(recovery, seconds, planned=None, samples=None)


def _with_gpus(
    phase: Mapping[str, Any], wall: float, *, planned: float | None, samples: float | None
) -> PhaseProjection | None:
    """Add GPU hours, which count only with evidence of the allocation."""
    gpus = phase.get("gpu_count")
    if gpus is not None and (not is_number(gpus) or gpus < 0):
        return None
    hours = None
    if gpus is not None and is_text(phase.get("allocation_source")):
        hours = float(wall) * float(gpus) / _SECONDS_PER_HOUR
    if not all(number is None or is_number(number) for number in (wall, samples, hours)):
        return None
    return PhaseProjection(wall, hours, planned, samples)
