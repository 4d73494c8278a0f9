"""Seal what a run leaves behind: a flat folder of files that anyone can verify offline.

The bundle is derived from the run directory alone and holds no time of its own, so that sealing
the same run again gives the same bytes. Once its manifest is written it is never changed; a run
that went on after sealing gets a second bundle beside the first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evidence import attestation, decision, rocrate, sources
from evidence.audit import audit
from evidence.bundle_files import BundleFiles
from evidence.canonical import canonical_lines, sha256_hex
from evidence.episode_metrics import episode_metrics
from evidence.errors import ConflictError, InputError
from evidence.manifest import CRATE, KINDS, MANIFEST, RULE, STATEMENT, Candidate, Fitted, fit
from evidence.run import Run
from evidence.run_files import RunFiles
from evidence.secret_scan import scan_bytes
from evidence.step_metrics import step_metrics
from evidence.tables import UPDATES, TableSchema, table_schema
from evidence.text import escape_text
from evidence.values import as_list, as_mapping, is_text
from evidence.verdict_inputs import gate_statuses, judge_decision, roles_of

TEXT_ESCAPE = (
    "Lone surrogates, NUL and U+241B in texts are written as U+241B and four hexadecimal digits. "
    "Numbers that are not finite are written as the texts NaN, Infinity and -Infinity."
)
_MAX_BUNDLES = 1000


@dataclass(frozen=True, slots=True)
class Bundle:
    """A sealed bundle.

    Attributes:
        folder: its folder in the run directory.
        manifest_sha256: hash of its manifest, which names all others.
        files: names of its files.
        omitted: names of files that did not fit in, and why.
    """

    folder: str
    manifest_sha256: str
    files: tuple[str, ...]
    omitted: tuple[tuple[str, str], ...]


def build_bundle(run: Run, *, environment: Mapping[str, str] | None = None) -> Bundle:
    """Seal the bundle of a run that has posted its final result.

    Args:
        run: the run directory; the bundle becomes its folder ``bundle`` (or ``bundle-2``, ... if
            the run went on after an earlier bundle was sealed).
        environment: variables whose values must not occur; this process's by default. Those that
            the run took its service's key and headers from count whatever they are called.

    Returns:
        The bundle; the same one again if nothing has changed.

    Raises:
        InputError: if the run has no final result, or a file holds a secret: nothing is written then,
            and the message names file and line, never the secret.
    """
    status = (run.result() or {}).get("status")
    if status not in ("succeeded", "failed"):
        expected = "a run that has posted its final result"
        raise InputError("result.json status", status, expected, where=run.path)
    files = _sealed(run, fit(_collect(run)))
    _refuse_secrets(files, environment, _secret_variables(run), where=run.path)
    folder = _write(run, files)
    manifest = json.loads(files[MANIFEST])
    return Bundle(
        folder=folder,
        manifest_sha256=sha256_hex(files[MANIFEST]),
        files=tuple(sorted(files)),
        omitted=tuple((entry["name"], entry["reason"]) for entry in manifest["omitted"]),
    )


def bundle_folders(run: RunFiles) -> list[str]:
    """Return the folders of the sealed bundles of a run, oldest first."""
    sealed = []
    for number in range(1, _MAX_BUNDLES):
        folder = _folder(number)
        if not run.store.exists(f"{folder}/{MANIFEST}"):
            break
        sealed.append(folder)
    return sealed


def read_bundle(run: RunFiles) -> BundleFiles:
    """Read the newest bundle of a run, wherever the run directory lies.

    Raises:
        InputError: if the run has no sealed bundle.
    """
    folders = bundle_folders(run)
    if not folders:
        raise InputError("bundle", None, "a sealed bundle", where=run.path)
    start = f"{folders[-1]}/"
    data = {path.removeprefix(start): run.read_bytes(path) for path in run.files(folders[-1])}
    return BundleFiles(f"{run.path}/{folders[-1]}", data)


def json_lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return rows as JSON Lines, with the bundle's escape for texts and numbers."""
    return canonical_lines({k: _plain(v) for k, v in row.items()} for row in rows)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return escape_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# ---- what goes in ------------------------------------------------------------------------------


def _collect(run: Run) -> Iterator[Candidate]:
    yield from _run_files(run)
    yield from _kept_files(run)
    yield from _judged(run)
    yield from _code()
    yield Candidate("metrics-steps.jsonl", "metrics", json_lines(step_metrics(run)))
    yield Candidate("metrics-episodes.jsonl", "metrics", json_lines(episode_metrics(run)))
    yield _table(run, UPDATES, "metrics-updates.jsonl", "metrics")
    yield _table(run, table_schema("timings"), "timings.jsonl", "journal")
    yield _table(run, table_schema("restores"), "restores.jsonl", "journal")
    yield _json("tables.json", "metrics", {"version": 1, "sha256": run.content_digests()})
    yield _json("checkpoints.json", "checkpoints", checkpoints(run))


