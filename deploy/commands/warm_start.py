"""``gated-rl warm-start``: make the adapter that both arms of a comparison start from."""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.adapter_export import write_record, write_tensors
from deploy.exit_codes import ExitCode
from deploy.local_service import launch
from deploy.local_service.settings import ServiceSettings as LocalServiceSettings
from deploy.progress import listener
from evidence.canonical import loads_strict
from evidence.errors import InputError
from evidence.execution import contradictions
from flows.launch import read_experiment
from flows.warm_start import WarmStartPlan, adapted_success, train_warm_start
from tasks.adapter_files import RECORD, AdapterFiles
from tasks.service import Service
from tasks.service_settings import ServiceSettings
from tasks.warm_start import EpochReport

_JOURNAL = "progress.jsonl"
_START_SECONDS = 900.0  # fetching and converting the base model for the first time is part of it


def warm_start(args: argparse.Namespace) -> int:
    """Train, measure and export; say where the adapter is and what it does.

    Raises:
        InputError: if the experiment has no warm start, or the folder holds an adapter already.
    """
    folder = Path(args.out)
    spec, execution = read_experiment(args.spec, execution=args.execution)
    for finding in contradictions(spec, execution):
        raise InputError(finding.field, finding.value, finding.expected, where="execution file")
    if args.episodes < 1:
        raise InputError("--episodes", args.episodes, "at least 1")
    if (folder / RECORD).exists():
        raise InputError("--out", str(folder), f"a folder without {RECORD}")
    settings = LocalServiceSettings(
        store=folder / ".service", threads=args.threads, exit_with_parent=True
    )
    print("Starting the embedded service on this machine", file=sys.stderr)
    with listener() as progress, launch.running(settings, seconds=_START_SECONDS) as local:

        async def work() -> dict[str, Any]:
            service = Service(ServiceSettings(url=local.url))
            plan = WarmStartPlan(spec, execution, service, args.episodes, progress)
            try:
                return await _make(plan, folder, settings.store, _command(args))
            finally:
                await service.release_all()

        record = asyncio.run(work())
    path = write_record(record, folder)
    print(_closing(record, path))
    return int(ExitCode.OK)


async def _make(
    plan: WarmStartPlan, folder: Path, store: Path, command: Mapping[str, Any]
) -> dict[str, Any]:
    """Train what is not trained yet, export, and measure exactly what was exported."""
    journal = _Journal(folder / _JOURNAL)
    trained = await train_warm_start(
        plan, before=journal.before(), done=journal.epochs(), keep=journal.keep
    )
    reachability = plan.service.reachability
    report = await reachability.checkpoint(trained.uri) or {}
    bound = write_tensors(store / "blobs" / report["blob"], folder)
    tensors = (folder / "adapter.safetensors").read_bytes()
    request = AdapterFiles(folder, bound, tensors).to_request()
    uri = str((await reachability.import_adapter(request))["path"])
    after = await adapted_success(plan, trained.environment, uri)
    measured = {"before": trained.before, "after": after}
    facts = {"warm_start": _steps(plan), "training": trained.facts, "measured": measured}
    return {
        **bound,
        "demonstrations_sha256": trained.facts["demonstrations_sha256"],
        **command,
        **facts,
    }


def _steps(plan: WarmStartPlan) -> dict[str, Any]:
    return plan.settings.model_dump(exclude={"adapter", "adapter_sha256"})


def _command(args: argparse.Namespace) -> dict[str, Any]:
    """The command that makes the adapter; bits repeat at one number of threads."""
    text = f"gated-rl warm-start {args.spec} --out FOLDER --threads {args.threads}"
    return {"command": f"{text} --episodes {args.episodes}", "threads": args.threads}


class _Journal:
    """What earlier calls have finished, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_bytes().splitlines() if path.is_file() else []
        self._entries = [loads_strict(line, where=str(path)) for line in lines]

    def before(self) -> dict[str, Any] | None:
        """The base model's measurement."""
        return next((entry["before"] for entry in self._entries if "before" in entry), None)

    def epochs(self) -> list[EpochReport]:
        """The finished epochs."""
        found = [entry["epoch"] for entry in self._entries if "epoch" in entry]
        return [EpochReport(one["epoch"], one["uri"], tuple(one["losses"])) for one in found]

    def keep(self, entry: Mapping[str, Any]) -> None:
        """Add a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _closing(record: Mapping[str, Any], path: Path) -> str:
    before, after = record["measured"]["before"], record["measured"]["after"]
    metrics = [name for name in after if isinstance(after[name], float) and name != "temperature"]
    shown = ", ".join(f"{name} {before[name]:.3f} -> {after[name]:.3f}" for name in metrics)
    return (
        f"Warm start: {shown} ({after['episodes']} training tasks at temperature "
        f"{after['temperature']:g}, before -> after)\n"
        f"Adapter {record['adapter_sha256']} on base {record['base_sha256'][:16]}, "
        f"{record['file_bytes']} bytes\n{path}"
    )
