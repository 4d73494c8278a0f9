"""Everything that is fixed before a run starts: spec, execution file, service, where it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evidence.errors import InputError
from evidence.execution import ExecutionFile, contradictions, missing_settings
from evidence.spec import Spec, unresolved
from flows.catalog import find_spec, resolved_from
from tasks.patience import RetryPolicy
from tasks.progress import Progress, silent
from tasks.service_settings import ServiceSettings

ACCEPTABLE_GATES = ("correctness", "restoration", "activation", "feasibility")
"""Gates whose missing evidence may be evidence that a service cannot give."""


@dataclass(frozen=True, slots=True)
class Deviations:
    """What is run differently from the spec, recorded before any training.

    Attributes:
        entries: ``{field, original, effective, reason}`` each.
        original_hypothesis_tested: whether the spec's hypothesis is still tested.
        tested_instead: the claim that is tested otherwise.
    """

    entries: Sequence[Mapping[str, Any]] = ()
    original_hypothesis_tested: bool = True
    tested_instead: str | None = None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run, as it is to be carried out.

    Attributes:
        spec: the effective spec (a profile has been applied already).
        execution: its effective execution file.
        service: where models are trained and sampled.
        run_id: name of the run.
        run_dir: folder or URL under which runs lie.
        deviations: what differs from the original spec.
        original_spec: the spec as it was registered, where a profile changed it.
        limit: at most so many rollout steps and held-out items; such a run gives no verdict.
        accept_unverified: gates whose missing evidence the person accepts at launch.
        progress: listener.
        policy: how long the service is asked again.
    """

    spec: Spec
    execution: ExecutionFile
    service: ServiceSettings
    run_id: str
    run_dir: str
    deviations: Deviations = field(default_factory=Deviations)
    original_spec: Spec | None = None
    limit: int | None = None
    accept_unverified: Sequence[str] = ()
    progress: Progress = silent
    policy: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise InputError("--limit", self.limit, "at least 1")
        for gate in self.accept_unverified:
            if gate not in ACCEPTABLE_GATES:
                expected = f"one of {', '.join(ACCEPTABLE_GATES)}"
                raise InputError("--accept-unverified", gate, expected)
        check_launchable(self.spec, self.execution)


def read_spec_files(name_or_path: str) -> tuple[Spec, ExecutionFile]:
    """Read a spec and its execution file, by shipped name or path.

    Raises:
        InputError: if a file is missing or cannot be used; the message names the field.
    """
    files = find_spec(name_or_path)
    spec = Spec.parse(_bytes(files.spec), where=str(files.spec))
    if files.execution is None:
        resolved = resolved_from(spec)
        if resolved is not None:
            expected = f"a spec without open points; launch {resolved!r}, which is derived from it"
            raise InputError("SPEC", name_or_path, expected)
        missing = ", ".join(missing_settings(spec, None)[:8])
        expected = f"an execution file beside the spec, with {missing}, ..."
        raise InputError("execution file", None, expected, where=str(files.spec))
    return spec, ExecutionFile.parse(_bytes(files.execution), where=str(files.execution))


def check_launchable(spec: Spec, execution: ExecutionFile) -> None:
    """Refuse what would have to be guessed or contradicts itself.

    Raises:
        InputError: on the first open point, missing setting or contradiction.
    """
    open_points = unresolved(spec)
    if open_points:
        path, text = open_points[0]
        resolved = resolved_from(spec)
        hint = f"; launch {resolved!r}, which is derived from it" if resolved else ""
        expected = f"a resolved value ({len(open_points)} open points){hint}"
        raise InputError(path, text, expected)
    if spec.decision_rule is None:
        raise InputError("decision_rule", None, "a rule that turns observations into a verdict")
    missing = missing_settings(spec, execution)
    if missing:
        expected = f"a value in the execution file ({len(missing)} settings are missing)"
        raise InputError(missing[0], None, expected)
    for finding in contradictions(spec, execution):
        raise InputError(finding.field, finding.value, finding.expected, where="execution file")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError("file", str(path), f"a readable file ({error.strerror})") from None
