"""Judge a whole record as the exchange would: every validation field, from a spec and a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evidence import (
    activation,
    capacity,
    correctness,
    decision,
    deviations,
    evaluator,
    evidence_limits,
    feasibility,
    generation_audit,
    output,
    restoration,
    spec_preflight,
)
from evidence.canonical import loads_strict
from evidence.errors import InputError
from evidence.evidence_limits import EvidenceResult
from evidence.output import DEFINITIVE
from evidence.values import as_list, as_mapping, is_text, spec_mapping

_REPORT_KEYS = ("measurements", "config", "effective_config")
"""Keys that tell an agent's own feasibility report from the exchange's answer to it."""


def audit(
    spec: object,
    record: object,
    *,
    files: Mapping[str, bytes] | None = None,
    roles: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Answer every validation field of a record.

    A field is answered where its own rule makes it appear: correctness, restoration, decision and
    generation audit always; feasibility where it was reported or is required; evaluator,
    activation, deviations, capacity block and structured output where they were reported; the
    spec's own ``feasibility_check`` and ``spec_preflight`` where the spec carries them.

    Args:
        spec: the spec as given, a triage document, or a parsed `Spec`.
        record: the record; its fields lie at the top or under ``fields``.
        files: evidence files of the run by name, to read observations and generated tasks from.
            What the record itself holds inline is added.
        roles: role (treatment, baseline) to arm, as the execution file says, if there is one.

    Returns:
        Field name to answer, sorted by name. Nothing in the record, however malformed, raises.
    """
    found = _Found.of(record, files)
    fields = found.fields
    document = spec_mapping(spec)
    answers = {**_validations(document, found, roles), **_reported(document, found)}
    if fields.get("feasibility") is not None or feasibility_required(document, fields):
        answers.update(_feasibility(document, fields, found.verdict))
    answers.update(_answers_of_spec(document))
    return dict(sorted(answers.items()))


@dataclass(frozen=True, slots=True)
class _Found:
    """What a record holds: its fields, the agent's verdict, and its evidence files.

    Attributes:
        evidence: what is kept of the files that it holds inline.
        files: bytes by name: those files, and the ones that were given beside the record.
    """

    fields: Mapping[str, Any]
    verdict: str | None
    evidence: EvidenceResult
    files: Mapping[str, bytes]

    @classmethod
    def of(cls, record: object, files: Mapping[str, bytes] | None) -> _Found:
        outer = as_mapping(record)
        inner = outer.get("fields")
        fields = {**outer, **inner} if isinstance(inner, Mapping) else outer
        claims = (fields.get("reported_verdict"), fields.get("verdict"))
        verdict = next((claim for claim in claims if is_text(claim)), None)
        evidence = evidence_limits.validate(fields.get("evidence"))
        inline = _inline_files(fields.get("evidence"), evidence)
        return cls(fields, verdict, evidence, {**inline, **(files or {})})


def _validations(
    document: Mapping[str, Any], found: _Found, roles: Mapping[str, str] | None
) -> dict[str, Any]:
    """Answer the four fields that every record has."""
    fields = found.fields
    preflight = correctness.validate(
        document, fields.get("correctness_preflight"), reported_verdict=found.verdict
    )
    judged = decision.validate(
        document,
        fields.get("decision"),
        evaluation=fields.get("evaluation"),
        files=found.files,
        roles=roles,
        reported_verdict=found.verdict,
    )
    report = as_mapping(fields.get("generation_audit"))
    generated = generation_audit.validate_for_spec(
        document,
        fields.get("generation_audit"),
        tasks=evidence_rows(found.files, report.get("dataset_file")),
        evaluation=evidence_rows(found.files, report.get("evaluation_file")),
    )
    provenance = fields.get("initialization_provenance")
    return {
        "correctness_validation": preflight.to_record(),
        "decision_validation": judged.to_record(),
        "generation_audit_validation": generated.to_record(),
        "restoration_validation": restoration.validate(document, provenance).to_record(),
    }


