"""What one arm's entry of an initialization provenance proves, taken alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from evidence.gate import GateStatus
from evidence.values import (
    as_list,
    as_mapping,
    is_count,
    is_integer,
    is_sha256,
    is_text,
    same,
    show,
)

_SAME_FAMILY = {"adam": "adam", "adamw": "adam"}
"""Tinker's AdamParams is AdamW; specs name either."""

_PRECEDENCE: tuple[GateStatus, ...] = ("failed", "unverified", "passed")


def worst(statuses: Iterable[GateStatus]) -> GateStatus:
    """Return the status of the whole: a failure outweighs a gap, a gap outweighs a pass."""
    found = set(statuses)
    return next((status for status in _PRECEDENCE if status in found), "passed")


@dataclass(frozen=True, slots=True)
class Finding:
    """A status, and what the problem is unless it passed."""

    status: GateStatus
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ArmEvidence:
    """What an arm's entry establishes.

    Attributes:
        finding: the arm's own status, with the first problem of that status.
        base: base checkpoint, if named.
        adapter: SHA-256 of the adapter, if proven.
        uri: immutable full initialization checkpoint that was loaded, if proven.
        output: hashes of the fixed batch and of the output on it, if recorded before the first
            update.
        restore_count: as reported.
    """

    finding: Finding
    base: str | None
    adapter: str | None
    uri: str | None
    output: tuple[str, str] | None
    restore_count: object


def judge_arm(
    plan: Mapping[str, Any], entry: Mapping[str, Any], *, version: object, fixed_batch: bool
) -> ArmEvidence:
    """Judge one arm's entry against its plan.

    Args:
        plan: the arm in the spec's restoration plan: name, optimizer, optimizer_config.
        entry: the arm's entry of the provenance.
        version: version of the provenance; only 1 is known.
        fixed_batch: whether the output on a fixed batch is required.
    """
    start = as_mapping(entry.get("initialization"))
    adapter, uri, findings = _proofs(start)
    if not is_integer(version) or version != 1:
        findings.insert(0, Finding("unverified", "initialization provenance version 1."))
    findings.extend(_optimizer(plan, entry))
    output, output_findings = _output(entry, fixed_batch=fixed_batch)
    findings.extend(output_findings)
    status = worst(finding.status for finding in findings)
    first = next((finding for finding in findings if finding.status == status), Finding("passed"))
    base = start.get("base_checkpoint")
    return ArmEvidence(
        finding=first,
        base=base if is_text(base) else None,
        adapter=adapter,
        uri=uri,
        output=output,
        restore_count=entry.get("restore_count"),
    )


def _gap(problem: str) -> Finding:
    return Finding("unverified", problem)


def _proofs(start: Mapping[str, Any]) -> tuple[str | None, str | None, list[Finding]]:
    """Return the proven adapter hash, the proven checkpoint URI, and what is wrong."""
    findings = []
    adapter, hashed = start.get("adapter_sha256"), is_sha256(start.get("adapter_sha256"))
    if not is_text(start.get("base_checkpoint")):
        findings.append(_gap("base_checkpoint is required."))
    if not is_text(start.get("evidence_ref")):
        findings.append(_gap("initialization evidence_ref is required."))
    if start.get("before_first_update") is not True:
        findings.append(_gap("initialization must be observed before the first update."))
    if start.get("source") not in ("server_response", "local_hash"):
        findings.append(_gap("initialization source must be server_response or local_hash."))
    if adapter is not None and not hashed:
        findings.append(_gap("adapter_sha256 must be 64 hexadecimal digits."))
    loaded, missing = _loaded_checkpoint(start)
    if loaded is not None and loaded.status == "failed":
        findings.append(loaded)
    if findings:
        return None, None, findings
    uri = start.get("checkpoint_uri") if not missing else None
    if not hashed and uri is None:
        findings.append(_gap(f"needs adapter_sha256, or a full checkpoint load: {missing}."))
    return (str(adapter).lower() if hashed else None), uri, findings


