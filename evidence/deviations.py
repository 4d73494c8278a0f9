"""Deviations from the spec, and whether they were recorded before the training they concern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from evidence.values import as_list, as_mapping, is_text, show

DeviationStatus = Literal["recorded", "unrecorded", "invalid"]

FIELDS = (
    "model",
    "objective",
    "effective_batch",
    "steps",
    "dataset",
    "evaluator",
    "endpoint",
)
"""What a deviation may concern."""

OTHER_HYPOTHESIS = ("objective", "endpoint")
"""Fields whose change always means that the spec's hypothesis is not tested."""

_PARTS = ("original", "effective", "reason")


@dataclass(frozen=True, slots=True)
class DeviationsResult:
    """The answer to the deviations of a sequence of updates.

    Attributes:
        status: ``unrecorded`` if a deviation was first posted in a final update, else ``invalid``
            if one has not the contract's form, else ``recorded`` (also where there is none).
        issues: one sentence each.
        deviations: every well-formed deviation of the last update that has any.
    """

    status: DeviationStatus
    issues: tuple[str, ...]
    deviations: tuple[Mapping[str, Any], ...]

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "status": self.status,
            "issues": list(self.issues),
            "deviations": [dict(deviation) for deviation in self.deviations],
        }


def shape_issues(deviations: object) -> list[str]:
    """List what in a ``deviations`` field has not the contract's form; None means none."""
    if deviations is None:
        return []
    if not isinstance(deviations, list | tuple):
        return ["deviations: expected a list."]
    issues = []
    for number, entry in enumerate(deviations):
        found = as_mapping(entry)
        field = found.get("field")
        if not isinstance(field, str) or field not in FIELDS:
            issues.append(f"deviations[{number}].field: expected one of {', '.join(FIELDS)}.")
        issues += [
            f"deviations[{number}].{part}: expected text."
            for part in _PARTS
            if not is_text(found.get(part))
        ]
    return issues


def validate(updates: object) -> DeviationsResult:
    """Say whether every deviation was posted while the run was still running.

    Two deviations are the same if field, original and effective are; the reason may be reworded.

    Args:
        updates: structured outputs, oldest first; a single one counts as a sequence of one.
    """
    sequence = [updates] if isinstance(updates, Mapping) else as_list(updates)
    issues: list[str] = []
    late: list[str] = []
    posted: set[tuple[str, ...]] = set()
    latest: list[Mapping[str, Any]] = []
    for number, update in enumerate(sequence, start=1):
        report = as_mapping(update)
        field = report.get("deviations")
        issues += [f"Update {number}: {text}" for text in shape_issues(field)]
        entries = [entry for entry in as_list(field) if isinstance(entry, Mapping)]
        named = [key for key in map(_key, entries) if key is not None]
        if report.get("status") == "running":
            posted.update(named)
        else:
            late += [
                f"Deviation {show(key[0])} was first posted in a final update."
                for key in named
                if key not in posted
            ]
        latest = entries or latest
    status: DeviationStatus = "unrecorded" if late else "invalid" if issues else "recorded"
    good = [entry for entry in latest if not shape_issues([entry])]
    return DeviationsResult(status, tuple(late + issues), tuple(_clean(good)))


def _key(entry: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return what makes a deviation that one, None if it is not said in words."""
    parts = [entry.get(part) for part in ("field", "original", "effective")]
    texts = [part for part in parts if isinstance(part, str)]
    return tuple(texts) if len(texts) == len(parts) else None


def _clean(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{part: entry[part] for part in ("field", *_PARTS)} for entry in entries]
