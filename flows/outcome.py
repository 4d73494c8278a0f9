"""How a run ended, for whoever started it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from evidence.gate import GateStatus

ExitKind = Literal[
    "supported", "refuted", "inconclusive", "stopped_by_gate", "capacity", "service_refused"
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt of a run ended.

    Attributes:
        exit_kind: what kind of ending it is; the command line turns it into its exit code.
        verdict: the verdict on the spec's hypothesis.
        outcome_reason: the contract's reason of that verdict.
        reason: one sentence for a person.
        run_path: the run directory.
        computed_verdict: what the decision rule gives, where the verdict is withheld or concerns
            another hypothesis; else None.
        stopped_by: the gate that refused, if one did.
        gate_status: its status.
        retry_after_seconds: after a capacity block, when the service wants to be asked again.
        steps_completed: optimizer steps of the comparison that are done.
    """

    exit_kind: ExitKind
    verdict: str
    outcome_reason: str
    reason: str
    run_path: str
    computed_verdict: str | None = None
    stopped_by: str | None = None
    gate_status: GateStatus | None = None
    retry_after_seconds: float | None = None
    steps_completed: int = 0

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Outcome:
        """Read back what `to_record` wrote."""
        return cls(**record)

    @property
    def closing_lines(self) -> tuple[str, str, str]:
        """Verdict, why, and where to look: three plain lines."""
        verdict = self.verdict
        if self.stopped_by is not None:
            verdict = f"{verdict} (stopped by the gate {self.stopped_by}: {self.gate_status})"
        elif self.exit_kind == "capacity":
            verdict = f"{verdict} so far (the service could not be used for now; the same command goes on)"
        return (f"Verdict: {verdict}", f"Why: {self.reason}", f"Look at: {self.run_path}")