def _run_files(run: Run) -> Iterator[Candidate]:
    kinds = {
        "spec.json": "spec",
        "execution.json": "execution",
        "identity.json": "identity",
        "service-identity.json": "identity",
        "result.json": "result",
    }
    for name, kind in kinds.items():
        if run.store.exists(name):
            yield Candidate(name, kind, run.read_bytes(name))
    yield _effective_config(run)
    for path in run.files("gates"):
        yield Candidate(path.replace("gates/", "gate-", 1), "gate", run.read_bytes(path))
    for path in run.files("attempts"):
        name = path.replace("/", "-").removesuffix("-result.json") + ".json"
        yield Candidate(name.replace("attempts", "attempt", 1), "journal", run.read_bytes(path))
    events = b"".join(
        json.dumps(event, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
        for event in run.events()
    )
    yield Candidate("ledger.jsonl", "journal", events)


def _effective_config(run: Run) -> Candidate:
    """Return what was executed: as the run wrote it, else as its feasibility record says."""
    name, kind = "effective-config.json", "effective_config"
    if run.store.exists(name):
        return Candidate(name, kind, run.read_bytes(name))
    recorded = as_mapping(
        as_mapping((run.result() or {}).get("feasibility")).get("effective_config")
    )
    return _json(name, kind, recorded or {"spec": run.spec, "execution": run.execution})


def _kept_files(run: Run) -> Iterator[Candidate]:
    result = run.result() or {}
    audited = as_mapping(result.get("generation_audit"))
    generated = {audited.get("dataset_file"), audited.get("evaluation_file")}
    generated |= {audited.get("audit_file")}
    for path in run.files("files"):
        name = path.removeprefix("files/")
        yield Candidate(name, _kind_of(name, generated), run.read_bytes(path))


def _kind_of(name: str, generated: set[Any]) -> str:
    if name in generated:
        return "generated_tasks"
    starts = {"predictions": "predictions", "scored-observations": "metrics"}
    starts |= {"evaluator": "evaluator", "generated": "generated_tasks"}
    for start, kind in starts.items():
        if name.startswith(start):
            return kind
    ends = {".py": "script", ".patch": "code_patch"}
    return next((kind for end, kind in ends.items() if name.endswith(end)), "artifact")


def _judged(run: Run) -> Iterator[Candidate]:
    """Yield what the contract's rules say of this run, as anyone recomputes it."""
    result = run.result() or {}
    files = {path.removeprefix("files/"): run.read_bytes(path) for path in run.files("files")}
    judged, rule = judge_decision(run.spec, result, run.execution, files)
    record: dict[str, Any] = {
        "version": 1,
        "decision_validation": judged.to_record(),
        "notes": list(judged.notes),
        "descriptive": [],
        "scope": None,
    }
    if rule is not None and judged.criteria:
        record["descriptive"] = decision.advisories(rule, judged)
        record["scope"] = decision.scope_statement(rule, judged.criteria[0].n_items)
    yield _json("decision.json", "decision", record)
    history = {**result, "updates": run.posted_results()}
    answers = audit(run.spec, history, files=files, roles=roles_of(run.execution))
    yield _json("audit.json", "decision", answers)
    arms = as_mapping(as_mapping(result.get("metrics")).get("arms"))
    yield _json("per-arm-metrics.json", "metrics", arms)


def _code() -> Iterator[Candidate]:
    files = sources.read_sources()
    for package, pack in sources.source_packs(files).items():
        yield Candidate(f"script-{package}.txt", "script", pack)
    revision = sources.revision(files)
    yield _json("code-revision.json", "code_revision", revision.record)
    if revision.patch is not None:
        yield Candidate("code.patch", "code_patch", revision.patch)


def checkpoints(run: Run) -> list[dict[str, Any]]:
    """Return the checkpoints that a run names, as references without credentials."""
    found = []
    for event in run.events():
        uri = event.get("uri")
        if isinstance(uri, str):
            step = event.get("policy_version", 0)
            plain = uri.partition("?")[0]
            entry = {"arm": event.get("arm", "all"), "step": step, "uri": plain}
            found.append({**entry, "phase": event.get("phase"), "event": event["event"]})
    return found


def _table(run: Run, schema: TableSchema, name: str, kind: str) -> Candidate:
    rows = [row for key in run.keys(schema.name) for row in run.read_table(schema.name, key=key)]
    return Candidate(name, kind, json_lines(rows))


def _json(name: str, kind: str, value: Any) -> Candidate:
    text = json.dumps(value, indent=1, ensure_ascii=True, allow_nan=False)
    return Candidate(name, kind, text.encode("ascii") + b"\n")


# ---- sealing -----------------------------------------------------------------------------------


def _sealed(run: Run, fitted: Fitted) -> dict[str, bytes]:
    """Return all files of the bundle by name, with crate, manifest and statement."""
    files = {entry.name: data for entry, data in fitted.files}
    entries = [entry for entry, _ in fitted.files]
    metadata = rocrate.crate(_crate_run(run), entries)
    (crate_entry, crate_data) = fit([_json(CRATE, "crate", metadata)]).files[0]
    files[CRATE] = crate_data
    result = run.result() or {}
    manifest = {
        "version": 1,
        "run_id": run.run_id,
        "spec_sha256": run.spec_sha256,
        "execution_sha256": run.identity.get("execution_sha256"),
        "verdict": result.get("verdict"),
        "files": [entry.to_record() for entry in (*entries, crate_entry)],
        "omitted": [{**entry.to_record(), "reason": why} for entry, why in fitted.omitted],
        "rule": RULE,
        "kinds": list(KINDS),
        "text_escape": TEXT_ESCAPE,
        "checkpoints": checkpoints(run),
        "per_arm_metrics": as_mapping(as_mapping(result.get("metrics")).get("arms")),
    }
    files[MANIFEST] = _json(MANIFEST, "artifact", manifest).data
    files[STATEMENT] = _json(STATEMENT, "artifact", _statement(run, files)).data
    return files


def _statement(run: Run, files: Mapping[str, bytes]) -> dict[str, Any]:
    decided = json.loads(files["decision.json"])["decision_validation"]
    configuration = ("spec.json", "execution.json", "effective-config.json")
    return attestation.statement(
        run_id=run.run_id,
        manifest_sha256=sha256_hex(files[MANIFEST]),
        verdict=str((run.result() or {}).get("verdict", "inconclusive")),
        criteria=decided["criteria"],
        gates=gate_statuses(files),
        configuration={name: sha256_hex(files[name]) for name in configuration if name in files},
    )


def _crate_run(run: Run) -> rocrate.CrateRun:
    result, events = run.result() or {}, run.events()
    posted = [event["at"] for event in events if event["event"] == "result"]
    return rocrate.CrateRun(
        run_id=run.run_id,
        title=str(run.spec.get("title", "Untitled comparison")),
        summary=str(result.get("summary", "")) or "No summary.",
        status=str(result.get("status")),
        started_at=events[0]["at"],
        ended_at=posted[-1],
        version=sources.installed_version(),
    )


def _secret_variables(run: Run) -> set[str]:
    """Return the names of the variables that held the service's key and headers in any attempt."""
    names: list[Any] = []
    for event in run.events("started"):
        service = as_mapping(event.get("service"))
        headers = map(as_mapping, as_list(service.get("header_env")))
        names += [service.get("api_key_env"), *(header.get("variable") for header in headers)]
    return set(filter(is_text, names))


def _refuse_secrets(
    files: Mapping[str, bytes],
    environment: Mapping[str, str] | None,
    secret_variables: set[str],
    *,
    where: str,
) -> None:
    for name, data in sorted(files.items()):
        found = scan_bytes(name, data, environment=environment, secret_variables=secret_variables)
        if found:
            expected = "no secret in any file of the bundle; nothing was written"
            raise InputError(f"{name}, {found[0]}", "a secret", expected, where=where)


def _write(run: Run, files: Mapping[str, bytes]) -> str:
    """Write the files, the manifest and the statement last; returns the folder."""
    for number in range(1, _MAX_BUNDLES):
        folder = _folder(number)
        sealed = run.store.read_if_exists(f"{folder}/{MANIFEST}")
        if sealed is not None and sealed != files[MANIFEST]:
            continue
        present = {path.removeprefix(f"{folder}/") for path in run.files(folder)}
        if not present <= set(files):
            continue  # what a crash left of a bundle with other files
        for name in [*sorted(set(files) - {MANIFEST, STATEMENT}), STATEMENT, MANIFEST]:
            if sealed is None:
                run.store.replace(f"{folder}/{name}", files[name])
            else:
                run.write_bytes(f"{folder}/{name}", files[name])
        return folder
    raise ConflictError("bundle", f"{_MAX_BUNDLES} bundles", "fewer bundles", where=run.path)


def _folder(number: int) -> str:
    return "bundle" if number == 1 else f"bundle-{number}"
