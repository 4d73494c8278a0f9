"""The Prefect flow: what the run form, a deployment and `prefect deployment run` start.

Parameters are plain JSON. The work is `flows.run.carry_out`; inside the flow each of its steps is
a task, so that the run can be watched, while the run directory alone decides what is done.

A flow run of a deployment that meets a service without capacity is set to start again later, in
place (`flows.requeue`), as long as the spec's wall-time budget lasts. A flow run that was started
as a plain call returns instead: whoever called it decides when to call again.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger

from flows.attempt import Attempt, flow_run_of_deployment
from flows.form import (
    AS_WRITTEN,
    LOCAL,
    GateName,
    ProfileName,
    RunId,
    ServiceAddress,
    SpecName,
    StepLimit,
    service_from,
    text_of,
)
from flows.launch import LaunchRequest
from tasks.progress import current_listener


@flow(name="comparison", persist_result=False, validate_parameters=True, retries=0)
async def comparison(  # noqa: PLR0913 - flat parameters are what a run form shows
    spec: SpecName,
    run_id: RunId,
    service: ServiceAddress = LOCAL,
    profile: ProfileName = AS_WRITTEN,
    limit: StepLimit | None = None,
    accept_unverified: list[GateName] | None = None,
    strict_model: bool = False,
    run_dir: str = "runs",
    spec_file: str | None = None,
    execution_file: str | None = None,
    profile_file: str | None = None,
    service_profile: str | None = None,
) -> Any:
    """Carry a pre-registered comparison through every gate to a verdict.

    Args:
        spec: The experiment, by the name of a spec that ships with the program.
        run_id: Name of the run. The same name goes on with the same run, wherever it was stopped.
        service: 'local' for the embedded service that was started with this page, or the http(s)
            address of a Tinker-compatible service.
        profile: Scales the experiment to a smaller machine; every change is recorded as a
            deviation.
        limit: At most so many rollout steps per arm; such a run gives no verdict.
        accept_unverified: Gates whose missing evidence is accepted; the verdict is then withheld.
        strict_model: Refuse to replace a model that is not served.
        run_dir: Folder or URL under which runs are kept.
        spec_file: Path of a spec of your own, with its execution file beside it; counts instead of
            `spec`.
        execution_file: Path of the execution file; by default the one beside the spec.
        profile_file: Path of a profile of your own; counts instead of `profile`.
        service_profile: Path of a service profile, which names the environment variables of the
            key and of extra headers; its address counts instead of `service`.

    Returns:
        The outcome as plain data; for a flow run of a deployment, the final state that holds it.
    """
    chosen = text_of(profile)
    request = LaunchRequest(
        spec=spec_file or text_of(spec),
        run_id=run_id,
        run_dir=run_dir,
        profile=profile_file or (None if chosen == AS_WRITTEN else chosen),
        limit=limit,
        accept_unverified=[text_of(gate) for gate in accept_unverified or ()],
        execution=execution_file,
        strict_model=strict_model,
    )
    attempt = Attempt(
        request,
        service_from(service, service_profile),
        logger=get_run_logger(),
        progress=current_listener(),
    )
    flow_run = await flow_run_of_deployment()
    if flow_run is None:
        return (await attempt.carried_out()).to_record()
    return await attempt.carried_out_as(flow_run)
