"""The gates that need no service: is the spec fit to run, and was generated data audited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evidence import generation_audit, spec_preflight
from evidence.canonical import canonical_lines
from tasks.context import RunContext
from tasks.gate_answer import GateAnswer


async def check_spec(ctx: RunContext) -> GateAnswer:
    """List what in the spec would make a run of it pointless."""
    return GateAnswer(spec_preflight.validate(ctx.spec.raw).to_gate())


async def check_generated_data(ctx: RunContext) -> GateAnswer:
    """Judge the audit of generated training data; not applicable where none is generated.

    An environment that generates tasks offers the audit's report and files; one that does not
    offers nothing, and where an audit is required its absence is what is found. Writes: the event
    `generation` with yield and seconds, which feasibility rests on, and the files that the report
    names, so that whoever gets them can audit again.
    """
    offered = getattr(ctx.environment, "generation_report", None)
    report: dict[str, Any] | None = offered() if callable(offered) else None
    report = report or {}
    if report.get("seconds"):
        counts = report["report"]["counts"]
        ctx.run.append(
            "generation",
            attempted=counts["generated"],
            accepted=counts["accepted"],
            audited=len(report["report"]["samples"]),
            seconds=report["seconds"],
        )
    result = generation_audit.validate_for_spec(
        ctx.spec.raw,
        report.get("report"),
        tasks=report.get("tasks"),
        evaluation=report.get("evaluation"),
    )
    if not report.get("report"):
        return GateAnswer(result.to_gate(), {})
    _keep_files(ctx, report)
    return GateAnswer(result.to_gate(), {"generation_audit": report["report"]})


def _keep_files(ctx: RunContext, offered: Mapping[str, Any]) -> None:
    """Keep the generated tasks, the held-out ones and the audit under the names in the report."""
    report = offered["report"]
    for name, rows in (
        (report["dataset_file"], offered["tasks"]),
        (report["evaluation_file"], offered["evaluation"]),
    ):
        ctx.run.write_file(name, canonical_lines(rows))
    ctx.run.write_file(report["audit_file"], canonical_lines([report]))
