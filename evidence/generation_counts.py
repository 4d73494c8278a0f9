"""How many candidates a measured yield asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from evidence.values import as_mapping, is_count


@dataclass(frozen=True, slots=True)
class GenerationCounts:
    """Planned sizes of task generation.

    Attributes:
        candidates: candidates to generate; None if that cannot be projected.
        filter_samples: samples to filter them with; None likewise.
        problem: why not, None if they could be projected.
    """

    candidates: int | None
    filter_samples: int | None
    problem: str | None = None

    @property
    def status(self) -> Literal["projected", "unknown"]:
        """Whether the sizes could be projected."""
        return "projected" if self.problem is None else "unknown"

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"candidates": self.candidates, "filter_samples": self.filter_samples}


def generation_counts(generation: object) -> GenerationCounts:
    """Project a pilot's yield: candidates = ceil(target * attempted / accepted).

    Each candidate needs ``filter_samples_per_candidate`` samples to be filtered.

    Args:
        generation: reported ``attempted``, ``accepted``, ``target_accepted`` and
            ``filter_samples_per_candidate``, whole numbers.
    """
    found = as_mapping(generation)
    names = ("attempted", "accepted", "target_accepted", "filter_samples_per_candidate")
    numbers: list[Any] = [found.get(name) for name in names]
    if generation is None:
        return _unknown("Measured generation yield was not recorded")
    if not all(map(is_count, numbers)):
        return _unknown("Invalid generation yield: four whole numbers are needed")
    attempted, accepted, target, per_candidate = numbers
    if accepted == 0 or accepted > attempted or target == 0:
        return _unknown("Measured generation yield cannot be projected")
    candidates = -(-target * attempted // accepted)
    return GenerationCounts(candidates, candidates * per_candidate)


def _unknown(problem: str) -> GenerationCounts:
    return GenerationCounts(None, None, problem)
