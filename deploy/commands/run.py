"""``gated-rl run``: carry a comparison through every gate to its verdict, or go on with one."""

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deploy.exit_codes import ExitCode
from deploy.local_service import launch
from deploy.local_service.settings import ServiceSettings as LocalServiceSettings
from deploy.progress import listener
from evidence.errors import InputError
from flows.catalog import find_spec, shipped_specs
from flows.launch import LaunchRequest, make_plan, read_request
from flows.outcome import ExitKind, Outcome
from flows.run import carry_out
from tasks.failures import PermanentServiceError, ServiceError
from tasks.progress import Progress, listening
from tasks.service_settings import ServiceSettings, load_service_profile

EXIT_CODES: Mapping[ExitKind, ExitCode] = {
    "supported": ExitCode.OK,
    "refuted": ExitCode.REFUTED,
    "inconclusive": ExitCode.INCONCLUSIVE,
    "stopped_by_gate": ExitCode.STOPPED_BY_GATE,
    "capacity": ExitCode.CAPACITY,
    "service_refused": ExitCode.BAD_INPUT,
}
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_START_SECONDS = 900.0  # fetching and converting the base model for the first time is part of it
_MAX_THREADS = 2


def run(args: argparse.Namespace) -> int:
    """Run, print verdict, reason and place, and return the exit status of the verdict."""
    request = LaunchRequest(
        spec=args.spec,
        run_id=_run_id(args),
        run_dir=args.run_dir,
        execution=args.execution,
        profile=args.profile,
        strict_model=args.strict_model,
        limit=args.limit,
        accept_unverified=tuple(args.accept_unverified),
    )
    read_request(request)  # nothing is started for a request that cannot be carried out
    try:
        with (
            listener() as progress,
            service_of(args, run_dir=request.run_dir, store_of=request.run_id) as service,
        ):
            work = (
                _carry_out(request, service, args.service_profile, progress)
                if args.prefect
                else _carry_out_plainly(request, service, progress)
            )
            outcome = asyncio.run(work)
    except PermanentServiceError as error:
        return refused(ExitCode.BAD_INPUT, error)
    except ServiceError as error:
        return refused(ExitCode.CAPACITY, error)
    print(_closing(outcome, as_json=args.json))
    return EXIT_CODES[outcome.exit_kind]


async def _carry_out(
    request: LaunchRequest, service: ServiceSettings, profile: str | None, progress: Progress
) -> Outcome:
    """Carry a request out as a Prefect flow run, so that every gate and step is a task there.

    Without ``PREFECT_API_URL`` Prefect starts a server of its own for as long as this takes.
    """
    quiet_prefect(os.environ)
    from flows.comparison import comparison  # noqa: PLC0415 - Prefect reads its settings on import

    shipped = shipped_specs()
    is_own = request.spec not in shipped
    with listening(progress):
        record = await comparison(
            spec=shipped[0] if is_own else request.spec,
            run_id=request.run_id,
            service=service.url,
            limit=request.limit,
            accept_unverified=list(request.accept_unverified),
            strict_model=request.strict_model,
            run_dir=request.run_dir,
            spec_file=request.spec if is_own else None,
            execution_file=request.execution,
            profile_file=request.profile,
            service_profile=profile,
        )
    return Outcome.from_record(record)


async def _carry_out_plainly(
    request: LaunchRequest, service: ServiceSettings, progress: Progress
) -> Outcome:
    return await carry_out(await make_plan(request, service, progress=progress))


def quiet_prefect(environment: "os._Environ[str]") -> None:
    """Let Prefect say only what matters, and wait for its server on a busy machine."""
    for name, value in {
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }.items():
        environment.setdefault(name, value)


@contextlib.contextmanager
def service_of(
    args: argparse.Namespace, *, run_dir: str, store_of: str
) -> Iterator[ServiceSettings]:
    """The service to use; the embedded one is started for the length of the run."""
    if args.service_profile is not None:
        yield load_service_profile(args.service_profile)
    elif args.service != "local":
        yield ServiceSettings(url=args.service)
    else:
        if "://" in run_dir:
            expected = "a local folder where --service is local (its checkpoints lie there)"
            raise InputError("--run-dir", run_dir, expected)
        settings = LocalServiceSettings(
            store=Path(run_dir) / ".service" / store_of,
            threads=max(1, min(_MAX_THREADS, os.cpu_count() or 1)),
            exit_with_parent=True,
        )
        print("Starting the embedded service on this machine", file=sys.stderr)
        with launch.running(settings, seconds=_START_SECONDS) as service:
            yield ServiceSettings(url=service.url)


def _run_id(args: argparse.Namespace) -> str:
    parts = [find_spec(args.spec).name] if args.run_id is None else []
    parts += [Path(args.profile).stem] if args.profile else []
    parts += [f"limit{args.limit}"] if args.limit else []
    return named_run(args.run_id, parts, otherwise="run")


def named_run(given: str | None, parts: Sequence[str], *, otherwise: str) -> str:
    """The given name, or one made of what is run, so that the same command means the same run.

    Raises:
        InputError: if the given name cannot be one of a folder.
    """
    if given is None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts)).lstrip("-._")
        return name[:128] or otherwise
    if not _RUN_ID.fullmatch(given):
        expected = "letters, digits, '.', '_' and '-', at most 128, the first a letter or digit"
        raise InputError("--run-id", given, expected)
    return given


def refused(code: ExitCode, error: Exception) -> int:
    """Say in one line why nothing was run, and return the exit status."""
    print(f"gated-rl: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _closing(outcome: Outcome, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(outcome.to_record(), indent=2, ensure_ascii=True, allow_nan=False)
    return "\n".join(outcome.closing_lines)
