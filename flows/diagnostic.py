"""The Prefect flow of a bounded diagnostic, for the run form, a deployment or the command line.

Parameters are plain JSON. The work is `flows.diagnose.carry_out_diagnostic`.
"""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.diagnose import carry_out_diagnostic
from flows.diagnostic_plan import DiagnosticRequest, make_diagnostic_plan
from tasks.service_settings import ServiceSettings

RunId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


@flow(name="diagnostic", persist_result=False, validate_parameters=True)
async def diagnostic(
    spec_name_or_path: str,
    service_url: str,
    run_id: RunId,
    settings: str | None = None,
    run_dir: str = "runs",
    profile: str | None = None,
    from_run: str | None = None,
) -> dict[str, Any]:
    """Find out within a hard cap why a mask is active or not. Nothing is launched by the answer.

    Args:
        spec_name_or_path: a shipped spec's name, or a path to a spec with its execution file.
        service_url: address of a Tinker-compatible service.
        run_id: name of the diagnostic; the same name goes on with the same one.
        settings: settings file; by default the one beside the spec.
        run_dir: folder or URL under which runs are kept.
        profile: a shipped profile's name or a path; scales the experiment to a smaller machine.
        from_run: folder of the run that gave rise to it.

    Returns:
        The outcome as plain data.
    """
    request = DiagnosticRequest(
        spec=spec_name_or_path,
        run_id=run_id,
        settings=settings,
        run_dir=run_dir,
        profile=profile,
        earlier=from_run,
    )
    plan = await make_diagnostic_plan(request, ServiceSettings(url=service_url))
    return (await carry_out_diagnostic(plan)).to_record()
