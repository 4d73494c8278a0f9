"""Spec preflight: what makes a spec impossible to carry out or to judge, found before any spending.

Only contradictions and gaps are findings. What is merely odd (a placeholder, weights that name
roles, a margin out of reach) is said elsewhere: by `evidence.spec.unresolved` and the plan check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from evidence.answers import ANSWER_COMPARISONS
from evidence.applicability import COVERED_FEATURES, check_applicability
from evidence.correctness import REQUIRED_CHECKS
from evidence.gate import GateResult, SourceRef
from evidence.values import (
    as_list,
    as_mapping,
    is_count,
    is_integer,
    is_number,
    is_text,
    show,
    spec_mapping,
)

DECISION_METHODS = ("paired_hoeffding", "paired_betting")
_TEXTS = ("title", "hypothesis", "method", "base_model")
_SIZES = ("lora_rank", "steps", "batch_size", "max_seq_len")


@dataclass(frozen=True, slots=True)
class SpecPreflightResult:
    """The answer to a spec.

    Attributes:
        findings: what is wrong, each naming its field.
    """

    findings: tuple[str, ...]

    @property
    def status(self) -> Literal["passed", "failed"]:
        """``passed`` if there is no finding."""
        return "failed" if self.findings else "passed"

    def to_record(self) -> dict[str, Any]:
        """Return the contract's object."""
        return {"findings": list(self.findings), "status": self.status}

    def to_gate(self, reads: Sequence[SourceRef] = ()) -> GateResult:
        """Return the answer as a gate."""
        return GateResult(
            gate="spec_preflight",
            status=self.status,
            reasons=self.findings,
            reads=tuple(reads),
            validation=self.to_record(),
        )


def validate(spec: object) -> SpecPreflightResult:
    """List everything in a spec that would make a run of it pointless.

    Args:
        spec: the spec as given (or a triage document, or a parsed `Spec`); any JSON value.
    """
    document = spec_mapping(spec)
    if not document:
        return SpecPreflightResult(("spec: expected an object with the fields of a spec.",))
    parts = (_basics, _features, _arms, _decision, _correctness, _restoration, _activation)
    findings = [finding for part in parts for finding in part(document)]
    findings += [*_generation(document), *_budget(document)]
    return SpecPreflightResult(tuple(findings))


def _basics(spec: Mapping[str, Any]) -> Iterator[str]:
    for field in _TEXTS:
        if not is_text(spec.get(field)):
            yield f"{field}: expected text."
    for field in _SIZES:
        if not is_count(spec.get(field)) or spec[field] == 0:
            yield f"{field}: expected a whole number above 0."
    rate = as_mapping(spec.get("optimizer")).get("lr")
    if not is_number(rate) or rate < 0:
        yield "optimizer.lr: expected a number of at least 0."
    evaluation = as_mapping(spec.get("eval"))
    if not is_text(spec.get("primary_endpoint")) and not is_text(evaluation.get("metric")):
        yield "primary_endpoint: expected text, or eval.metric in its place."


def _features(spec: Mapping[str, Any]) -> Iterator[str]:
    declared = as_mapping(spec.get("experiment_features"))
    for names in COVERED_FEATURES.values():
        for name in names:
            if not isinstance(declared.get(name), bool):
                yield f"experiment_features.{name}: expected true or false."


def _arms(spec: Mapping[str, Any]) -> Iterator[str]:
    names = _names(as_list(spec.get("arms")), "name")
    if not names or None in names:
        yield "arms: expected a list of arms with a name each."
    yield from _twice("arms", names)


def _names(entries: Iterable[object], key: str) -> list[str | None]:
    found = [as_mapping(entry).get(key) for entry in entries]
    return [name if is_text(name) else None for name in found]


def _twice(path: str, names: Iterable[str | None]) -> Iterator[str]:
    counts = Counter(name for name in names if name is not None)
    for name, count in counts.items():
        if count > 1:
            yield f"{path}: {show(name)} is there {count} times, expected once."


