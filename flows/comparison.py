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
from tasks.service_settings import ServiceSettings

RunId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Limit = Annotated[int, Field(ge=1)]


@flow(name="comparison", persist_result=False, validate_parameters=True)
async def comparison(
    spec_name_or_path: str,
    service_url: str,
    run_id: RunId,
    run_dir: str = "runs",
    profile: str | None = None,
    limit: Limit | None = None,
    accept_unverified: list[str] | None = None,
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
    )
    plan = await make_plan(request, ServiceSettings(url=service_url))
    return (await carry_out(plan)).to_record()
