"""The ways a diagnostic can end. Each writes what was found; none launches anything."""

from __future__ import annotations

from typing import Any

from evidence.canonical import canonical_bytes, digest
from evidence.diagnostic_spec import next_comparison
from evidence.result import StructuredResult
from evidence.run import Run
from flows.diagnostic_plan import DiagnosticEnd, DiagnosticOutcome, DiagnosticPlan
from flows.reporting import write_reports
from tasks.context import RunContext
from tasks.diagnostic_learner import PHASE
from tasks.failures import CapacityBlocked, ServiceError
from tasks.investigation import Investigation, investigate
from tasks.journal_tables import write_journal
from tasks.wall_cap import CapReached, WallCap

NEXT_SPEC = "next-comparison-spec.json"
NEXT_EXECUTION = "next-comparison-spec.execution.json"


def previous_outcome(run: Run) -> DiagnosticOutcome | None:
    """How the diagnostic ended before, if it has ended for good."""
    ended = run.events("finished")
    return DiagnosticOutcome.from_record(ended[-1]["outcome"]) if ended else None


def completed(
    ctx: RunContext, plan: DiagnosticPlan, result: StructuredResult, cap: WallCap
) -> DiagnosticOutcome:
    """Every update was made: conclude, and freeze the comparison that may follow."""
    found = investigate(ctx.run, arm=plan.settings.arm, phase=PHASE)
    following = _freeze_next(ctx, plan) if found.conclusion.category == "active" else None
    outcome = _outcome(ctx, cap, found, "completed", found.conclusion.sentence, following)
    return _close(ctx, result, outcome, found, status="succeeded")


def cap_reached(
    ctx: RunContext,
    plan: DiagnosticPlan,
    result: StructuredResult,
    cap: WallCap,
    stop: CapReached,
) -> DiagnosticOutcome:
    """The cap was used up: what was measured is kept, and nothing is tried again."""
    ctx.run.append("cap_reached", before=stop.before, elapsed_seconds=cap.elapsed)
    found = investigate(ctx.run, arm=plan.settings.arm, phase=PHASE)
    reason = f"{stop} ({cap.elapsed:.1f} of {cap.seconds:.1f} s); {found.conclusion.sentence}"
    outcome = _outcome(ctx, cap, found, "cap_reached", reason)
    return _close(ctx, result, outcome, found, status="failed")


def blocked(
    ctx: RunContext,
    plan: DiagnosticPlan,
    result: StructuredResult,
    cap: WallCap,
    error: ServiceError,
) -> DiagnosticOutcome:
    """No capacity or no answer: the same command goes on, while something is left of the cap."""
    block = {
        "error": error.error,
        "comparison_steps_completed": 0,
        "released_clients": False,
    }
    capacity = isinstance(error, CapacityBlocked)
    return _interrupted(
        ctx, plan, result, cap, error, kind="capacity", block=block if capacity else None
    )


def refused(
    ctx: RunContext,
    plan: DiagnosticPlan,
    result: StructuredResult,
    cap: WallCap,
    error: ServiceError,
) -> DiagnosticOutcome:
    """The service refused for a reason that does not go away by itself."""
    return _interrupted(ctx, plan, result, cap, error, kind="service_refused", block=None)


def _interrupted(
    ctx: RunContext,
    plan: DiagnosticPlan,
    result: StructuredResult,
    cap: WallCap,
    error: ServiceError,
    *,
    kind: DiagnosticEnd,
    block: dict[str, Any] | None,
) -> DiagnosticOutcome:
    found = investigate(ctx.run, arm=plan.settings.arm, phase=PHASE)
    outcome = _outcome(ctx, cap, found, kind, str(error))
    ctx.run.append("blocked", outcome=outcome.to_record())
    write_journal(ctx.run)
    result.finish(
        status="failed",
        verdict="inconclusive",
        outcome_reason="incomplete_execution",
        summary="The service stopped the diagnostic. What was measured is kept.",
        capacity_block=block,
    )
    return outcome


def _outcome(
    ctx: RunContext,
    cap: WallCap,
    found: Investigation,
    kind: DiagnosticEnd,
    reason: str,
    following: str | None = None,
) -> DiagnosticOutcome:
    return DiagnosticOutcome(
        exit_kind=kind,
        reason=reason,
        run_path=ctx.run.path,
        conclusion=found.conclusion.to_record(),
        figures={**found.record, **found.sentinels},
        updates=len(found.by_update),
        wall_seconds=cap.elapsed,
        cap_seconds=cap.seconds,
        next_spec=following,
    )


def _freeze_next(ctx: RunContext, plan: DiagnosticPlan) -> str:
    """Write the comparison that may follow. It is a file; nobody starts it."""
    spec, execution = next_comparison(plan.original.spec, plan.original.execution, plan.settings)
    path = ctx.run.write_file(NEXT_SPEC, canonical_bytes(spec) + b"\n")
    ctx.run.write_file(NEXT_EXECUTION, canonical_bytes(execution) + b"\n")
    ctx.run.append("next_comparison", path=path, spec_sha256=digest(spec), launched=False)
    return path


def _close(
    ctx: RunContext,
    result: StructuredResult,
    outcome: DiagnosticOutcome,
    found: Investigation,
    *,
    status: str,
) -> DiagnosticOutcome:
    record = found.to_record()
    ctx.run.write_file("diagnostic-analysis.json", canonical_bytes(record) + b"\n")
    ctx.run.append("conclusion", **found.conclusion.to_record())
    write_journal(ctx.run)
    numbers = {
        name: value
        for name, value in {**outcome.figures, "wall_seconds": outcome.wall_seconds}.items()
        if isinstance(value, int | float)
    }
    result.post_metrics(numbers, arm=f"{found.arm or 'arm'}_diag")
    result.post_block(
        "diagnostic", {"conclusion": record["conclusion"], "record": record["record"]}
    )
    result.post_usage(wall_seconds=outcome.wall_seconds)
    result.finish(
        status=status,
        verdict="inconclusive",
        outcome_reason=_reason_of(outcome),
        summary=f"{found.conclusion.category.replace('_', ' ').capitalize()} "
        f"({found.conclusion.cause.replace('_', ' ')}). {outcome.reason}",
    )
    ctx.run.append("finished", outcome=outcome.to_record())
    write_reports(ctx.run)
    ctx.tell("decision", outcome.reason)
    return outcome


def _reason_of(outcome: DiagnosticOutcome) -> str:
    done = outcome.exit_kind == "completed"
    return "insufficient_evidence" if done else "incomplete_execution"
