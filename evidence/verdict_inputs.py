"""What a verdict follows from, read from the files of a run or a bundle.

Sealing and verifying a bundle use these same functions on the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from evidence import activation, correctness, decision, evaluator, generation_audit, restoration
from evidence.applicability import check_applicability
from evidence.audit import evidence_rows, feasibility_of, feasibility_required
from evidence.canonical import loads_strict
from evidence.criteria import DecisionResult
from evidence.decision import FinalVerdict
from evidence.errors import InputError
from evidence.gate import GATE_STATUSES
from evidence.parsing import build
from evidence.spec import DecisionRule
from evidence.values import as_list, as_mapping, is_text, show, spec_mapping

_GRANTING = ("passed", "not_applicable")
_AS_GATE: Mapping[str, str] = {
    **{status: status for status in GATE_STATUSES},
    **{"feasible": "passed", "infeasible": "failed", "unknown": "unverified"},
    **{"valid": "passed", "invalid": "failed", "incomparable": "unverified"},
}
"""The gate's status that goes with each status of a validation."""
_GATE = re.compile(r"gate-(?P<gate>.+?)(?:\.(?P<number>[0-9]+))?\.json")


def roles_of(execution: object) -> dict[str, str]:
    """Return role to arm as an execution file says; ``{}`` where it says nothing."""
    arms = as_mapping(as_mapping(execution).get("arms"))
    return {
        str(as_mapping(settings).get("role")): name
        for name, settings in arms.items()
        if as_mapping(settings).get("role") is not None
    }


def judge_decision(
    spec: object, result: object, execution: object, files: Mapping[str, bytes]
) -> tuple[DecisionResult, DecisionRule | None]:
    """Recompute the decision of a structured result, and return the rule that it follows.

    Args:
        spec: the spec as given.
        result: the structured result, with its ``decision`` and ``evaluation``.
        execution: the execution file, or None.
        files: evidence files by name.
    """
    record = as_mapping(result)
    judged = decision.validate(
        spec,
        record.get("decision"),
        evaluation=record.get("evaluation"),
        files=files,
        roles=roles_of(execution),
        reported_verdict=record.get("verdict"),
    )
    block = spec_mapping(spec).get("decision_rule")
    try:
        rule = build(DecisionRule, block, where="spec.decision_rule") if block else None
    except InputError:
        rule = None
    return judged, rule


def newest_gates(files: Mapping[str, bytes]) -> dict[str, Mapping[str, Any]]:
    """Return the newest record of each gate from a bundle's files."""
    numbered: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for name, data in files.items():
        match = _GATE.fullmatch(name)
        if match is None:
            continue
        number = int(match["number"] or 1)
        if number > numbered.get(match["gate"], (0, {}))[0]:
            numbered[match["gate"]] = (number, as_mapping(loads_strict(data, where=name)))
    return {gate: record for gate, (_, record) in sorted(numbered.items())}