def _decision(spec: Mapping[str, Any]) -> Iterator[str]:
    rule = spec.get("decision_rule")
    if not rule:
        needed = check_applicability(spec, "decision_rule")
        if needed.status == "required":
            yield f"decision_rule: expected a rule ({needed.reasons[0]})."
        return
    rule = as_mapping(rule)
    alpha, seeds = rule.get("alpha"), as_list(rule.get("seeds"))
    if not is_number(alpha) or not 0 < alpha < 1:
        yield "decision_rule.alpha: expected a number between 0 and 1."
    if not seeds or not all(map(is_count, seeds)) or len(set(seeds)) < len(seeds):
        yield "decision_rule.seeds: expected whole numbers, each once."
    if rule.get("method") not in DECISION_METHODS:
        yield f"decision_rule.method: expected {' or '.join(DECISION_METHODS)}."
    criteria = as_list(rule.get("criteria"))
    if not criteria:
        yield "decision_rule.criteria: expected at least one criterion."
    yield from _twice("decision_rule.criteria", _names(criteria, "id"))
    for number, criterion in enumerate(criteria):
        for problem in _criterion(as_mapping(criterion)):
            yield f"decision_rule.criteria[{number}].{problem}"


def _criterion(criterion: Mapping[str, Any]) -> Iterator[str]:
    for field in ("id", "metric"):
        if not is_text(criterion.get(field)):
            yield f"{field}: expected text."
    margin = criterion.get("margin")
    weights = list(as_mapping(criterion.get("weights")).values())
    bounds = as_list(criterion.get("bounds"))
    weighted = all(map(is_number, weights)) and any(weights)
    bounded = len(bounds) == 2 and all(map(is_number, bounds)) and bounds[0] < bounds[1]
    if not weighted:
        yield "weights: expected finite numbers, not all of them 0."
    if not bounded:
        yield "bounds: expected two finite numbers, the lower one first."
    if not is_number(margin):
        yield "margin: expected a finite number."
    elif weighted and bounded:
        low, high = map(float, bounds)
        reach = [
            sum(side(float(w) * bound for bound in (low, high)) for w in weights)
            for side in (min, max)
        ]
        if not all(map(isfinite, reach)):
            yield "weights and bounds: expected effects within the range of a 64-bit float."
        elif not reach[0] < margin < reach[1]:
            yield f"margin: expected a value between {reach[0]:g} and {reach[1]:g}."


def _correctness(spec: Mapping[str, Any]) -> Iterator[str]:
    needed = check_applicability(spec, "correctness_preflight")
    paths = as_list(as_mapping(spec.get("correctness_preflight")).get("paths"))
    if not paths and needed.status == "required":
        yield f"correctness_preflight.paths: expected a path ({needed.reasons[0]})."
    yield from _twice("correctness_preflight.paths", _names(paths, "id"))
    for number, path in enumerate(paths):
        for problem in _path(as_mapping(path)):
            yield f"correctness_preflight.paths[{number}].{problem}"


def _path(path: Mapping[str, Any]) -> Iterator[str]:
    for field in ("id", "baseline_revision", "reference_revision"):
        if not is_text(path.get(field)):
            yield f"{field}: expected text."
    kind = path.get("kind")
    if not isinstance(kind, str) or kind not in REQUIRED_CHECKS:
        yield f"kind: expected {' or '.join(REQUIRED_CHECKS)}."
        return
    tolerances = as_mapping(path.get("tolerances"))
    for check in dict.fromkeys([*REQUIRED_CHECKS[kind], *tolerances]):
        tolerance = as_mapping(tolerances.get(check))
        sizes = (tolerance.get("atol"), tolerance.get("rtol"))
        if not all(is_number(size) and size >= 0 for size in sizes):
            yield f"tolerances.{show(check)}: expected atol and rtol of at least 0."
        cosine = tolerance.get("min_cosine")
        if cosine is not None and not (is_number(cosine) and -1 <= cosine <= 1):
            yield f"tolerances.{show(check)}.min_cosine: expected a number from -1 to 1."


