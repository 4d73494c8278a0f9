"""The run as a Workflow Run RO-Crate: which workflow ran, on which inputs, with which outputs.

Sources: RO-Crate 1.1; Process Run Crate 0.5 and Workflow Run Crate 0.5
(w3id.org/ro/wfrun/workflow/0.5); Workflow RO-Crate 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from evidence.manifest import CRATE, MANIFEST, STATEMENT, Entry
from evidence.schema_check import schema_issues
from evidence.values import as_list, as_mapping

_RO_CRATE = "https://w3id.org/ro/crate/1.1"
_WORKFLOW_CRATE = "https://w3id.org/workflowhub/workflow-ro-crate/1.0"
_PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": ("Process Run Crate", "0.5"),
    "https://w3id.org/ro/wfrun/workflow/0.5": ("Workflow Run Crate", "0.5"),
    _WORKFLOW_CRATE: ("Workflow RO-Crate", "1.0"),
}
_CONTEXT = [f"{_RO_CRATE}/context", "https://w3id.org/ro/terms/workflow-run/context"]
_INPUT_KINDS = ("spec", "execution", "effective_config")
_MEDIA_TYPES = {
    "json": "application/json",
    "jsonl": "application/jsonl",
    "md": "text/markdown",
    "patch": "text/x-diff",
    "txt": "text/plain",
    "py": "text/x-python",
}
WORKFLOW = "script-flows.txt"
"""The pack of the flows' sources, which is the workflow of the crate."""


@dataclass(frozen=True, slots=True)
class CrateRun:
    """What a crate says about the run besides its files.

    Attributes:
        run_id: name of the run.
        title: the spec's title.
        summary: what ran and what it showed.
        status: ``succeeded`` or ``failed``.
        started_at: time of the first event, ISO 8601 with zone.
        ended_at: time of the last posted result.
        version: version of the program.
    """

    run_id: str
    title: str
    summary: str
    status: str
    started_at: str
    ended_at: str
    version: str | None


def crate(run: CrateRun, entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the metadata of the crate.

    Args:
        run: facts of the run.
        entries: files of the bundle without the crate itself.
    """
    action_id = f"#run-{quote(run.run_id)}"
    graph = [
        {
            "@id": CRATE,
            "@type": "CreativeWork",
            "about": {"@id": "./"},
            "conformsTo": [{"@id": _RO_CRATE}, {"@id": _WORKFLOW_CRATE}],
        },
        _root(run, entries, action_id),
        *_contextual(run),
        _action(run, entries, action_id),
        *(_file(entry) for entry in entries),
        _plain_file(MANIFEST, "Names, sizes and hashes of all files"),
        _plain_file(STATEMENT, "The verdict as an in-toto statement"),
    ]
    return {"@context": list(_CONTEXT), "@graph": graph}


def crate_issues(value: Any, names: Sequence[str]) -> list[str]:
    """List what in a crate does not fit its profile, or does not fit the bundle's files.

    Args:
        value: the metadata, read from JSON.
        names: files of the bundle.
    """
    issues = schema_issues(value, "workflow-run-crate")
    if issues:
        return issues
    entities = [as_mapping(entity) for entity in as_list(as_mapping(value).get("@graph"))]
    by_id = {str(entity["@id"]): entity for entity in entities}
    if len(by_id) != len(entities):
        issues.append("@graph: expected each @id once")
    issues += [
        f"{entity['@id']}: refers to {target}, which the crate does not describe"
        for entity in entities
        for target in _targets(entity)
        if target not in by_id and target != _RO_CRATE
    ]
    root = by_id["./"]
    parts = {str(part["@id"]) for part in root["hasPart"]}
    issues += [
        f"hasPart: {name} is in the bundle but not in the crate"
        for name in names
        if name != CRATE and quote(name) not in parts
    ]
    issues += [
        f"hasPart: {part} is in the crate but not in the bundle"
        for part in sorted(parts - {quote(name) for name in names})
    ]
    main = root["mainEntity"]["@id"]
    actions = [entity for entity in entities if entity["@type"] == "CreateAction"]
    if not any(action["instrument"]["@id"] == main for action in actions):
        issues.append("mainEntity: expected the instrument of an action")
    return issues


def _targets(entity: Mapping[str, Any]) -> Iterator[str]:
    for value in entity.values():
        for item in as_list(value) or [value]:
            if isinstance(item, Mapping) and set(item) == {"@id"}:
                yield str(item["@id"])


def _root(run: CrateRun, entries: Sequence[Entry], action_id: str) -> dict[str, Any]:
    names = [*(entry.name for entry in entries), MANIFEST, STATEMENT]
    return {
        "@id": "./",
        "@type": "Dataset",
        "name": f"{run.title} ({run.run_id})",
        "description": run.summary,
        "datePublished": run.ended_at,
        "license": {"@id": "#license"},
        "conformsTo": [{"@id": profile} for profile in _PROFILES],
        "hasPart": [{"@id": quote(name)} for name in names],
        "mainEntity": {"@id": WORKFLOW},
        "mentions": [{"@id": action_id}],
    }


def _contextual(run: CrateRun) -> Iterator[dict[str, Any]]:
    for profile, (name, version) in _PROFILES.items():
        yield {"@id": profile, "@type": "CreativeWork", "name": name, "version": version}
    yield {
        "@id": "#license",
        "@type": "CreativeWork",
        "name": "No licence stated",
        "description": "Whoever ran the experiment has not stated a licence for this evidence.",
    }
    yield {
        "@id": "#python",
        "@type": "ComputerLanguage",
        "name": "Python",
        "url": "https://www.python.org/",
    }
    software = {"@id": "#gated-rl", "@type": "SoftwareApplication", "name": "gated-rl"}
    yield software | ({"softwareVersion": run.version} if run.version else {})


def _action(run: CrateRun, entries: Sequence[Entry], action_id: str) -> dict[str, Any]:
    succeeded = run.status == "succeeded"
    status = "CompletedActionStatus" if succeeded else "FailedActionStatus"
    action = {
        "@id": action_id,
        "@type": "CreateAction",
        "name": f"Run {run.run_id}",
        "description": run.summary,
        "startTime": run.started_at,
        "endTime": run.ended_at,
        "instrument": {"@id": WORKFLOW},
        "object": [{"@id": quote(entry.name)} for entry in entries if entry.kind in _INPUT_KINDS],
        "result": [
            {"@id": quote(entry.name)}
            for entry in entries
            if entry.kind not in (*_INPUT_KINDS, "script", "code_revision", "code_patch")
        ],
        "actionStatus": f"http://schema.org/{status}",
    }
    return action if succeeded else {**action, "error": run.summary}


def _file(entry: Entry) -> dict[str, Any]:
    if entry.name == WORKFLOW:
        return {
            **_plain_file(entry.name, "Sources of the flows"),
            "@type": ["File", "SoftwareSourceCode", "ComputationalWorkflow"],
            "programmingLanguage": {"@id": "#python"},
            "isPartOf": {"@id": "#gated-rl"},
            "contentSize": str(entry.size),
            "sha256": entry.sha256,
        }
    return {
        **_plain_file(entry.name, f"{entry.kind.replace('_', ' ')} of the run"),
        "contentSize": str(entry.size),
        "sha256": entry.sha256,
    }


def _plain_file(name: str, description: str) -> dict[str, Any]:
    media_type = _MEDIA_TYPES.get(name.rpartition(".")[2], "application/octet-stream")
    return {
        "@id": quote(name),
        "@type": "File",
        "name": name,
        "description": description,
        "encodingFormat": media_type,
    }