def gate_statuses(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the newest status of each gate from a bundle's files."""
    return {gate: str(record.get("status")) for gate, record in newest_gates(files).items()}


def gate_conflicts(files: Mapping[str, bytes]) -> list[str]:
    """List the gate files that contradict themselves, one sentence each.

    A file holds the gate of its name, and its status is the one of the validation in it.
    """
    problems = []
    for name, data in sorted(files.items()):
        match = _GATE.fullmatch(name)
        if match is None:
            continue
        record = as_mapping(loads_strict(data, where=name))
        if record.get("gate") != match["gate"]:
            problems.append(f"{name}: holds the gate {show(record.get('gate'))}")
        status, found = record.get("status"), as_mapping(record.get("validation")).get("status")
        if found is not None and (not is_text(found) or _AS_GATE.get(found) != status):
            problems.append(f"{name}: status is {show(status)}, its validation is {show(found)}")
    return problems


def held_gates(
    spec: object, result: object, gates: Mapping[str, str], files: Mapping[str, bytes]
) -> dict[str, str]:
    """Return the status of every gate, none of them better than what the result shows.

    A gate that the spec requires and that has no record is ``unverified``. Where a gate's evidence
    stands in the result it is judged again, and the worse of the two answers holds.

    Args:
        spec: the spec as given.
        result: the structured result.
        gates: status by name of every gate.
        files: evidence files by name, for the generated tasks.
    """
    record = as_mapping(result)
    held = dict(gates)
    for name, found in _judged_again(spec, record, files):
        if name in gates or found not in _GRANTING or _is_required(spec, record, name):
            held[name] = _worse(gates.get(name, "unverified"), found)
    if "restoration" not in gates and check_applicability(spec, "restoration").enforce:
        held["restoration"] = "unverified"
    return held


def can_judge_generation(result: object, files: Mapping[str, bytes]) -> bool:
    """Whether the files are there that a generation audit is recomputed from."""
    report = as_mapping(as_mapping(result).get("generation_audit"))
    named = [report.get("dataset_file"), report.get("evaluation_file")]
    return not report or all(isinstance(name, str) and name in files for name in named)


def _judged_again(
    spec: object, record: Mapping[str, Any], files: Mapping[str, bytes]
) -> Iterator[tuple[str, str]]:
    """Yield the status of each gate that follows from the posted result.

    Restoration is not among them: it is judged with all restores, under a name of its own.
    """
    yield "correctness", correctness.validate(spec, record.get("correctness_preflight")).status
    yield "activation", activation.validate(spec, record.get("activation_calibration")).status
    document = spec_mapping(spec)
    if record.get("feasibility") is not None or feasibility_required(document, record):
        yield "feasibility", feasibility_of(document, record).to_gate().status
    report = as_mapping(record.get("generation_audit"))
    if can_judge_generation(record, files):
        audited = generation_audit.validate_for_spec(
            spec,
            record.get("generation_audit"),
            tasks=evidence_rows(files, report.get("dataset_file")),
            evaluation=evidence_rows(files, report.get("evaluation_file")),
        )
        yield "generation_audit", audited.status
    else:  # without the tasks only the gate itself can say
        yield "generation_audit", "passed"


def _is_required(spec: object, record: Mapping[str, Any], name: str) -> bool:
    if name == "feasibility":
        return feasibility_required(spec_mapping(spec), record)
    return check_applicability(spec, name).enforce


def _worse(gate: str, found: str) -> str:
    """Return the answer that grants less; of two that grant nothing, a failure."""
    is_worse = gate in _GRANTING and found not in _GRANTING
    return found if is_worse or found == "failed" else gate


def final_verdict(
    judged: DecisionResult,
    *,
    spec: object,
    result: object,
    gates: Mapping[str, str],
    files: Mapping[str, bytes],
    identity: object = None,
) -> FinalVerdict:
    """Say what a finished run may claim: its decision, less what its gates withhold.

    Gates are those of `held_gates`. Every load of a training state is judged again with what the
    run posted last (``restores``): the gate has only seen those before training.

    Args:
        judged: the recomputed decision.
        spec: the spec as given, for the arms that must be complete.
        result: the structured result.
        gates: status by name of every gate.
        files: evidence files by name.
        identity: the run's identity; a run with a ``limit`` can never give a verdict.
    """
    record = as_mapping(result)
    statuses = held_gates(spec, record, gates, files)
    if record.get("evaluation") is not None:
        statuses["evaluation"] = evaluator.validate(record["evaluation"]).status
    provenance = record.get("initialization_provenance")
    statuses["restores"] = restoration.validate(spec, provenance).status
    planned = [as_mapping(arm).get("name") for arm in as_list(spec_mapping(spec).get("arms"))]
    done = as_list(record.get("completed_arms"))
    is_whole = as_mapping(identity).get("limit") is None and record.get("status") == "succeeded"
    tested = record.get("original_hypothesis_tested", True)
    return decision.final_verdict(
        judged,
        gates=statuses,
        original_hypothesis_tested=tested is not False,
        tested_instead=record.get("tested_instead"),
        deviations=[as_mapping(entry) for entry in as_list(record.get("deviations"))],
        every_arm_completed=is_whole and all(is_text(arm) and arm in done for arm in planned),
    )
