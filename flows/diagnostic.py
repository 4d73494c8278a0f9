"""The Prefect flow of a bounded diagnostic, for the run form, a deployment or the command line.

Parameters are plain JSON. The work is `flows.diagnose.carry_out_diagnostic`.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger

from flows.attempt import flow_run_of_deployment, only_process
from flows.diagnose import carry_out_diagnostic
from flows.diagnostic_plan import DiagnosticRequest, make_diagnostic_plan
from flows.form import (
    AS_WRITTEN,
    LOCAL,
    ProfileName,
    RunId,
    ServiceAddress,
    SpecName,
    service_from,
    text_of,
)
from flows.noticeboard import Noticeboard
from tasks.progress import Progress, silent
from tasks.service_settings import ServiceSettings


@flow(name="diagnostic", persist_result=False, validate_parameters=True, retries=0)
async def diagnostic(  # noqa: PLR0913 - flat parameters are what a run form shows
    spec: SpecName,
    run_id: RunId,
    service: ServiceAddress = LOCAL,
    profile: ProfileName = AS_WRITTEN,
    run_dir: str = "runs",
    settings: str | None = None,
    from_run: str | None = None,
    spec_file: str | None = None,
    profile_file: str | None = None,
) -> dict[str, Any]:
    """Find out within a hard cap why a mask is active or not. Nothing is launched by the answer.

    Args:
        spec: The experiment, by the name of a spec that ships with the program.
        run_id: Name of the diagnostic. The same name goes on with the same one.
        service: 'local' for the embedded service that was started with this page, or the http(s)
            address of a Tinker-compatible service.
        profile: Scales the experiment to a smaller machine first.
        run_dir: Folder or URL under which runs are kept.
        settings: Path of the settings file; by default the one beside the spec.
        from_run: Folder of the run that gave rise to it.
        spec_file: Path of a spec of your own, with its execution file beside it; counts instead of
            `spec`.
        profile_file: Path of a profile of your own; counts instead of `profile`.

    Returns:
        The outcome as plain data.
    """
    chosen = text_of(profile)
    request = DiagnosticRequest(
        spec=spec_file or text_of(spec),
        run_id=run_id,
        settings=settings,
        run_dir=run_dir,
        profile=profile_file or (None if chosen == AS_WRITTEN else chosen),
        earlier=from_run,
    )
    chosen_service = service_from(service, None)
    flow_run = await flow_run_of_deployment()
    if flow_run is None:
        return await _carried_out(request, chosen_service, silent)
    path = f"{run_dir.rstrip('/')}/{run_id}"
    board = Noticeboard(path, run_id=run_id, logger=get_run_logger())
    with only_process(run_dir, flow_run):
        async with board.kept():
            return await _carried_out(request, chosen_service, board.listener(silent))


async def _carried_out(
    request: DiagnosticRequest, service: ServiceSettings, progress: Progress
) -> dict[str, Any]:
    plan = await make_diagnostic_plan(request, service, progress=progress)
    return (await carry_out_diagnostic(plan)).to_record()
