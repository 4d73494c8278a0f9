"""From what a person asks for to a plan: files read, scaled, and fitted to what is served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence.errors import InputError
from evidence.execution import ExecutionFile, missing_settings
from evidence.profile import (
    Profile,
    ScaledPlan,
    apply_profile,
    substitute_served_model,
    unscaled,
)
from evidence.spec import Spec
from flows.catalog import find_profile, find_spec
from flows.inputs import read_bytes
from flows.plan import RunPlan, check_launchable, check_options, refuse_open_points
from losses.errors import LossConfigError
from losses.registry import make_loss
from tasks.clock import SystemClock
from tasks.patience import RetryPolicy
from tasks.progress import Progress, silent
from tasks.reachability import Reachability
from tasks.service_settings import ServiceSettings, quiet_sdk


def read_experiment(
    spec_name_or_path: str, *, execution: str | None = None
) -> tuple[Spec, ExecutionFile]:
    """Read a spec and its execution file.

    Args:
        spec_name_or_path: a shipped spec's name, or a file.
        execution: execution file; by default the one beside the spec.

    Raises:
        InputError: if a file is missing or cannot be used, or the spec has open points.
    """
    files = find_spec(spec_name_or_path)
    spec = Spec.parse(read_bytes(files.spec, field="SPEC"), where=str(files.spec))
    refuse_open_points(spec)
    path = Path(execution) if execution else files.execution
    if path is None:
        missing = ", ".join(missing_settings(spec, None)[:6])
        expected = f"an execution file beside the spec, with {missing}, ..."
        raise InputError("execution file", None, expected, where=str(files.spec))
    return spec, ExecutionFile.parse(read_bytes(path, field="--execution"), where=str(path))


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What a person asks for.

    Attributes:
        spec: a shipped spec's name, or a file.
        run_id: name of the run; the same name goes on with the same run.
        run_dir: folder or URL under which runs lie.
        execution: execution file; by default the one beside the spec.
        profile: a shipped profile's name, or a file.
        strict_model: refuse to replace a model that is not served.
        limit: at most so many rollout steps per arm.
        accept_unverified: gates whose missing evidence is accepted.
    """

    spec: str
    run_id: str
    run_dir: str = "runs"
    execution: str | None = None
    profile: str | None = None
    strict_model: bool = False
    limit: int | None = None
    accept_unverified: Sequence[str] = ()


def read_request(request: LaunchRequest) -> ScaledPlan:
    """Read and check everything that can be checked without the service.

    Raises:
        InputError: if anything cannot be used; the message names the field.
    """
    check_options(limit=request.limit, accept_unverified=request.accept_unverified)
    spec, settings = read_experiment(request.spec, execution=request.execution)
    scaled = scaled_experiment(spec, settings, request.profile)
    check_launchable(scaled.spec, scaled.execution)
    _check_losses(scaled.execution)
    return scaled


def _check_losses(execution: ExecutionFile) -> None:
    """Make every loss once: what the registry refuses is known before a service is asked."""
    for name, arm in execution.arms.items():
        if arm.loss is None:
            continue
        try:
            make_loss(arm.loss.config)
        except LossConfigError as error:
            raise InputError(f"arms.{name}.loss", arm.loss.kind, str(error)) from None


async def make_plan(
    request: LaunchRequest,
    service: ServiceSettings,
    *,
    progress: Progress = silent,
    policy: RetryPolicy | None = None,
) -> RunPlan:
    """Read, scale and check an experiment, and find out whether the service is there.

    Args:
        request: what is asked for.
        service: the service; it is asked which models it serves.
        progress: listener.
        policy: how long the service is asked again.

    Raises:
        InputError: if anything cannot be used; the message names the field.
        ServiceOutage: if the service is not there; known within half a minute.
    """
    scaled = read_request(request)
    quiet_sdk(service)
    server = await Reachability(service, SystemClock()).reach()
    if server.models:
        scaled = substitute_served_model(scaled, server.models, strict=request.strict_model)
    return RunPlan(
        scaled=scaled,
        service=service,
        run_id=request.run_id,
        run_dir=request.run_dir,
        limit=request.limit,
        accept_unverified=tuple(request.accept_unverified),
        progress=progress,
        policy=policy or RetryPolicy(),
    )


def scaled_experiment(spec: Spec, execution: ExecutionFile, profile: str | None) -> ScaledPlan:
    """Scale an experiment by a profile's name or file; unchanged without one."""
    if profile is None:
        return unscaled(spec, execution)
    path = find_profile(profile)
    found = Profile.parse(read_bytes(path, field="--profile"), where=str(path))
    return apply_profile(spec, execution, found)
