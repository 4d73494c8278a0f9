"""Evaluator identity, and whether the scores of a comparison come from one evaluator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from evidence.canonical import digest
from evidence.errors import InputError
from evidence.gate import CheckResult, GateResult, GateStatus, SourceRef
from evidence.values import as_list, as_mapping, is_integer, is_number, is_sha256, is_text, show

EvaluatorStatus = Literal["valid", "incomparable", "invalid"]
ComparisonStatus = Literal["comparable", "incomparable"]

MAX_COMPARISONS = 200
"""Each comparison lists every arm, so that their number is bounded."""

_GATE_STATUS: Mapping[EvaluatorStatus, GateStatus] = {
    "valid": "passed",
    "incomparable": "unverified",
    "invalid": "failed",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether one metric can be compared across arms.

    Attributes:
        metric: the metric.
        status: ``comparable`` if no compared arm is missing and one evaluator scored every arm and
            seed that has a score of this metric, the base model included.
        arms: every arm with a score of this metric, sorted.
        evaluator_ids: the evaluators that cover all of it; if there is none, all that scored.
        missing_arms: compared arms without a score, in the order of the comparison.
    """

    metric: str
    status: ComparisonStatus
    arms: tuple[str, ...]
    evaluator_ids: tuple[str, ...]
    missing_arms: tuple[str, ...]

    def to_record(self) -> dict[str, Any]:
        """Return the contract's object, keys in its order."""
        return {
            "metric": self.metric,
            "status": self.status,
            "arms": list(self.arms),
            "evaluator_ids": list(self.evaluator_ids),
            "missing_arms": list(self.missing_arms),
        }


@dataclass(frozen=True, slots=True)
class EvaluatorResult:
    """The answer to a reported evaluation.

    Attributes:
        status: ``invalid`` if there is any issue, else ``incomparable`` if a comparison is, else
            ``valid``.
        issues: what is wrong, evaluators first, then scores, then comparisons.
        comparisons: one entry for each reported comparison that can be read.
    """

    status: EvaluatorStatus
    issues: tuple[str, ...]
    comparisons: tuple[Comparison, ...]

    def to_record(self) -> dict[str, Any]:
        """Return the contract's object, keys in its order."""
        return {
            "status": self.status,
            "issues": list(self.issues),
            "comparisons": [comparison.to_record() for comparison in self.comparisons],
        }

    def to_gate(self, reads: Sequence[SourceRef] = ()) -> GateResult:
        """Return the answer as a gate."""
        return GateResult(
            gate="evaluator",
            status=_GATE_STATUS[self.status],
            reasons=self.issues,
            checks=tuple(
                CheckResult(
                    check=found.metric,
                    status="passed" if found.status == "comparable" else "unverified",
                    measured=found.to_record(),
                )
                for found in self.comparisons
            ),
            reads=tuple(reads),
            validation=self.to_record(),
        )


@dataclass(frozen=True, slots=True)
class _Score:
    arm: str
    metric: str
    seed: int | None
    evaluator: str
    value: float


def evaluator_id(provenance: Mapping[str, Any]) -> str:
    """Return the identity of an evaluator: the SHA-256 of its provenance as canonical JSON.

    Raises:
        InputError: if the provenance is no JSON value.
    """
    return digest(provenance)


def validate(evaluation: object) -> EvaluatorResult:
    """Judge a reported evaluation: identities, scores and comparisons.

    Where the evaluator changed, every arm and seed that has a score, the base model included, must
    be scored again; old scores may stay beside the new ones.

    Args:
        evaluation: the reported ``evaluation`` object; anything else is invalid.
    """
    report = as_mapping(evaluation)
    evaluators = as_mapping(report.get("evaluators"))
    issues: list[str] = []
    if not isinstance(evaluation, Mapping):
        issues.append("evaluation: expected an object.")
    elif not is_integer(report.get("version")) or report["version"] != 1:
        issues.append("version: expected 1.")
    if not evaluators:
        issues.append("evaluators: expected an object with at least one evaluator.")
    for name, provenance in evaluators.items():
        issues.extend(f"Evaluator {show(name)}: {text}" for text in _identity(name, provenance))
    scores, score_issues = _read_scores(report.get("scores"), evaluators)
    comparisons, comparison_issues = _compare(report.get("comparisons"), scores)
    issues += score_issues + comparison_issues
    status: EvaluatorStatus = "valid"
    if issues:
        status = "invalid"
    elif any(comparison.status != "comparable" for comparison in comparisons):
        status = "incomparable"
    return EvaluatorResult(status, tuple(issues), tuple(comparisons))


