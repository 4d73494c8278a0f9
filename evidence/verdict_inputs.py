"""What a verdict follows from, read from the files of a run or a bundle.

Sealing and verifying a bundle use these same functions on the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from evidence import decision, evaluator, restoration
from evidence.canonical import loads_strict
from evidence.criteria import DecisionResult
from evidence.decision import FinalVerdict
from evidence.errors import InputError
from evidence.parsing import build
from evidence.spec import DecisionRule
from evidence.values import as_list, as_mapping, spec_mapping

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


def final_verdict(
    judged: DecisionResult,
    *,
    spec: object,
    result: object,
    gates: Mapping[str, str],
    identity: object = None,
) -> FinalVerdict:
    """Say what a finished run may claim: its decision, less what its gates withhold.

    Every load of a training state is judged again with what the run posted last (``restores``):
    the restoration gate has only seen those before training.

    Args:
        judged: the recomputed decision.
        spec: the spec as given, for the arms that must be complete.
        result: the structured result.
        gates: status by name of every gate.
        identity: the run's identity; a run with a ``limit`` can never give a verdict.
    """
    record = as_mapping(result)
    statuses = dict(gates)
    if record.get("evaluation") is not None:
        statuses["evaluation"] = evaluator.validate(record["evaluation"]).status
    provenance = record.get("initialization_provenance")
    statuses["restores"] = restoration.validate(spec, provenance).status
    planned = {as_mapping(arm).get("name") for arm in as_list(spec_mapping(spec).get("arms"))}
    done = set(as_list(record.get("completed_arms")))
    is_whole = as_mapping(identity).get("limit") is None and record.get("status") == "succeeded"
    tested = record.get("original_hypothesis_tested", True)
    return decision.final_verdict(
        judged,
        gates=statuses,
        original_hypothesis_tested=tested is not False,
        tested_instead=record.get("tested_instead"),
        deviations=[as_mapping(entry) for entry in as_list(record.get("deviations"))],
        every_arm_completed=is_whole and planned <= done,
    )
