"""The structured output of a run: its form, its consistency, and how it may change.

A run posts its output again and again. Whatever has been posted stays: numbers do not disappear,
finished arms stay finished, and deviations stay listed. Only the last output has a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evidence import capacity, deviations
from evidence.canonical import digest
from evidence.capacity import Consistency
from evidence.errors import InputError
from evidence.values import as_list, as_mapping, is_number, is_text, jsonable, show, spec_mapping

STATUSES = ("running", "succeeded", "failed")
VERDICTS = ("supported", "refuted", "inconclusive")
DEFINITIVE = ("supported", "refuted")
OUTCOME_REASONS = (
    "supported",
    "refuted",
    "tie",
    "mixed_criteria",
    "insufficient_evidence",
    "incomplete_execution",
)
KEY_ORDER = (
    "status",
    "summary",
    "metrics",
    "completed_arms",
    "verdict",
    "outcome_reason",
    "capacity_block",
    "deviations",
    "original_hypothesis_tested",
    "tested_instead",
)
"""Keys of the contract's object; further blocks (evaluation, decision, ...) come after them."""


@dataclass(frozen=True, slots=True)
class OutputResult:
    """The answer to a structured output.

    Attributes:
        status: whether the output has the contract's form and does not contradict itself.
        issues: one sentence each, naming the field.
    """

    status: Consistency
    issues: tuple[str, ...]

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"status": self.status, "issues": list(self.issues)}


def validate(report: object, *, spec: object = None, previous: object = None) -> OutputResult:
    """Judge one structured output, alone or against the one posted before it.

    Args:
        report: the output; anything but an object is inconsistent.
        spec: the spec, to know which arms a definitive verdict needs; None if not at hand.
        previous: the output posted before, None for the first.
    """
    return _result(_issues(report, spec) + _lost(as_mapping(previous), as_mapping(report)))


def validate_history(
    updates: object, *, spec: object = None, base_arm: str | None = None
) -> OutputResult:
    """Judge a whole sequence of outputs, oldest first.

    Args:
        updates: the outputs in the order in which they were posted.
        spec: as for `validate`.
        base_arm: name under which the base model's metrics are posted; where given, they must be
            there before any arm is completed.
    """
    if not isinstance(updates, list | tuple):
        return _result(["updates: expected a list of outputs."])
    issues: list[str] = []
    previous: Mapping[str, Any] = {}
    for number, update in enumerate(updates, start=1):
        found = as_mapping(update)
        problems = _issues(update, spec) + _lost(previous, found)
        if base_arm is not None and as_list(found.get("completed_arms")):
            arms = as_mapping(as_mapping(found.get("metrics")).get("arms"))
            if not as_mapping(arms.get(base_arm)):
                problems.append(f"metrics.arms.{base_arm}: expected before any arm completes.")
        issues += [f"Update {number}: {problem}" for problem in problems]
        previous = found
    return _result(issues)


