"""Everything that is fixed before a diagnostic starts, and how one can end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from evidence.diagnostic_file import DiagnosticFile
from evidence.diagnostic_spec import revised_plan
from evidence.errors import InputError
from evidence.profile import ScaledPlan, substitute_served_model
from evidence.run import Run
from flows.catalog import find_diagnostic, find_spec
from flows.inputs import read_bytes
from flows.launch import read_experiment, scaled_experiment
from flows.plan import refuse_unsupported
from tasks.clock import SystemClock
from tasks.diagnostic_budget import RemainingBudget, check_earlier, remaining_budget
from tasks.patience import RetryPolicy
from tasks.progress import Progress, silent
from tasks.reachability import Reachability
from tasks.service_settings import ServiceSettings, quiet_sdk

DiagnosticEnd = Literal["completed", "cap_reached", "capacity", "service_refused"]


@dataclass(frozen=True, slots=True)
class DiagnosticRequest:
    """What a person asks for.

    Attributes:
        spec: a shipped spec's name, or a file.
        settings: settings file of the diagnostic; by default the one beside the spec.
        run_id: name of the diagnostic; the same name goes on with the same one.
        run_dir: folder or URL under which runs lie.
        execution: execution file; by default the one beside the spec.
        profile: a shipped profile's name, or a file.
        earlier: folder of the run that gave rise to it: its checkpoint, its budget, its gates.
        started: when the command was given, on the monotonic clock; set-up counts from there.
    """

    spec: str
    run_id: str
    settings: str | None = None
    run_dir: str = "runs"
    execution: str | None = None
    profile: str | None = None
    earlier: str | None = None
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class DiagnosticPlan:
    """One diagnostic, as it is to be carried out.

    Attributes:
        original: the experiment as planned (scaled, where a profile was named).
        revised: what the diagnostic runs, and how it differs.
        settings: its settings file.
        budget: what it may use.
        service: where the model is trained and sampled.
        run_id: name of the diagnostic.
        run_dir: folder or URL under which runs lie.
        earlier: the run that gave rise to it, if any.
        started: when the command was given, on the monotonic clock.
        progress: listener.
        policy: how long the service is asked again.
    """

    original: ScaledPlan
    revised: ScaledPlan
    settings: DiagnosticFile
    budget: RemainingBudget
    service: ServiceSettings
    run_id: str
    run_dir: str
    earlier: Run | None = None
    started: float = field(default_factory=time.monotonic)
    progress: Progress = silent
    policy: RetryPolicy = field(default_factory=RetryPolicy)


@dataclass(frozen=True, slots=True)
class DiagnosticOutcome:
    """How a diagnostic ended. The verdict on the hypothesis is always ``inconclusive``.

    Attributes:
        exit_kind: whether it was carried out, and if not, what stopped it.
        reason: one sentence for a person.
        run_path: the run directory.
        conclusion: the investigation's conclusion, with its figures.
        figures: pooled figures under the record's names.
        updates: optimizer updates made.
        wall_seconds: wall time from the command to the end.
        cap_seconds: the cap it was held to.
        next_spec: path of the comparison spec that may follow, where the mask was active.
    """

    exit_kind: DiagnosticEnd
    reason: str
    run_path: str
    conclusion: Mapping[str, Any]
    figures: Mapping[str, Any]
    updates: int
    wall_seconds: float
    cap_seconds: float
    next_spec: str | None = None
    verdict: str = "inconclusive"

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DiagnosticOutcome:
        """Read back what `to_record` wrote."""
        return cls(**record)

    @property
    def closing_lines(self) -> tuple[str, ...]:
        """What was found, why, what to do, and where to look: plain lines."""
        found = self.conclusion
        used = f"{self.updates} updates in {self.wall_seconds:.0f} s of {self.cap_seconds:.0f} s"
        lines = (
            f"Finding: {found['category']} ({found['cause']}); {used}",
            f"Why: {self.reason}",
            f"Next: {found['next_action']}",
            "Verdict: inconclusive (the hypothesis was not tested)",
            f"Look at: {self.run_path}",
        )
        return (*lines, f"Frozen spec: {self.next_spec}") if self.next_spec else lines


@dataclass(frozen=True, slots=True)
class OfflinePlan:
    """What is known of a diagnostic before a service is asked for anything."""

    original: ScaledPlan
    settings: DiagnosticFile
    budget: RemainingBudget
    earlier: Run | None


def check_offline(request: DiagnosticRequest) -> OfflinePlan:
    """Read and check everything, and count what is left of the budget; no service is needed.

    Raises:
        InputError: if anything cannot be used; the message names the field.
        BudgetExhausted: if nothing is left of the experiment's budget.
    """
    spec, execution = read_experiment(request.spec, execution=request.execution)
    path = find_diagnostic(find_spec(request.spec), request.settings)
    settings = DiagnosticFile.parse(read_bytes(path, field="--settings"), where=str(path))
    refuse_unsupported(spec, execution)
    original = scaled_experiment(spec, execution, request.profile)
    revised_plan(original.spec, original.execution, settings)
    earlier = _earlier(request)
    budget = remaining_budget(original.spec, original.execution, settings, earlier=earlier)
    return OfflinePlan(original, settings, budget, earlier)


async def make_diagnostic_plan(
    request: DiagnosticRequest,
    service: ServiceSettings,
    *,
    progress: Progress = silent,
    policy: RetryPolicy | None = None,
) -> DiagnosticPlan:
    """Read, check and count what is left, and only then ask the service which models it serves.

    Raises:
        InputError: if anything cannot be used; the message names the field.
        BudgetExhausted: if nothing is left of the experiment's budget.
        ServiceOutage: if the service is not there.
    """
    offline = check_offline(request)
    original, earlier = offline.original, offline.earlier
    quiet_sdk(service)
    server = await Reachability(service, SystemClock()).reach()
    if server.models:
        original = substitute_served_model(original, server.models)
    if earlier is not None:
        check_earlier(earlier, original.spec)
    return DiagnosticPlan(
        original=original,
        revised=revised_plan(original.spec, original.execution, offline.settings),
        settings=offline.settings,
        budget=offline.budget,
        service=service,
        run_id=request.run_id,
        run_dir=request.run_dir,
        earlier=earlier,
        started=request.started,
        progress=progress,
        policy=policy or RetryPolicy(),
    )


def _earlier(request: DiagnosticRequest) -> Run | None:
    if request.earlier is None:
        return None
    if not (Path(request.earlier) / "identity.json").is_file() and "://" not in request.earlier:
        raise InputError("--from-run", request.earlier, "a run's folder")
    return Run.open(request.earlier)
