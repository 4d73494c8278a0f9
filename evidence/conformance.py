"""The record of a service's conformance: measured numbers, judged; pure.

`judge` holds measured numbers against `evidence.conformance_probes`. The record says which probes a
comparison relies on and which mistake a wrong answer looks like, and what the service does not
report, which alone may be accepted as missing evidence.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from evidence.canonical import canonical_bytes, digest, loads_strict
from evidence.conformance_probes import EXPLAINS_AWAY, LARGEST_NOISE, NEEDS, PROBES, Probe, Values
from evidence.errors import InputError
from evidence.gate import CheckResult, GateResult, GateStatus, SourceRef

Verdict = Literal["conforms", "differs", "cannot_tell"]
Scope = Literal["whole", "short"]
GATE = "conformance"
FILE = "conformance.json"
VERSION = 1

UNREPORTED: Mapping[str, str] = {
    "reported_optimizer": "optimizer",
    "reported_optimizer_settings": "optimizer_settings",
    "reported_checkpoint": "checkpoint_details",
    "reported_rank": "lora_rank",
    "reported_base_model": "base_model",
    "reported_loss": "loss",
    "custom_equals_builtin": "builtin_loss",
}
"""Probes that find out whether something is reported at all, and what that is."""


EVIDENCE_OF: Mapping[str, frozenset[str]] = {
    "correctness": frozenset({"loss", "builtin_loss"}),
    "restoration": frozenset(
        {"optimizer", "optimizer_settings", "checkpoint_details", "base_model", "lora_rank"}
    ),
}
"""Gates that rest on what a service reports, and what that is."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one probe measured.

    Attributes:
        probe: its name.
        values: the numbers; None for one that the service does not give.
        refused: why there are none, in the service's words.
        silent: whether the service does not report what was asked for.
        unusable: whether the refusal is itself the wrong answer, because a comparison needs this.
    """

    probe: str
    values: Values = field(default_factory=dict)
    refused: str | None = None
    silent: bool = False
    unusable: bool = False


class ProbeResult(BaseModel):
    """One row of the record."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    probe: str
    asks: str
    expected: str
    observed: dict[str, float | None]
    verdict: Verdict
    looks_like: str | None
    """The known mistake whose numbers these are."""
    needed_by: tuple[str, ...]
    blocking: bool
    """Whether the comparison that asked must not go on."""
    reason: str | None


class ConformanceRecord(BaseModel):
    """What one service did with one base model, at one time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = VERSION
    scope: Scope
    service: dict[str, Any]
    """Address and names of environment variables; no values."""
    base_model: str
    versions: dict[str, str]
    """Of the client's packages."""
    verdict: Verdict
    """``differs`` if any probe does, else ``cannot_tell`` if any cannot, else ``conforms``."""
    blocking: tuple[str, ...]
    """Probes that a comparison needs and that differ."""
    faults: tuple[str, ...]
    """The known mistakes that the wrong answers look like."""
    unreported: tuple[str, ...]
    """What the service does not report."""
    needs: tuple[str, ...]
    probes: tuple[ProbeResult, ...]
    seconds: float | None = None

    @classmethod
    def parse(
        cls, raw: bytes | str | Mapping[str, Any], *, where: str = "record"
    ) -> ConformanceRecord:
        """Read a record back.

        Raises:
            InputError: if it is not one.
        """
        document = loads_strict(raw, where=where) if isinstance(raw, bytes | str) else raw
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])) or "record"
            raise InputError(name, first.get("input"), first["msg"], where=where) from None

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """Digest of the whole record."""
        return digest(self.to_record())

    def to_bytes(self) -> bytes:
        """Return the canonical bytes of the record, with a line end."""
        return canonical_bytes(self.to_record()) + b"\n"

    def to_gate(self, reads: Sequence[SourceRef] = ()) -> GateResult:
        """Return the record as a gate: it fails where a probe that is needed differs.

        A probe that cannot tell does not stop a comparison: the preflights after this gate decide
        what evidence the spec requires.
        """
        rows = tuple(_check(row) for row in self.probes)
        reasons = tuple(
            f"{row.probe}: {row.reason}" for row in self.probes if row.probe in self.blocking
        )
        status: GateStatus = "failed" if self.blocking else "passed"
        return GateResult(
            gate=GATE, status=status, reasons=reasons, checks=rows, reads=tuple(reads)
        )


def refusal_to_accept(gate: str, unreported: Collection[str]) -> str | None:
    """Why missing evidence of a gate may not be accepted although a person asked for that.

    Args:
        gate: the gate, whose answer is ``unverified``.
        unreported: what the service was seen not to report.

    Returns:
        The reason; None where it may be accepted. Gates that do not rest on a service's reports
        may always be: no service could give what they miss.
    """
    reports = EVIDENCE_OF.get(gate)
    if reports is None or reports.intersection(unreported):
        return None
    return (
        f"not accepted: the service reports {', '.join(sorted(reports))}, so that what is missing "
        "is not evidence that it cannot give"
    )


