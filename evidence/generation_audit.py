"""Generation audit: a sample of generated tasks was solved again, blind, before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evidence.answers import (
    ANSWER_COMPARISONS,
    accepted_tasks,
    answer_agreement,
    evaluation_overlap,
    select_sample,
)
from evidence.applicability import Applicability, check_applicability
from evidence.gate import GateResult, GateStatus, SourceRef
from evidence.values import as_list, as_mapping, is_count, is_integer, is_text, show, spec_mapping

__all__ = [
    "AuditResult",
    "answer_agreement",
    "evaluation_overlap",
    "select_sample",
    "validate",
    "validate_for_spec",
]

DEFAULT_SAMPLE_SIZE = 100
_DISPOSITIONS = {
    "accepted": "accepted",
    "rejected": "rejected",
    "execution_error": "execution_errors",
}
_METHOD = "independent_resolve"


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The answer to a generation audit.

    Attributes:
        status: ``failed`` if more labels disagree or more prompts overlap than allowed, else
            ``unverified`` if anything is missing or not as reported, else ``passed``.
        reasons: what is wrong.
        sample_size: how many tasks had to be solved again; None if that is not known.
        label_errors: disagreements found by comparing again; None if nothing can be compared.
        overlaps: accepted tasks whose prompt is in the held-out set; None without that set.
        applicability: whether the audit is needed at all, if that was asked.
    """

    status: GateStatus
    reasons: tuple[str, ...]
    sample_size: int | None = None
    label_errors: int | None = None
    overlaps: int | None = None
    applicability: Applicability | None = None

    def to_record(self) -> dict[str, Any]:
        """Return the contract's object; counts appear only where an audit was needed."""
        record: dict[str, Any] = {"status": self.status, "reasons": list(self.reasons)}
        if self.status != "not_applicable":
            record["sample_size"] = self.sample_size
            record["label_errors"] = self.label_errors
            record["overlaps"] = self.overlaps
        if self.applicability is not None:
            record["applicability"] = self.applicability.to_record()
        return record

    def to_gate(self, reads: Sequence[SourceRef] = ()) -> GateResult:
        """Return the answer as a gate."""
        return GateResult(
            gate="generation_audit",
            status=self.status,
            reasons=self.reasons,
            reads=tuple(reads),
            validation=self.to_record(),
        )


def validate_for_spec(
    spec: object, report: object, *, tasks: object = None, evaluation: object = None
) -> AuditResult:
    """Judge a reported audit, if the spec needs one.

    Args:
        spec: the spec as given (or a triage document, or a parsed `Spec`).
        report: the reported ``generation_audit``; anything but an object counts as missing.
        tasks: rows of the dataset file, None if it is not at hand.
        evaluation: rows of the frozen evaluation file, None if it is not at hand.
    """
    applicability = check_applicability(spec, "generation_audit")
    if not applicability.enforce:
        return AuditResult("not_applicable", applicability.reasons, applicability=applicability)
    contract = spec_mapping(spec).get("generation_audit")
    result = validate(report, contract, tasks=tasks, evaluation=evaluation)
    return replace(result, applicability=applicability)


def validate(
    report: object,
    contract: object,
    *,
    tasks: object = None,
    evaluation: object = None,
    require_comparison: bool = True,
) -> AuditResult:
    """Judge a reported audit against its contract and the two frozen files.

    Every count is recomputed. Answers are compared again by the strategy that the contract names;
    a contract without one stays unverified.

    Args:
        report: the reported ``generation_audit`` object.
        contract: the spec's ``generation_audit`` block.
        tasks: rows of the dataset file: item_id, prompt, answer, disposition.
        evaluation: rows of the frozen held-out set: item_id, prompt.
        require_comparison: False accepts the reported ``label_error_count`` of a legacy contract
            that names no ``answer_comparison``.
    """
    rules, found = as_mapping(contract), as_mapping(report)
    if not found:
        return AuditResult("unverified", ("The generation audit was not reported.",))
    gaps = _report_gaps(found)
    rows, held_out = as_list(tasks), as_list(evaluation)
    gaps += _task_gaps(rows) + _held_out_gaps(held_out) + _count_gaps(found, rows)
    size, chosen, sample_gaps = _sample(found, rules, rows)
    strategy = rules.get("answer_comparison")
    legacy = strategy is None and not require_comparison
    errors, comparison_gaps = _compare(found, chosen, strategy, legacy=legacy)
    overlaps = len(evaluation_overlap(rows, held_out)) if held_out and rows else None
    gaps += sample_gaps + comparison_gaps
    failures: list[str] = []
    for count, limit_name, count_name in (
        (errors, "max_label_errors", "label_error_count"),
        (overlaps, "max_eval_overlaps", "overlap_count"),
    ):
        if count is None:
            continue
        limit = rules.get(limit_name, 0)
        if not is_count(limit):
            gaps.append(f"{limit_name} of the contract must be a whole number.")
        elif count > limit:
            failures.append(f"{count} observed, more than {limit_name}={limit}.")
        if not is_integer(found.get(count_name)) or found[count_name] != count:
            gaps.append(f"{count_name} is {show(found.get(count_name))}, recomputed {count}.")
    status: GateStatus = "failed" if failures else "unverified" if gaps else "passed"
    return AuditResult(status, tuple(failures + gaps), size, errors, overlaps)


