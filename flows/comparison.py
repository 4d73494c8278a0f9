"""The Prefect flow: what the run form, a deployment and `prefect deployment run` start.

Parameters are plain JSON. The work is `flows.run.carry_out`; inside the flow each of its steps is
a task, so that the run can be watched, while the run directory alone decides what is done.
"""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.launch import LaunchRequest, make_plan
from flows.run import carry_out
from tasks.progress import current_listener
from tasks.service_settings import ServiceSettings, load_service_profile

RunId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Limit = Annotated[int, Field(ge=1)]


@flow(name="comparison", persist_result=False, validate_parameters=True)
async def comparison(  # noqa: PLR0913 - flat parameters are what a run form shows
    spec_name_or_path: str,
    service_url: str,
    run_id: RunId,
    run_dir: str = "runs",
    profile: str | None = None,
    limit: Limit | None = None,
    accept_unverified: list[str] | None = None,
    execution: str | None = None,
    strict_model: bool = False,
    service_profile: str | None = None,
) -> dict[str, Any]:
    """Carry out a pre-registered comparison through every gate to a verdict.

    Args:
        spec_name_or_path: a shipped spec's name, or a path to a spec with its execution file.
        service_url: address of a Tinker-compatible service.
        run_id: name of the run; the same name goes on with the same run.
        run_dir: folder or URL under which runs are kept.
        profile: a shipped profile's name or a path; scales the experiment to a smaller machine.
        limit: at most so many rollout steps per arm; such a run gives no verdict.
        accept_unverified: gates whose missing evidence is accepted; the verdict is then withheld.
        execution: path of the execution file; by default the one beside the spec.
        strict_model: refuse to replace a model that is not served.
        service_profile: path of a service profile, which names the environment variables of the
            key and of extra headers; its address counts instead of `service_url`.

    Returns:
        The outcome as plain data.
    """
    request = LaunchRequest(
        spec=spec_name_or_path,
        run_id=run_id,
        run_dir=run_dir,
        profile=profile,
        limit=limit,
        accept_unverified=accept_unverified or (),
        execution=execution,
        strict_model=strict_model,
    )
    service = (
        ServiceSettings(url=service_url)
        if service_profile is None
        else load_service_profile(service_profile)
    )
    plan = await make_plan(request, service, progress=current_listener())
    return (await carry_out(plan)).to_record()
