"""``gated-rl diagnose``: find out within a hard cap why a mask is active or not."""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.commands.run import named_run, quiet_prefect, refused, service_of
from deploy.exit_codes import ExitCode
from deploy.progress import listener
from flows.catalog import find_spec
from flows.diagnose import carry_out_diagnostic
from flows.diagnostic_plan import (
    DiagnosticEnd,
    DiagnosticOutcome,
    DiagnosticPlan,
    DiagnosticRequest,
    check_offline,
    make_diagnostic_plan,
)
from tasks.diagnostic_budget import BudgetExhausted
from tasks.failures import PermanentServiceError, ServiceError
from tasks.progress import Progress
from tasks.service_settings import ServiceSettings

EXIT_CODES: Mapping[DiagnosticEnd, ExitCode] = {
    "completed": ExitCode.OK,
    "cap_reached": ExitCode.STOPPED_BY_GATE,
    "capacity": ExitCode.CAPACITY,
    "service_refused": ExitCode.BAD_INPUT,
}


def diagnose(args: argparse.Namespace) -> int:
    """Carry out a diagnostic and print what it found."""
    request = DiagnosticRequest(
        spec=args.spec,
        settings=args.settings,
        run_id=_run_id(args),
        run_dir=args.run_dir,
        execution=args.execution,
        profile=args.profile,
        earlier=args.from_run,
        started=time.monotonic(),
    )
    try:
        check_offline(request)
        store_of = Path(args.from_run).name if args.from_run else request.run_id
        with (
            listener() as progress,
            service_of(args, run_dir=request.run_dir, store_of=store_of) as service,
        ):
            outcome = asyncio.run(_carry_out(request, service, progress, prefect=args.prefect))
    except BudgetExhausted as error:
        return refused(ExitCode.STOPPED_BY_GATE, error)
    except PermanentServiceError as error:
        return refused(ExitCode.BAD_INPUT, error)
    except ServiceError as error:
        return refused(ExitCode.CAPACITY, error)
    if args.json:
        print(json.dumps(outcome.to_record(), indent=2, ensure_ascii=True, allow_nan=False))
    else:
        print("\n".join(outcome.closing_lines))
    return EXIT_CODES[outcome.exit_kind]


async def _carry_out(
    request: DiagnosticRequest, service: ServiceSettings, progress: Progress, *, prefect: bool
) -> DiagnosticOutcome:
    plan = await make_diagnostic_plan(request, service, progress=progress)
    return await (_as_flow(plan) if prefect else carry_out_diagnostic(plan))


async def _as_flow(plan: DiagnosticPlan) -> DiagnosticOutcome:
    """Carry a plan out as a Prefect flow run, so that each part is a task there."""
    quiet_prefect(os.environ)
    from prefect import flow  # noqa: PLC0415 - its settings are read from the environment first

    outcomes: list[DiagnosticOutcome] = []

    @flow(name="diagnostic", persist_result=False, validate_parameters=False)
    async def diagnostic(run_id: str, run_dir: str, service: str) -> dict[str, Any]:
        outcomes.append(await carry_out_diagnostic(plan))
        return outcomes[0].to_record()

    await diagnostic(run_id=plan.run_id, run_dir=plan.run_dir, service=plan.service.url)
    return outcomes[0]


def _run_id(args: argparse.Namespace) -> str:
    parts = [f"{find_spec(args.spec).name}-diagnostic"] if args.run_id is None else []
    return named_run(args.run_id, parts, otherwise="diagnostic")