def _reported(document: Mapping[str, Any], found: _Found) -> dict[str, Any]:
    """Answer the fields that appear only where something was reported."""
    fields = found.fields
    answers: dict[str, Any] = {}
    if fields.get("evaluation") is not None:
        answers["evaluator_validation"] = evaluator.validate(fields["evaluation"]).to_record()
    if fields.get("activation_calibration") is not None:
        pilot = activation.validate(document, fields["activation_calibration"])
        answers["activation_validation"] = pilot.to_record()
    if fields.get("deviations") is not None:
        history = as_list(fields.get("updates")) or fields
        answers["deviations_validation"] = deviations.validate(history).to_record()
    if fields.get("capacity_block") is not None:
        answers["capacity_validation"] = capacity.validate(fields).to_record()
    if fields.get("evidence") is not None:
        answers["evidence_validation"] = found.evidence.to_record()
    if "status" in fields and "completed_arms" in fields:
        answers["output_validation"] = output.validate(fields, spec=document).to_record()
    return answers


def feasibility_required(document: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Whether a spec or a record asks for a measured feasibility."""
    return True in (document.get("feasibility_required"), fields.get("feasibility_required"))


def feasibility_of(
    document: Mapping[str, Any], fields: Mapping[str, Any]
) -> feasibility.FeasibilityResult:
    """Judge the feasibility that a record reports: an agent's own report, or an answer to one."""
    reported = fields.get("feasibility")
    answer = as_mapping(reported)
    dated = {"recorded_at": answer["recorded_at"]} if "recorded_at" in answer else {}
    own = "record" not in answer and any(key in answer for key in _REPORT_KEYS)
    held = reported if own or not isinstance(reported, Mapping) else answer.get("record")
    return feasibility.validate(document, held, **dated)


def _feasibility(
    document: Mapping[str, Any], fields: Mapping[str, Any], verdict: str | None
) -> dict[str, Any]:
    """Answer feasibility, and keep a definitive verdict that it withholds."""
    result = feasibility_of(document, fields)
    answers: dict[str, Any] = {"feasibility": result.to_record()}
    required = feasibility_required(document, fields)
    if required and result.status != "feasible" and verdict in DEFINITIVE:
        answers["feasibility_reported_verdict"] = verdict
    return answers


def _answers_of_spec(document: Mapping[str, Any]) -> dict[str, Any]:
    """Answer the fields that the spec carries about itself, with keys in the spec's own style.

    A document whose keys are sorted was written by a program that sorts them; an answer that is
    to stand in it is sorted too.
    """
    answers: dict[str, Any] = {}
    if "feasibility_check" in document:
        planned = feasibility.validate(document, document.get("feasibility"))
        answers["feasibility_check"] = planned.to_record()
    if "spec_preflight" in document:
        answers["spec_preflight"] = spec_preflight.validate(document).to_record()
    keys = list(map(str, document))
    if keys == sorted(keys):
        return {name: dict(sorted(answer.items())) for name, answer in answers.items()}
    return answers


def _inline_files(evidence: object, result: EvidenceResult) -> dict[str, bytes]:
    """Return the bytes of the files that a record holds inline and that are kept."""
    entries = map(as_mapping, as_list(as_mapping(evidence).get("files")))
    return {
        decided.name: entry["content"].encode()
        for entry, decided in zip(entries, result.files, strict=True)
        if decided.status == "kept" and isinstance(entry.get("content"), str)
    }


def evidence_rows(files: Mapping[str, bytes], name: object) -> list[Any] | None:
    """Return the rows of a JSONL evidence file, None if it is not there or is no JSONL."""
    if not isinstance(name, str) or name not in files:
        return None
    data = files[name]
    try:
        return [loads_strict(line, where=name) for line in data.splitlines() if line.strip()]
    except InputError:
        return None