def judge(
    measurements: Sequence[Measurement], *, needs: Collection[str] = NEEDS
) -> tuple[ProbeResult, ...]:
    """Hold measured numbers against what they should be.

    Args:
        measurements: at most one for each probe; a probe without any is left out.
        needs: parts of a comparison that are relied on.

    Raises:
        InputError: for an unknown probe or one that was measured twice.
    """
    found: dict[str, Measurement] = {}
    for measurement in measurements:
        if measurement.probe not in PROBES or measurement.probe in found:
            expected = "each known probe at most once"
            raise InputError("probe", measurement.probe, expected)
        found[measurement.probe] = measurement
    return tuple(
        _result(probe, found[name], needs) for name, probe in PROBES.items() if name in found
    )


def record_of(
    measurements: Sequence[Measurement],
    *,
    scope: Scope,
    service: Mapping[str, Any],
    base_model: str,
    versions: Mapping[str, str],
    needs: Collection[str] = NEEDS,
    seconds: float | None = None,
) -> ConformanceRecord:
    """Judge measurements and put them into a record."""
    rows = judge(measurements, needs=needs)
    verdicts = {row.verdict for row in rows}
    order: tuple[Verdict, ...] = ("differs", "cannot_tell", "conforms")
    silent = {measurement.probe for measurement in measurements if measurement.silent}
    return ConformanceRecord(
        scope=scope,
        service=dict(service),
        base_model=base_model,
        versions=dict(versions),
        verdict=next((one for one in order if one in verdicts), "cannot_tell"),
        blocking=tuple(row.probe for row in rows if row.blocking),
        faults=named_faults(rows),
        unreported=tuple(UNREPORTED[name] for name in UNREPORTED if name in silent),
        needs=tuple(sorted(needs)),
        probes=rows,
        seconds=seconds,
    )


def named_faults(rows: Sequence[ProbeResult]) -> tuple[str, ...]:
    """The mistakes that the wrong answers look like, without those that another one explains."""
    named = list(dict.fromkeys(row.looks_like for row in rows if row.looks_like is not None))
    explained = {other for name in named for other in EXPLAINS_AWAY.get(name, ())}
    return tuple(name for name in named if name not in explained)


def _result(probe: Probe, measurement: Measurement, needs: Collection[str]) -> ProbeResult:
    values = {name: _finite(value) for name, value in measurement.values.items()}
    verdict, fault, blocks = _verdict(probe, measurement, values)
    needed = any(part in needs for part in probe.needed_by)
    return ProbeResult(
        probe=probe.probe,
        asks=probe.asks,
        expected=probe.expected,
        observed=values,
        verdict=verdict,
        looks_like=fault,
        needed_by=probe.needed_by,
        blocking=verdict == "differs" and needed and blocks,
        reason=_reason(probe, measurement, values, verdict, fault),
    )


def _verdict(
    probe: Probe, measurement: Measurement, values: Values
) -> tuple[Verdict, str | None, bool]:
    if measurement.refused is not None and not measurement.unusable:
        return "cannot_tell", None, False
    noise = values.get("noise")
    if noise is not None and noise > LARGEST_NOISE:
        return "cannot_tell", None, False
    right = False if measurement.refused is not None else probe.conforms(values)
    if right is None:
        return "cannot_tell", None, False
    if right:
        return "conforms", None, False
    known = next((one for one in probe.explanations if one.fits(values)), None)
    return "differs", known.fault if known else None, known is None or known.blocks


def _reason(
    probe: Probe,
    measurement: Measurement,
    values: Values,
    verdict: Verdict,
    fault: str | None,
) -> str | None:
    if verdict == "conforms":
        return None
    if measurement.refused is not None:
        what = "it cannot be used" if measurement.unusable else "it cannot be measured"
        like = f"; looks like {fault}" if fault else ""
        return f"{what}: {measurement.refused}{like}"
    shown = ", ".join(f"{name} {_shown(value)}" for name, value in values.items())
    if verdict == "cannot_tell":
        return f"the service does not report it ({shown})" if measurement.silent else shown
    like = f"; looks like {fault}" if fault else ""
    return f"expected {probe.expected}, observed {shown}{like}"


def _shown(value: float | None) -> str:
    return "not given" if value is None else f"{value:.4g}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _check(row: ProbeResult) -> CheckResult:
    status: Mapping[Verdict, GateStatus] = {
        "conforms": "passed",
        "differs": "failed",
        "cannot_tell": "unverified",
    }
    return CheckResult(
        check=row.probe,
        status=status[row.verdict],
        reason=row.reason,
        tolerance=row.expected,
        measured=dict(row.observed),
    )
