"""What every gate returns: a status, the reasons for it, and what it looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from evidence.errors import InputError

GateStatus = Literal["passed", "failed", "unverified", "not_applicable"]
GATE_STATUSES: tuple[GateStatus, ...] = get_args(GateStatus)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of a gate: a single measurement against its bound.

    Attributes:
        check: name of the check, e.g. ``baseline_loss`` or a metric.
        status: what the check found.
        path: the thing checked (a spec path id, an arm), if the gate has several.
        reason: why, when the status is not ``passed``.
        tolerance: the bound as registered in the spec.
        measured: what was measured, as reported.
    """

    check: str
    status: GateStatus
    path: str | None = None
    reason: str | None = None
    tolerance: Any = None
    measured: Any = None

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return {
            "path": self.path,
            "check": self.check,
            "status": self.status,
            "reason": self.reason,
            "tolerance": self.tolerance,
            "measured": self.measured,
        }


@dataclass(frozen=True, slots=True)
class SourceRef:
    """A file that a gate read, and the SHA-256 of the bytes it read."""

    path: str
    sha256: str

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return {"path": self.path, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class GateResult:
    """The answer of a gate. It decides nothing: the flow that asked for it acts on it.

    It has no truth value on purpose (``if result`` would pass a failed gate); ask `may_proceed`.

    Attributes:
        gate: name of the gate, e.g. ``correctness``.
        status: ``passed``, ``failed``, ``unverified`` (evidence is missing) or
            ``not_applicable``.
        reasons: one sentence each; empty only when the gate passed.
        checks: the single measurements.
        reads: the files the answer rests on.
        validation: the contract's own answer for this gate, where it has one.
    """

    gate: str
    status: GateStatus
    reasons: tuple[str, ...] = ()
    checks: tuple[CheckResult, ...] = ()
    reads: tuple[SourceRef, ...] = ()
    validation: Mapping[str, Any] | None = field(default=None)

    def __post_init__(self) -> None:
        if self.status not in GATE_STATUSES:
            raise InputError("status", self.status, f"one of {', '.join(GATE_STATUSES)}")

    def __bool__(self) -> bool:
        raise TypeError("a GateResult has no truth value: read .status or .may_proceed")

    @property
    def may_proceed(self) -> bool:
        """Whether the run may go on: the gate passed or does not apply."""
        return self.status in ("passed", "not_applicable")

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field, keys in a fixed order."""
        return {
            "gate": self.gate,
            "status": self.status,
            "reasons": list(self.reasons),
            "checks": [check.to_record() for check in self.checks],
            "reads": [source.to_record() for source in self.reads],
            "validation": None if self.validation is None else dict(self.validation),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> GateResult:
        """Read back what `to_record` wrote.

        Raises:
            InputError: if a field is missing or has another form.
        """
        try:
            return cls(
                gate=record["gate"],
                status=record["status"],
                reasons=tuple(record["reasons"]),
                checks=tuple(CheckResult(**check) for check in record["checks"]),
                reads=tuple(SourceRef(**source) for source in record["reads"]),
                validation=record["validation"],
            )
        except (KeyError, TypeError) as error:
            raise InputError("gate record", record, "what GateResult.to_record wrote") from error
