"""Check a bundle offline, from its files alone: hashes, means, interval, verdict, consistency.

Nothing outside the bundle's folder is read, nothing at all is written, and no network is used. A
verification also lists what it could not check, since a bundle proves that its parts agree, not
that the remote computation took place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evidence import attestation, deviations, output, rocrate
from evidence.audit import audit
from evidence.bundle_files import BundleFiles, read_bundle_files
from evidence.canonical import digest, loads_strict, sha256_hex
from evidence.criteria import DecisionResult
from evidence.errors import InputError, shorten
from evidence.ledger import LEDGER
from evidence.manifest import (
    CRATE,
    MANIFEST,
    STATEMENT,
    UNLISTED,
    Manifest,
    read_manifest,
    whole_file,
)
from evidence.observations import NotRetainedError, flat_rows, read_file
from evidence.predictions import Totals, is_close, mean_of, pairing_issue, totals_of
from evidence.sources import source_digest, unpack_sources
from evidence.values import as_list, as_mapping, same, show
from evidence.verdict_inputs import (
    can_judge_generation,
    final_verdict,
    gate_conflicts,
    gate_statuses,
    judge_decision,
    roles_of,
)

_ARCHIVES: Mapping[bytes, str] = {
    b"PK\x03\x04": "zip",
    b"PK\x05\x06": "zip",
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"Rar!\x1a\x07": "rar",
    b"PAR1": "parquet",
}
_TAR_MARK = slice(257, 262)
NEVER_CHECKED = (
    "whether the remote service computed what it reported: remote execution is not attested",
    "who made this bundle: it is not signed",
    "checkpoints: they are references and were not fetched",
    "grades: the grader was not run again on the predictions",
)


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found.

    Attributes:
        where: the folder.
        run_id: name of the run, if the manifest could be read.
        verdict: the verdict as posted, if there is one.
        problems: what does not hold, one sentence each, naming the file.
        checked: what was recomputed and holds.
        unchecked: what could not be checked, and why.
        recomputed: the recomputed decision, per-arm means and verdict.
    """

    where: str
    run_id: str | None
    verdict: str | None
    problems: tuple[str, ...]
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    recomputed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether everything that could be checked holds."""
        return not self.problems

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "where": self.where,
            "ok": self.ok,
            "run_id": self.run_id,
            "verdict": self.verdict,
            "problems": list(self.problems),
            "checked": list(self.checked),
            "unchecked": list(self.unchecked),
            "recomputed": dict(self.recomputed),
        }


def verify_bundle(path: str | Path) -> Verification:
    """Verify a bundle's folder, or the newest bundle of a run directory.

    Args:
        path: the folder.

    Returns:
        What holds, what does not, and what could not be checked. Malformed files are problems.

    Raises:
        InputError: if there is no bundle at that path.
    """
    return verify_files(read_bundle_files(path))


def verify_files(files: BundleFiles) -> Verification:
    """Verify a bundle whose files were read."""
    check = _Check(files)
    check.run("manifest", check.manifest_is_whole)
    if check.manifest is not None:
        for name, step in check.steps().items():
            check.run(name, step)
    return check.result()


class _Check:
    """The steps of one verification and what they found."""

    def __init__(self, files: BundleFiles) -> None:
        self.files = files
        self.data = files.data
        self.manifest: Manifest | None = None
        self.problems: list[str] = list(files.problems)
        self.checked: list[str] = []
        self.unchecked: list[str] = []
        self.recomputed: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self._decision: DecisionResult | None = None
        self._wholes: Mapping[str, bytes] | None = None
        self._sums: dict[str, Totals | None] = {}
        self._means: dict[tuple[str, str], list[float]] = {}

    def steps(self) -> dict[str, Callable[[], str | None]]:
        return {
            "files": self.files_match,
            "spec": self.spec_matches,
            "statement": self.statement_matches,
            "crate": self.crate_matches,
            "sources": self.sources_match,
            "predictions": self.predictions_match,
            "metrics": self.metrics_match,
            "observations": self.observations_match,
            "decision": self.decision_matches,
            "validations": self.validations_match,
            "result": self.result_is_consistent,
            "gates": self.gates_are_consistent,
            "verdict": self.verdict_matches,
        }

    def run(self, name: str, step: Callable[[], str | None]) -> None:
        """Take a step; whatever is malformed is a problem of that step."""
        before = len(self.problems)
        try:
            done = step()
        except InputError as error:
            self.problems.append(f"{name}: {error}")
            return
        if done is not None and len(self.problems) == before:
            self.checked.append(done)

    def result(self) -> Verification:
        posted = self._values.get("result.json")
        return Verification(
            where=self.files.where,
            run_id=self.manifest.run_id if self.manifest else None,
            verdict=as_mapping(posted).get("verdict"),
            problems=tuple(dict.fromkeys(self.problems)),
            checked=tuple(self.checked),
            unchecked=(*self.unchecked, *NEVER_CHECKED),
            recomputed=self.recomputed,
        )

    # ---- steps ---------------------------------------------------------------------------------

    def manifest_is_whole(self) -> str:
        self.manifest = read_manifest(self._bytes(MANIFEST), where=MANIFEST)
        omitted = as_list(self.manifest.record.get("omitted"))
        for entry in omitted:
            name, why = as_mapping(entry).get("name"), as_mapping(entry).get("reason")
            self.unchecked.append(f"{shorten(name)[1:-1]}: left out of the bundle ({why})")
        return "the manifest has the right form"

    def files_match(self) -> str:
        entries = self._manifest().entries
        for entry in entries:
            data = self.data.get(entry.name)
            if data is None:
                self.problems.append(f"{entry.name}: listed in the manifest, but missing")
            elif len(data) != entry.size or sha256_hex(data) != entry.sha256:
                self.problems.append(f"{entry.name}: its bytes are not those of the manifest")
            elif entry.rows is not None and data.count(b"\n") != entry.rows:
                self.problems.append(f"{entry.name}: expected {entry.rows} rows")
        listed = {entry.name for entry in entries} | set(UNLISTED)
        for name in sorted(set(self.data) - listed):
            self.problems.append(f"{shorten(name)[1:-1]}: not listed in the manifest")
        for name, data in sorted(self.data.items()):
            kind = _archive_kind(data)
            if kind is not None:
                self.problems.append(f"{shorten(name)[1:-1]}: an archive ({kind}) inside a bundle")
        return f"{len(entries)} files have the size and SHA-256 of the manifest, none is extra"

    def spec_matches(self) -> str:
        manifest = self._manifest().record
        pairs = (("spec.json", "spec_sha256"), ("execution.json", "execution_sha256"))
        identity = as_mapping(self._json("identity.json"))
        for name, key in pairs:
            found = digest(self._json(name)) if name in self.data else None
            for source, record in ((MANIFEST, manifest), ("identity.json", identity)):
                if record.get(key) != found:
                    self.problems.append(f"{name}: its digest is not the {key} of {source}")
        if identity.get("run_id") != manifest.get("run_id"):
            self.problems.append("identity.json: its run_id is not that of the manifest")
        return "spec and execution file have the digests of the run's identity"

    def statement_matches(self) -> str:
        statement = self._json(STATEMENT)
        self.problems += [
            f"{STATEMENT}: {issue}" for issue in attestation.statement_issues(statement)
        ]
        if attestation.subject_digests(statement) != [sha256_hex(self._bytes(MANIFEST))]:
            self.problems.append(f"{STATEMENT}: its subject is not this manifest")
        configuration = ("spec.json", "execution.json", "effective-config.json")
        decided = as_mapping(as_mapping(self._json("decision.json")).get("decision_validation"))
        expected = attestation.statement(
            run_id=self._manifest().run_id,
            manifest_sha256=sha256_hex(self._bytes(MANIFEST)),
            verdict=str(self._result().get("verdict", "inconclusive")),
            criteria=[as_mapping(one) for one in as_list(decided.get("criteria"))],
            gates=gate_statuses(self.data),
            configuration={n: sha256_hex(self.data[n]) for n in configuration if n in self.data},
        )
        if not same(statement, expected):
            self.problems.append(f"{STATEMENT}: does not follow from decision, gates and result")
        return "the in-toto statement has the right form and names this manifest and verdict"

    def crate_matches(self) -> str:
        issues = rocrate.crate_issues(self._json(CRATE), sorted(self.data))
        self.problems += [f"{CRATE}: {issue}" for issue in issues]
        return "the RO-Crate has the right form and describes exactly these files"

    def sources_match(self) -> str:
        found: dict[str, bytes] = {}
        for entry in self._manifest().entries:
            if entry.kind == "script" and entry.name.endswith(".txt"):
                found |= unpack_sources(self._bytes(entry.name), where=entry.name)
        revision = as_mapping(self._json("code-revision.json"))
        if revision.get("source_sha256") != source_digest(found):
            self.problems.append("code-revision.json: source_sha256 is not that of the sources")
        return f"{len(found)} source files have the digests of the code revision"

    def predictions_match(self) -> str | None:
        """Recompute every per-arm mean from the raw predictions."""
        means: dict[str, Any] = {}
        for score in self._scores():
            name = str(score.get("predictions_ref"))
            totals = self._totals(name)
            if totals is None:
                self.unchecked.append(f"{name}: predictions are not in the bundle")
                continue
            arm, metric = str(score.get("arm")), str(score.get("metric"))
            mean = mean_of(totals, score)
            if mean is None:
                self.problems.append(f"{name}: mean of {metric} for {arm}: no such predictions")
                continue
            means.setdefault(arm, {})[metric] = mean
            self._means.setdefault((arm, metric), []).append(mean)
            if not is_close(score.get("value"), mean):
                posted = f"{shorten(score.get('value'))} posted, {mean!r} found"
                self.problems.append(f"{name}: mean of {metric} for {arm}: {posted}")
        self.recomputed["per_arm_means"] = means
        if not means:
            self.unchecked.append("per-arm means: the run has no predictions")
            return None
        return f"means of {len(means)} arms follow from their raw predictions"

    def metrics_match(self) -> str | None:
        """Hold posted metrics against the recomputed means of the same name."""
        arms = as_mapping(as_mapping(self._result().get("metrics")).get("arms"))
        if "per-arm-metrics.json" in self.data and not same(
            self._json("per-arm-metrics.json"), arms
        ):
            self.problems.append("per-arm-metrics.json: is not what the result posted")
        for (arm, metric), means in self._means.items():
            posted = as_mapping(arms.get(arm)).get(metric)
            known = [*means, sum(means) / len(means)]
            if posted is not None and not any(is_close(posted, mean) for mean in known):
                place = f"result.json: metrics.arms.{show(arm)}.{show(metric)}"
                self.problems.append(f"{place}: {shorten(posted)} posted, {means[-1]!r} found")
        return f"{len(self._means)} posted metrics are these means" if self._means else None

    def observations_match(self) -> str | None:
        """Compare what the rule reads with the predictions, item by item."""
        names = dict.fromkeys(str(score.get("predictions_ref")) for score in self._scores())
        predictions = [rows for rows in map(self._rows, names) if rows is not None]
        report = as_mapping(self._result().get("decision"))
        observed = as_list(report.get("observations"))
        if report.get("observations_file") is not None:
            try:
                observed = read_file(report["observations_file"], self._files())
            except NotRetainedError:
                return None  # the decision says so
        if not observed or not predictions:
            return None
        issue = pairing_issue(observed, predictions)
        if issue is not None:
            self.problems.append(f"observations: {issue}")
        return f"{len(observed)} observations are those of the predictions"

    def decision_matches(self) -> str:
        judged = self._judged()
        recomputed = judged.to_record()
        self.recomputed["decision"] = recomputed
        sealed = as_mapping(self._json("decision.json")).get("decision_validation")
        if not same(sealed, json.loads(json.dumps(recomputed))):
            self.problems.append("decision.json: does not follow from the observations")
        return f"the decision ({judged.status}) follows from the observations by the frozen rule"

    def validations_match(self) -> str:
        # The decision is judged once for all steps: it reads the largest file.
        record = {**self._result(), "updates": self._posted(), "decision": None}
        answers = audit(
            self._json("spec.json"), record, files=self._files(), roles=roles_of(self._execution())
        )
        answers["decision_validation"] = self._judged().to_record()
        sealed = as_mapping(self._json("audit.json"))
        expected = json.loads(json.dumps(answers))
        unseen = {"deviations_validation"} if self._is_left_out(LEDGER) else set()
        for name in sorted((set(sealed) | set(expected)) - unseen):
            if not same(sealed.get(name), expected.get(name)):
                self.problems.append(
                    f"audit.json: {shorten(name)[1:-1]} does not follow from the result"
                )
        return f"{len(expected)} validations follow from the posted result"

    def result_is_consistent(self) -> str | None:
        result, spec = self._result(), self._json("spec.json")
        history = self._posted()
        issues = [
            *output.validate(result, spec=spec).issues,
            *output.validate_history(history).issues,
        ]
        self.problems += [f"result.json: {issue}" for issue in issues]
        if not history or not same(history[-1], result):
            self.problems.append("result.json: is not the last result of the ledger")
        has_history = not self._is_left_out(LEDGER)
        late = deviations.validate(history)
        if has_history and late.status == "unrecorded":
            self.problems += [f"{LEDGER}: {issue}" for issue in late.issues]
        arms = as_mapping(as_mapping(result.get("metrics")).get("arms"))
        if not same(self._manifest().record.get("per_arm_metrics"), arms):
            self.problems.append(f"{MANIFEST}: per_arm_metrics are not those of the result")
        if not has_history:
            self.unchecked.append("deviations: the ledger tells whether they were posted in time")
            return None
        return f"{len(history)} posted results are consistent; deviations were recorded in time"

    def gates_are_consistent(self) -> str:
        self.problems += gate_conflicts(self.data)
        if not can_judge_generation(self._result(), self._files()):
            self.unchecked.append("generation audit: the generated tasks are not in the bundle")
        return "each gate's status is that of its validation"

    def verdict_matches(self) -> str:
        result = self._result()
        final = final_verdict(
            self._judged(),
            spec=self._json("spec.json"),
            result=result,
            gates=gate_statuses(self.data),
            files=self._files(),
            identity=self._json("identity.json"),
        )
        self.recomputed["verdict"] = final.to_record()
        posted = result.get("verdict")
        if posted != final.verdict:
            found = f"{shorten(posted)} was posted, {final.verdict!r} follows from the files"
            self.problems.append(f"result.json: verdict {found}")
        if self._manifest().record.get("verdict") != posted:
            self.problems.append(f"{MANIFEST}: its verdict is not that of the result")
        return f"the verdict ({final.verdict}) follows from decision, gates and deviations"

    def _judged(self) -> DecisionResult:
        if self._decision is None:
            self._decision, _ = judge_decision(
                self._json("spec.json"), self._result(), self._execution(), self._files()
            )
        return self._decision

    # ---- reading -------------------------------------------------------------------------------

    def _manifest(self) -> Manifest:
        if self.manifest is None:
            raise InputError(MANIFEST, None, "a manifest")
        return self.manifest

    def _bytes(self, name: str) -> bytes:
        if name not in self.data:
            raise InputError(name, "missing", "a file of the bundle")
        return self.data[name]

    def _json(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = loads_strict(self._bytes(name), where=name)
        return self._values[name]

    def _result(self) -> Mapping[str, Any]:
        return as_mapping(self._json("result.json"))

    def _scores(self) -> list[Mapping[str, Any]]:
        evaluation = as_mapping(self._result().get("evaluation"))
        return [as_mapping(score) for score in as_list(evaluation.get("scores"))]

    def _totals(self, name: str) -> Totals | None:
        """Return the sums of a predictions file, None if it is not there."""
        if name not in self._sums:
            rows = self._rows(name)
            self._sums[name] = None if rows is None else totals_of(rows, where=name)
        return self._sums[name]

    def _execution(self) -> Any:
        return self._json("execution.json") if "execution.json" in self.data else None

    def _posted(self) -> list[Any]:
        events = self._rows(LEDGER)
        if events is None:
            self.unchecked.append("posted results: the ledger is not in the bundle")
            return [self._result()]
        return [event.get("result") for event in events if event.get("event") == "result"]

    def _rows(self, name: str) -> list[Mapping[str, Any]] | None:
        """Return the rows of a JSON Lines file, put together from its parts; None if not there."""
        if name not in self._values:
            data = self._whole(name)
            self._values[name] = None if data is None else _read_lines(data, name)
        found: list[Mapping[str, Any]] | None = self._values[name]
        return found

    def _whole(self, name: str) -> bytes | None:
        return whole_file(name, self.data, self._manifest().entries)

    def _files(self) -> Mapping[str, bytes]:
        """Return the bundle's files, and those that it holds in parts put together."""
        if self._wholes is None:
            named = {str(one.part_of["name"]) for one in self._manifest().entries if one.part_of}
            wholes = {name: self._whole(name) for name in named}
            self._wholes = {name: data for name, data in wholes.items() if data is not None}
        return {**self.data, **self._wholes}

    def _is_left_out(self, name: str) -> bool:
        """Whether a file is in the bundle neither whole nor in parts, as the manifest says."""
        omitted = map(as_mapping, as_list(self._manifest().record.get("omitted")))
        return self._whole(name) is None and name in [entry.get("name") for entry in omitted]


def _archive_kind(data: bytes) -> str | None:
    if data[_TAR_MARK] == b"ustar":
        return "tar"
    return next((kind for magic, kind in _ARCHIVES.items() if data.startswith(magic)), None)


def _read_lines(data: bytes, name: str) -> list[Mapping[str, Any]]:
    if data and not data.endswith(b"\n"):
        raise InputError(name, "a torn last line", "whole lines")
    lines = data.split(b"\n")[:-1]
    joined = b"[" + b",".join(lines) + b"]"
    rows = flat_rows(joined)
    if rows is None:
        rows = loads_strict(joined, where=name)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise InputError(f"line {number}", row, "an object", where=name)
    if len(rows) != len(lines):
        raise InputError(name, len(rows), "one object a line")
    return rows
