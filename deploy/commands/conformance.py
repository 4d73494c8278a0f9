"""``gated-rl conformance``: measure what a Tinker-compatible service really does."""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deploy.commands.run import refused, service_of
from deploy.exit_codes import ExitCode
from deploy.progress import listener
from evidence.conformance import ConformanceRecord, ProbeResult, Verdict
from evidence.errors import InputError
from flows.conformance import ConformanceRequest, examine
from tasks.failures import PermanentServiceError, ServiceError
from tasks.progress import Progress
from tasks.service_settings import ServiceSettings

_WORDS: dict[Verdict, str] = {
    "conforms": "conforms",
    "differs": "DIFFERS",
    "cannot_tell": "cannot tell",
}


def conformance(args: argparse.Namespace) -> int:
    """Measure, print the table or the record, and say by the exit status what came out."""
    out = None if args.out is None else Path(args.out)
    if out is not None and not out.resolve().parent.is_dir():
        raise InputError("--out", args.out, "a file in a folder that exists")
    if args.rank < 1:
        raise InputError("--rank", args.rank, "at least 1")
    if args.capacity_clients < 0:
        raise InputError("--capacity-clients", args.capacity_clients, "at least 0")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="gated-rl-conformance-") as folder,
            listener() as progress,
            service_of(args, run_dir=folder, store_of="conformance") as service,
        ):
            record = asyncio.run(_examine(args, service, progress))
    except PermanentServiceError as error:
        return refused(ExitCode.BAD_INPUT, error)
    except ServiceError as error:
        return refused(ExitCode.CAPACITY, error)
    if out is not None:
        out.write_bytes(record.to_bytes())
    if args.json:
        print(json.dumps(record.to_record(), indent=2, ensure_ascii=True, allow_nan=False))
    else:
        print("\n".join(_lines(record)))
    return exit_code_of(record)


async def _examine(
    args: argparse.Namespace, service: ServiceSettings, progress: Progress
) -> ConformanceRecord:
    request = ConformanceRequest(
        service=service,
        base_model=args.base_model,
        rank=args.rank,
        capacity_clients=args.capacity_clients,
    )
    return await examine(request, progress=progress)


def exit_code_of(record: ConformanceRecord) -> ExitCode:
    """20 where a probe that comparisons need differs, 11 where one cannot tell, else 0."""
    if record.blocking:
        return ExitCode.STOPPED_BY_GATE
    needs = set(record.needs)
    unknown = any(
        row.verdict == "cannot_tell" and needs.intersection(row.needed_by) for row in record.probes
    )
    return ExitCode.INCONCLUSIVE if unknown else ExitCode.OK


def _lines(record: ConformanceRecord) -> Iterator[str]:
    yield f"Service  {record.service['url']}, model {record.base_model}"
    for row in record.probes:
        yield f"  {row.probe:<28} {_WORDS[row.verdict]:<12} {_detail(row)}".rstrip()
    counts = {verdict: sum(row.verdict == verdict for row in record.probes) for verdict in _WORDS}
    yield ", ".join(f"{counts[verdict]} {word.lower()}" for verdict, word in _WORDS.items())
    if record.unreported:
        yield f"Not reported by the service: {', '.join(record.unreported)}"
    if record.faults:
        yield f"Looks like: {', '.join(record.faults)}"
    if record.blocking:
        yield f"A comparison would be refused for: {', '.join(record.blocking)}"


def _detail(row: ProbeResult) -> str:
    if row.verdict == "conforms":
        return ", ".join(
            f"{name} {value:.3g}" for name, value in row.observed.items() if value is not None
        )
    return row.reason or ""