def _report_gaps(found: Mapping[str, Any]) -> list[str]:
    gaps = []
    if not is_integer(found.get("version")) or found["version"] != 1:
        gaps.append("version must be 1.")
    if found.get("stage") != "before_training":
        gaps.append("stage must be before_training.")
    names = [found.get(name) for name in ("dataset_file", "evaluation_file", "audit_file")]
    if not all(map(is_text, names)) or len(set(map(show, names))) < len(names):
        gaps.append("dataset_file, evaluation_file and audit_file must name three files.")
    elif not str(names[2]).endswith(".json"):
        gaps.append("audit_file must be a .json name.")
    if not is_integer(found.get("sample_seed")):
        gaps.append("sample_seed must be a whole number.")
    return gaps


def _task_gaps(rows: Sequence[Any]) -> list[str]:
    if not rows:
        return ["The dataset file was not retained for this run."]
    gaps = []
    for number, row in enumerate(rows, start=1):
        task = as_mapping(row)
        answered = task.get("disposition") != "accepted" or _is_answer(task.get("answer"))
        if not is_text(task.get("item_id")) or not is_text(task.get("prompt")) or not answered:
            gaps.append(f"Task {number}: item_id, prompt and answer are required.")
        disposition = task.get("disposition")
        if not isinstance(disposition, str) or disposition not in _DISPOSITIONS:
            gaps.append(f"Task {number}: disposition must be {', '.join(_DISPOSITIONS)}.")
    return gaps[:1] + _duplicate_gaps("task", rows)


def _is_answer(answer: object) -> bool:
    return is_text(answer) or (isinstance(answer, int | float) and not isinstance(answer, bool))


def _held_out_gaps(rows: Sequence[Any]) -> list[str]:
    if not rows:
        return ["The full evaluation file was not retained for this run."]
    complete = all(
        is_text(as_mapping(row).get("item_id")) and is_text(as_mapping(row).get("prompt"))
        for row in rows
    )
    gaps = [] if complete else ["Every evaluation row needs item_id and prompt."]
    return gaps + _duplicate_gaps("evaluation", rows)


def _duplicate_gaps(kind: str, rows: Sequence[Any]) -> list[str]:
    names = [as_mapping(row).get("item_id") for row in rows]
    counts = Counter(name for name in names if isinstance(name, str))
    twice = [name for name, count in counts.items() if count > 1]
    return [f"Duplicate {kind} item_id {show(twice[0])}."] if twice else []


def _count_gaps(found: Mapping[str, Any], rows: Sequence[Any]) -> list[str]:
    reported = as_mapping(found.get("counts"))
    dispositions = [as_mapping(row).get("disposition") for row in rows]
    actual = {"generated": len(rows)}
    for disposition, name in _DISPOSITIONS.items():
        actual[name] = dispositions.count(disposition)
    return [
        f"counts.{name} is {show(reported.get(name))}, the file has {count}."
        for name, count in actual.items()
        if not is_integer(reported.get(name)) or reported[name] != count
    ]


def _sample(
    found: Mapping[str, Any], rules: Mapping[str, Any], rows: Sequence[Any]
) -> tuple[int | None, list[tuple[Mapping[str, Any], Mapping[str, Any]]], list[str]]:
    """Match the audited samples with the tasks that had to be audited."""
    minimum = rules.get("min_sample_size")
    if minimum is None:
        minimum = DEFAULT_SAMPLE_SIZE
    seed = found.get("sample_seed")
    if not is_count(minimum) or minimum == 0 or not is_integer(seed):
        return None, [], ["The audited sample cannot be determined."]
    accepted = accepted_tasks(rows)
    if not accepted:
        return 0, [], ["No task was accepted."]
    if _duplicate_gaps("task", accepted):
        return None, [], ["The audited sample cannot be determined."]
    expected = select_sample(rows, minimum, seed)
    samples = [as_mapping(sample) for sample in as_list(found.get("samples"))]
    by_id = {s["item_id"]: s for s in samples if isinstance(s.get("item_id"), str)}
    pairs = [(task, by_id[task["item_id"]]) for task in expected if task["item_id"] in by_id]
    gaps = [gap for _, sample in pairs for gap in _sample_gaps(sample)]
    if len(samples) != len(by_id) or len(pairs) != len(expected) or len(by_id) != len(expected):
        gaps.insert(
            0, f"samples must be the {len(expected)} tasks that the seed selects, once each."
        )
    return len(expected), pairs, gaps


def _sample_gaps(sample: Mapping[str, Any]) -> list[str]:
    needs = {
        "resolver_id is required": is_text(sample.get("resolver_id")),
        f"method must be {_METHOD}": sample.get("method") == _METHOD,
        "reasoning is required": is_text(sample.get("reasoning")),
        "blind_to_label must be true": sample.get("blind_to_label") is True,
        "independent_answer is required": _is_answer(sample.get("independent_answer")),
    }
    name = show(sample["item_id"])
    return [f"Sample {name}: {need}." for need, met in needs.items() if not met]


def _compare(
    found: Mapping[str, Any],
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    strategy: object,
    *,
    legacy: bool,
) -> tuple[int | None, list[str]]:
    """Count disagreements; an answer that cannot be compared is a gap, never an agreement."""
    if legacy:
        reported = found.get("label_error_count")
        if is_count(reported):
            return reported, []
        return None, ["label_error_count must be a whole number."]
    if not isinstance(strategy, str) or strategy not in ANSWER_COMPARISONS:
        known = " or ".join(ANSWER_COMPARISONS)
        return None, [f"answer_comparison of the contract must be {known}."]
    errors, gaps = 0, []
    for task, sample in pairs:
        agrees = answer_agreement(task.get("answer"), sample.get("independent_answer"), strategy)
        if agrees is None:
            gaps.append(
                f"Sample {show(task['item_id'])}: answers are not comparable as {strategy}."
            )
        errors += agrees is False
    return errors, gaps