def _loaded_checkpoint(start: Mapping[str, Any]) -> tuple[Finding | None, str | None]:
    """Return an observed difference in the load, and the first part of a full proof missing."""
    declared, loaded = start.get("checkpoint_uri"), start.get("loaded_checkpoint_uri")
    if start.get("load_succeeded") is False:
        return Finding("failed", "loading the initial checkpoint did not succeed."), "load"
    if is_text(declared) and is_text(loaded) and declared != loaded:
        return Finding("failed", "loaded_checkpoint_uri is not the declared checkpoint_uri."), "uri"
    needs = {
        "checkpoint_uri": is_text(declared),
        "source=server_response": start.get("source") == "server_response",
        "checkpoint_immutable=true": start.get("checkpoint_immutable") is True,
        "checkpoint_scope=full_initialization": start.get("checkpoint_scope")
        == "full_initialization",
        "loaded_checkpoint_uri": is_text(loaded),
        "load_succeeded=true": start.get("load_succeeded") is True,
    }
    return None, next((need for need, met in needs.items() if not met), None)


def _optimizer(plan: Mapping[str, Any], entry: Mapping[str, Any]) -> list[Finding]:
    """Judge the optimizer at creation and after every restore."""
    count, checks = entry.get("restore_count"), as_list(entry.get("optimizer_checks"))
    if not is_count(count):
        return [_gap("restore_count must be a whole number of at least 0.")]
    after = [as_mapping(check).get("after_restore") for check in checks]
    numbers = sorted(number for number in after if is_count(number))
    findings = []
    if len(numbers) != len(after) or len(numbers) != count + 1 or numbers != [*range(len(numbers))]:
        findings.append(
            _gap(f"exactly one optimizer check for each of 0 to {show(count)} restores.")
        )
    for check in checks:
        findings.extend(_optimizer_check(plan, as_mapping(check)))
    return findings


def _optimizer_check(plan: Mapping[str, Any], check: Mapping[str, Any]) -> list[Finding]:
    where = f"optimizer check after_restore={show(check.get('after_restore'))}"
    actual, config = check.get("actual"), as_mapping(check.get("actual_config"))
    if check.get("source") != "server_response" or not is_text(actual):
        return [_gap(f"{where}: the active optimizer was not read from a server response.")]
    requested, wanted = plan.get("optimizer"), plan.get("optimizer_config")
    findings = []
    if not is_text(requested) or not isinstance(wanted, Mapping | None):
        findings.append(_gap(f"{where}: the spec names no optimizer with its config."))
    elif not same_family(actual, requested):
        findings.append(
            Finding("failed", f"{where}: {show(actual)} is active, {show(requested)} is planned.")
        )
    for key, value in as_mapping(wanted).items():
        if config.get(key) is None:
            findings.append(_gap(f"{where}: {show(key)} was not read from a server response."))
        elif not same(config[key], value):
            findings.append(Finding("failed", f"{where}: {show(key)} is not as planned."))
    if check.get("before_next_update") is not True:
        findings.append(_gap(f"{where}: must be made before the next update."))
    if not is_text(check.get("evidence_ref")):
        findings.append(_gap(f"{where}: evidence_ref is required."))
    return findings


def same_family(one: str, other: str) -> bool:
    """Whether two names of optimizers stand for one; Adam and AdamW do."""
    return _family(one) == _family(other)


def _family(name: str) -> str:
    plain = name.strip().casefold()
    return _SAME_FAMILY.get(plain, plain)


def _output(
    entry: Mapping[str, Any], *, fixed_batch: bool
) -> tuple[tuple[str, str] | None, list[Finding]]:
    found = as_mapping(entry.get("initial_output"))
    batch, output = found.get("batch_sha256"), found.get("output_sha256")
    recorded = (
        found.get("available") is True
        and found.get("before_first_update") is True
        and is_text(found.get("evidence_ref"))
    )
    if recorded and is_sha256(batch) and is_sha256(output):
        return (batch.lower(), output.lower()), []
    if fixed_batch:
        return None, [_gap("initial_output on the fixed batch was not recorded.")]
    return None, []