def _restoration(spec: Mapping[str, Any]) -> Iterator[str]:
    needed = check_applicability(spec, "restoration_preflight")
    groups = as_list(as_mapping(spec.get("restoration_preflight")).get("groups"))
    if not groups and needed.status == "required":
        yield f"restoration_preflight.groups: expected a group ({needed.reasons[0]})."
    known = set(_names(as_list(spec.get("arms")), "name"))
    planned: list[str | None] = []
    for number, group in enumerate(groups):
        path = f"restoration_preflight.groups[{number}].arms"
        arms = as_list(as_mapping(group).get("arms"))
        names = _names(arms, "name")
        planned += names
        if not names or None in names:
            yield f"{path}: expected arms with a name each."
        for name, arm in zip(names, arms, strict=True):
            if name is not None and name not in known:
                yield f"{path}: {show(name)} is no arm of the spec."
            if not is_text(as_mapping(arm).get("optimizer")):
                yield f"{path}: expected an optimizer for each arm."
        if len(names) == 1 and not _may_be_alone(spec):
            yield f"{path}: one arm alone needs checkpoint_restore and no paired training arms."
    yield from _twice("restoration_preflight.groups", planned)


def _may_be_alone(spec: Mapping[str, Any]) -> bool:
    features = as_mapping(spec.get("experiment_features"))
    return (
        features.get("checkpoint_restore") is True and features.get("paired_training_arms") is False
    )


def _activation(spec: Mapping[str, Any]) -> Iterator[str]:
    needed = check_applicability(spec, "activation_gate")
    checks = as_list(as_mapping(spec.get("activation_gate")).get("checks"))
    if not checks and needed.status == "required":
        yield f"activation_gate.checks: expected a diagnostic ({needed.reasons[0]})."
    for number, check in enumerate(checks):
        for problem in _diagnostic(as_mapping(check)):
            yield f"activation_gate.checks[{number}].{problem}"


def _diagnostic(check: Mapping[str, Any]) -> Iterator[str]:
    if not is_text(check.get("metric")):
        yield "metric: expected text."
    low, high, choices = (check.get(key) for key in ("min", "max", "one_of"))
    if any(bound is not None and not is_number(bound) for bound in (low, high)):
        yield "min and max: expected finite numbers."
    elif low is not None and high is not None and low > high:
        yield f"min: expected at most max, found {low} above {high}."
    if choices is not None and not as_list(choices):
        yield "one_of: expected a list with at least one value."
    if low is None and high is None and choices is None:
        yield "min, max or one_of: expected an accepted range."


def _generation(spec: Mapping[str, Any]) -> Iterator[str]:
    if check_applicability(spec, "generation_audit").status != "required":
        return
    audit = as_mapping(spec.get("generation_audit"))
    strategy = audit.get("answer_comparison")
    if not isinstance(strategy, str) or strategy not in ANSWER_COMPARISONS:
        known = " or ".join(ANSWER_COMPARISONS)
        yield f"generation_audit.answer_comparison: expected {known}."
    for field in ("max_label_errors", "max_eval_overlaps"):
        if audit.get(field) is not None and not is_count(audit[field]):
            yield f"generation_audit.{field}: expected a whole number of at least 0."
    size = audit.get("min_sample_size")
    if size is not None and not (is_integer(size) and size > 0):
        yield "generation_audit.min_sample_size: expected a whole number above 0."


def _budget(spec: Mapping[str, Any]) -> Iterator[str]:
    budget = as_mapping(spec.get("budget"))
    minutes, hours = budget.get("max_wall_minutes"), budget.get("gpu_hours")
    if minutes is None and spec.get("feasibility_required") is True:
        yield "budget.max_wall_minutes: expected a limit (feasibility is required)."
    for field, value in (("max_wall_minutes", minutes), ("gpu_hours", hours)):
        if value is not None and not (is_number(value) and value > 0):
            yield f"budget.{field}: expected a number above 0."