def _identity(name: object, provenance: object) -> list[str]:
    """List what an evaluator's provenance lacks, then whether its hash is its name."""
    found = as_mapping(provenance)
    present = {
        "code_sha256": is_sha256(found.get("code_sha256")),
        "prompt_template": is_text(found.get("prompt_template")),
        "decoding": isinstance(found.get("decoding"), Mapping) and bool(found["decoding"]),
        "parser": is_text(found.get("parser")),
        "items": _names_items(as_mapping(found.get("items"))),
    }
    issues = [f"{field} is required." for field, given in present.items() if not given]
    try:
        matches = isinstance(provenance, Mapping) and evaluator_id(provenance) == name
    except InputError:
        matches = False
    if not matches:
        issues.append("identity does not match provenance hash.")
    return issues


def _names_items(items: Mapping[str, Any]) -> bool:
    """Whether items are named one by one, or by a file with its hash."""
    ids = as_list(items.get("ids"))
    listed = bool(ids) and all(map(is_text, ids))
    return listed or (
        is_text(items.get("manifest_ref")) and is_sha256(items.get("manifest_sha256"))
    )


def _read_scores(reported: object, evaluators: Mapping[str, Any]) -> tuple[list[_Score], list[str]]:
    scores: dict[tuple[str, str, int | None, str], _Score] = {}
    issues = [] if isinstance(reported, list | tuple | None) else ["scores: expected a list."]
    for number, entry in enumerate(as_list(reported), start=1):
        found = as_mapping(entry)
        problem = _score_problem(found, evaluators)
        if problem is not None:
            issues.append(f"Score {number}{_score_name(found)}: {problem}")
            continue
        score = _Score(
            found["arm"], found["metric"], found.get("seed"), found["evaluator_id"], found["value"]
        )
        key = (score.arm, score.metric, score.seed, score.evaluator)
        if key in scores and scores[key].value != score.value:
            issues.append(f"Score {number}{_score_name(found)}: another value was reported before.")
        scores.setdefault(key, score)
    return list(scores.values()), issues


def _score_name(found: Mapping[str, Any]) -> str:
    arm, metric = found.get("arm"), found.get("metric")
    return f" ({show(arm)}, {show(metric)})" if is_text(arm) and is_text(metric) else ""


def _score_problem(found: Mapping[str, Any], evaluators: Mapping[str, Any]) -> str | None:
    for field in ("arm", "metric", "evaluator_id"):
        if not is_text(found.get(field)):
            return f"{field}: expected text."
    if found["evaluator_id"] not in evaluators:
        return "evaluator_id names no recorded evaluator."
    if not is_number(found.get("value")):
        return "value: expected a finite number."
    if found.get("seed") is not None and not is_integer(found["seed"]):
        return "seed: expected a whole number."
    return None


def _compare(reported: object, scores: Sequence[_Score]) -> tuple[list[Comparison], list[str]]:
    comparisons = []
    coverage = _coverage(scores)
    issues = [] if isinstance(reported, list | tuple | None) else ["comparisons: expected a list."]
    if len(as_list(reported)) > MAX_COMPARISONS:
        issues.append(
            f"comparisons: expected at most {MAX_COMPARISONS}; the others are not judged."
        )
    for number, entry in enumerate(as_list(reported)[:MAX_COMPARISONS], start=1):
        metric, arms = as_mapping(entry).get("metric"), as_list(as_mapping(entry).get("arms"))
        if not is_text(metric) or not arms or not all(map(is_text, arms)):
            issues.append(f"Comparison {number}: expected a metric and a list of arms.")
            continue
        comparisons.append(_judge(metric, arms, coverage.get(metric, _Coverage((), (), ()))))
    return comparisons, issues


@dataclass(frozen=True, slots=True)
class _Coverage:
    """The arms with a score of one metric, who scored them, and which evaluators scored all."""

    arms: tuple[str, ...]
    evaluators: tuple[str, ...]
    complete: tuple[str, ...]


def _coverage(scores: Sequence[_Score]) -> dict[str, _Coverage]:
    covered: dict[str, dict[str, set[tuple[str, int | None]]]] = {}
    for score in scores:
        by_evaluator = covered.setdefault(score.metric, {})
        by_evaluator.setdefault(score.evaluator, set()).add((score.arm, score.seed))
    found = {}
    for metric, by_evaluator in covered.items():
        pairs = set().union(*by_evaluator.values())
        found[metric] = _Coverage(
            arms=tuple(sorted({arm for arm, _ in pairs})),
            evaluators=tuple(sorted(by_evaluator)),
            complete=tuple(sorted(name for name, some in by_evaluator.items() if some == pairs)),
        )
    return found


def _judge(metric: str, compared: Iterable[str], coverage: _Coverage) -> Comparison:
    scored = set(coverage.arms)
    missing = tuple(dict.fromkeys(arm for arm in compared if arm not in scored))
    comparable = bool(coverage.complete) and not missing
    return Comparison(
        metric=metric,
        status="comparable" if comparable else "incomparable",
        arms=coverage.arms,
        evaluator_ids=coverage.complete if comparable else coverage.evaluators,
        missing_arms=missing,
    )
