"""Everything that is fixed before a run starts: spec, execution file, service, where it is kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from evidence.errors import InputError
from evidence.execution import ExecutionFile, contradictions, missing_settings
from evidence.profile import ScaledPlan
from evidence.spec import Spec, unresolved
from flows.catalog import resolved_from
from flows.distillation import refuse_distillation
from flows.partners import refuse_partners
from tasks.patience import RetryPolicy
from tasks.progress import Progress, silent
from tasks.service_settings import ServiceSettings
from tasks.warm_start import check_warm_start

_ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ACCEPTABLE_GATES = ("correctness", "restoration", "activation", "feasibility")
"""Gates whose missing evidence may be evidence that a service cannot give."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run, as it is to be carried out.

    Attributes:
        scaled: the effective spec and execution file, and how they differ from the original.
        service: where models are trained and sampled.
        run_id: name of the run.
        run_dir: folder or URL under which runs lie.
        limit: at most so many rollout steps per arm; such a run gives no verdict.
        accept_unverified: gates whose missing evidence the person accepts at launch.
        progress: listener.
        policy: how long the service is asked again.
    """

    scaled: ScaledPlan
    service: ServiceSettings
    run_id: str
    run_dir: str
    limit: int | None = None
    accept_unverified: Sequence[str] = ()
    progress: Progress = silent
    policy: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        check_options(limit=self.limit, accept_unverified=self.accept_unverified)
        check_launchable(self.spec, self.execution)

    @property
    def spec(self) -> Spec:
        """The effective spec."""
        return self.scaled.spec

    @property
    def execution(self) -> ExecutionFile:
        """The effective execution file."""
        return self.scaled.execution


def check_options(*, limit: int | None, accept_unverified: Sequence[str]) -> None:
    """Refuse a limit of nothing, and gates whose missing evidence nobody may accept.

    Raises:
        InputError: naming the option.
    """
    if limit is not None and limit < 1:
        raise InputError("--limit", limit, "at least 1")
    for gate in accept_unverified:
        if gate not in ACCEPTABLE_GATES:
            expected = f"one of {', '.join(ACCEPTABLE_GATES)}"
            raise InputError("--accept-unverified", gate, expected)


def check_launchable(spec: Spec, execution: ExecutionFile) -> None:
    """Refuse what would have to be guessed or contradicts itself.

    Raises:
        InputError: on the first open point, missing setting or contradiction.
    """
    refuse_open_points(spec)
    if spec.decision_rule is None:
        raise InputError("decision_rule", None, "a rule that turns observations into a verdict")
    missing = missing_settings(spec, execution)
    if missing:
        expected = f"a value in the execution file ({len(missing)} settings are missing)"
        raise InputError(missing[0], None, expected)
    refuse_unsupported(spec, execution)
    for finding in contradictions(spec, execution):
        raise InputError(finding.field, finding.value, finding.expected, where="execution file")


def refuse_unsupported(spec: Spec, execution: ExecutionFile) -> None:
    """Refuse settings that this version reads but does not carry out.

    Raises:
        InputError: naming the first one.
    """
    refuse_arm_names(spec.arm_names)
    seeds = spec.rule.seeds
    if len(seeds) != 1:
        expected = "one seed: each arm is trained once (several are not supported yet)"
        raise InputError("decision_rule.seeds", ", ".join(map(str, seeds)), expected)
    for index, planned in enumerate(spec.arms):
        if planned.seed is not None and planned.seed not in seeds:
            raise InputError(f"arms[{index}].seed", planned.seed, f"the scheduled {seeds[0]}")
    for name, arm in execution.arms.items():
        divergence = None if arm.loss is None else arm.loss.config.get("divergence", "")
        if divergence and divergence.startswith("topk"):
            expected = "a binary form: masks over the top K are not carried out in a run"
            raise InputError(f"arms.{name}.loss.divergence", divergence, expected)
    refuse_partners(execution)
    refuse_distillation(execution)
    check_warm_start(execution)


def refuse_arm_names(names: Sequence[str]) -> None:
    """Refuse names of arms that cannot be names of files, or that say something else.

    Raises:
        InputError: naming the arm.
    """
    for index, name in enumerate(names):
        where = f"arms[{index}].name"
        if not _ARM_NAME.fullmatch(name):
            expected = "letters, digits, '.', '_' and '-', at most 64, the first a letter or digit"
            raise InputError(where, name, expected)
        if name.lower() == "base":
            raise InputError(where, name, "another name (the untrained model is called base)")
        if name.lower() in [earlier.lower() for earlier in names[:index]]:
            raise InputError(where, name, "a name that differs from others by more than case")


def refuse_open_points(spec: Spec) -> None:
    """Refuse a spec with placeholders, and name the shipped spec that resolves it.

    Raises:
        InputError: on the first placeholder.
    """
    open_points = unresolved(spec)
    if not open_points:
        return
    path, text = open_points[0]
    resolved = resolved_from(spec)
    hint = f"; launch {resolved!r}, which is derived from it" if resolved else ""
    raise InputError(path, text, f"a resolved value ({len(open_points)} open points){hint}")
