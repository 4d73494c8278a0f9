"""Conformance before training: whether this service does what this comparison relies on."""

from __future__ import annotations

import time

from evidence.conformance import ConformanceRecord, Scope, record_of
from evidence.conformance_probes import CLIPPING, DECAY, NEEDS, TEMPERATURE, TOP_P
from evidence.execution import ExecutionFile
from evidence.gate import SourceRef
from tasks.conformance import chosen, measure
from tasks.conformance_bench import Bench
from tasks.context import RunContext
from tasks.gate_answer import GateAnswer
from tasks.restoration import digest_of_file
from tasks.sdk import reads_optimizer
from tasks.versions import package_versions

SCOPE: Scope = "short"
EVENT = "conformance"


async def check_conformance(ctx: RunContext) -> GateAnswer:
    """Ask the service what this comparison relies on, with the planned model and rank.

    Writes: the record as an evidence file, and an event that names it. Calls the service with
    clients of its own, which are released. Safe to repeat.

    Raises:
        CapacityBlocked: refused for too long.
        ServiceOutage: out of reach for too long.
    """
    started, needs = time.monotonic(), needs_of(ctx.execution)
    measurements = await measure(
        Bench(ctx.service, base_model=ctx.lora.base_model, rank=ctx.lora.rank),
        chosen(SCOPE, needs),
        report=lambda probes: ctx.tell(EVENT, probes),
    )
    record = record_of(
        measurements,
        scope=SCOPE,
        service=ctx.service.settings.describe(),
        base_model=ctx.lora.base_model,
        versions=package_versions(),
        needs=needs,
        seconds=round(time.monotonic() - started, 3),
    )
    path = ctx.run.write_file(f"conformance-{record.digest[:12]}.json", record.to_bytes())
    sha256 = digest_of_file(ctx, path)
    ctx.run.append(EVENT, path=path, sha256=sha256, verdict=record.verdict, faults=record.faults)
    return GateAnswer(record.to_gate((SourceRef(path, sha256),)))


def needs_of(execution: ExecutionFile) -> frozenset[str]:
    """What a comparison with these settings relies on."""
    rollout, optimizer = execution.rollout, execution.optimizer
    used = {
        TEMPERATURE: rollout.temperature != 1.0,
        TOP_P: rollout.top_p != 1.0,
        CLIPPING: optimizer.grad_clip_norm > 0.0,
        DECAY: optimizer.weight_decay > 0.0,
    }
    return NEEDS | {name for name, is_used in used.items() if is_used}


def unreported(ctx: RunContext) -> frozenset[str]:
    """What this run saw its service not report.

    A loss that the service has not built in belongs to it, and an optimizer that this SDK does not
    read from any service.
    """
    record = kept_record(ctx)
    found = set() if record is None else set(record.unreported)
    if ctx.run.events("builtin_not_compared"):
        found.add("builtin_loss")
    if not reads_optimizer():
        found.add("optimizer")
    return frozenset(found)


def kept_record(ctx: RunContext) -> ConformanceRecord | None:
    """The record that this run made of its service, if it has made one."""
    events = ctx.run.events(EVENT)
    if not events:
        return None
    path = events[-1]["path"]
    return ConformanceRecord.parse(ctx.run.read_bytes(path), where=path)