def apply_update(previous: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the next output: the previous one with a patch on top, nothing posted lost.

    Metrics are merged by name, completed arms and deviations are added to those posted before, and
    every other field is replaced by the patch's.

    Args:
        previous: the output posted last; ``{}`` for the first.
        patch: fields to change or add.

    Raises:
        InputError: if the result would not be a consistent output.
    """
    merged: dict[str, Any] = {**previous, **patch}
    metrics = {**as_mapping(previous.get("metrics")), **as_mapping(patch.get("metrics"))}
    arms = _merged_arms(previous, patch)
    if arms:
        metrics["arms"] = arms
    merged["metrics"] = metrics
    merged["completed_arms"] = _union(previous, patch, "completed_arms")
    if "deviations" in previous or "deviations" in patch:
        merged["deviations"] = _union(previous, patch, "deviations")
    merged.setdefault("summary", "Started.")
    result = validate(merged, previous=previous)
    if result.issues:
        raise InputError("structured output", merged, f"a consistent output ({result.issues[0]})")
    return {key: merged[key] for key in (*KEY_ORDER, *merged) if key in merged}


def _result(issues: Sequence[str]) -> OutputResult:
    return OutputResult("inconsistent" if issues else "consistent", tuple(issues))


def _issues(report: object, spec: object) -> list[str]:
    if not isinstance(report, Mapping):
        return ["structured output: expected an object."]
    issues = list(_form(report))
    issues += _metric_issues(report.get("metrics"))
    issues += _running(report) if report.get("status") == "running" else _final(report, spec)
    issues += capacity.block_issues(report)
    issues += deviations.shape_issues(report.get("deviations"))
    return issues


def _form(report: Mapping[str, Any]) -> Iterator[str]:
    status = report.get("status")
    if not isinstance(status, str) or status not in STATUSES:
        yield f"status: expected one of {', '.join(STATUSES)}."
    if not is_text(report.get("summary")):
        yield "summary: expected text."
    arms = report.get("completed_arms")
    names = as_list(arms)
    if not isinstance(arms, list | tuple) or not all(map(is_text, names)):
        yield "completed_arms: expected a list of arm names."
    elif len(set(names)) < len(names):
        yield "completed_arms: expected each arm once."
    tested = report.get("original_hypothesis_tested")
    if tested is not None and not isinstance(tested, bool):
        yield "original_hypothesis_tested: expected true or false."
    if tested is False and not is_text(report.get("tested_instead")):
        yield "tested_instead: expected the claim that was tested instead."


def _metric_issues(metrics: object) -> list[str]:
    if not isinstance(metrics, Mapping):
        return ["metrics: expected an object of numbers."]
    arms = metrics.get("arms", {})
    issues = [] if isinstance(arms, Mapping) else ["metrics.arms: expected an object of arms."]
    for arm, found in as_mapping(arms).items():
        if not isinstance(found, Mapping):
            issues.append(f"metrics.arms.{show(arm)}: expected an object of numbers.")
    return issues + [
        f"metrics.{'.'.join(map(show, path))}: expected a finite number."
        for path, value in _numbers(metrics)
        if not is_number(value)
    ]


def _numbers(metrics: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every metric with its path, those of the arms last."""
    for name, value in metrics.items():
        if name != "arms":
            yield (name,), value
    for arm, found in as_mapping(metrics.get("arms")).items():
        for name, value in as_mapping(found).items():
            yield ("arms", arm, name), value


def _running(report: Mapping[str, Any]) -> Iterator[str]:
    for field in ("verdict", "outcome_reason"):
        if report.get(field) is not None:
            yield f"{field}: expected none while running."


def _final(report: Mapping[str, Any], spec: object) -> Iterator[str]:
    verdict, reason = report.get("verdict"), report.get("outcome_reason")
    if not isinstance(verdict, str) or verdict not in VERDICTS:
        yield f"verdict: expected one of {', '.join(VERDICTS)}."
    if reason is not None:
        if not isinstance(reason, str) or reason not in OUTCOME_REASONS:
            yield f"outcome_reason: expected one of {', '.join(OUTCOME_REASONS)}."
        elif verdict != (reason if reason in DEFINITIVE else "inconclusive"):
            yield f"outcome_reason: {reason} does not go with this verdict."
    if isinstance(verdict, str) and verdict in DEFINITIVE:
        if report.get("status") == "failed":
            yield f"verdict: {verdict} needs an execution that did not fail."
        done = _names(report.get("completed_arms"))
        for arm in _planned_arms(spec):
            if arm not in done:
                yield f"completed_arms: {verdict} needs every arm, {show(arm)} is missing."


def _planned_arms(spec: object) -> list[str]:
    arms = as_list(spec_mapping(spec).get("arms"))
    names = [as_mapping(arm).get("name") for arm in arms]
    return [name for name in names if is_text(name)]


def _lost(previous: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    """List what was posted before and is not there any more."""
    kept = {path for path, _ in _numbers(as_mapping(report.get("metrics")))}
    issues = [
        f"metrics.{'.'.join(map(show, path))}: was posted before and must be kept."
        for path, _ in _numbers(as_mapping(previous.get("metrics")))
        if path not in kept
    ]
    done = _names(report.get("completed_arms"))
    issues += [
        f"completed_arms: {show(arm)} was completed before and must be kept."
        for arm in _names(previous.get("completed_arms"))
        if arm not in done
    ]
    listed = set(map(_identity, as_list(report.get("deviations"))))
    issues += [
        f"deviations: {show(as_mapping(old).get('field'))} was recorded before and must be kept."
        for old in as_list(previous.get("deviations"))
        if _identity(old) not in listed
    ]
    return issues


def _merged_arms(previous: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    old, new = (as_mapping(as_mapping(p.get("metrics")).get("arms")) for p in (previous, patch))
    return {
        arm: {**as_mapping(old.get(arm)), **as_mapping(new.get(arm))}
        for arm in dict.fromkeys([*old, *new])
    }


def _union(previous: Mapping[str, Any], patch: Mapping[str, Any], field: str) -> list[Any]:
    """Return the entries of both lists, those of the previous one first, each once."""
    merged: dict[str, Any] = {}
    for entry in (*as_list(previous.get(field)), *as_list(patch.get(field))):
        merged.setdefault(_identity(entry), entry)
    return list(merged.values())


def _identity(entry: object) -> str:
    return digest(jsonable(entry))


def _names(arms: object) -> dict[str, None]:
    """Return the names in a list of arms, in their order; what is no text is passed over."""
    return dict.fromkeys(arm for arm in as_list(arms) if isinstance(arm, str))
