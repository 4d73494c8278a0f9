"""The ways a run can end, each with its final record."""

from __future__ import annotations

from evidence.gate import GateResult
from evidence.result import StructuredResult
from evidence.run import Run
from flows.decide import decide, interval_sentence
from flows.outcome import ExitKind, Outcome
from flows.plan import RunPlan
from flows.reporting import write_reports
from tasks.clocks import seconds_since_start
from tasks.context import RunContext
from tasks.failures import CapacityBlocked, ServiceError
from tasks.journal_tables import write_journal
from tasks.provenance import initialization_provenance


def previous_outcome(run: Run, plan: RunPlan) -> Outcome | None:
    """How the run ended before, if it has ended for good.

    A capacity block ends an attempt, not the run. A gate whose evidence was missing ends the run
    until somebody accepts that by name.
    """
    ended = run.events("finished")
    if not ended:
        return None
    outcome = Outcome.from_record(ended[-1]["outcome"])
    accepted = outcome.gate_status == "unverified" and outcome.stopped_by in plan.accept_unverified
    return None if accepted else outcome


async def finished(ctx: RunContext, result: StructuredResult) -> Outcome:
    """Every arm is trained and evaluated: judge, and close the run."""
    result.post_block("initialization_provenance", initialization_provenance(ctx))
    judged, final = decide(ctx, result)
    sentence = interval_sentence(judged)
    withheld = " ".join(final.withheld)
    result.post_block("verdict_detail", final.to_record())
    result.post_usage(wall_seconds=seconds_since_start(ctx))
    outcome = Outcome(
        exit_kind=_kind(final.verdict),
        verdict=final.verdict,
        outcome_reason=final.outcome_reason,
        reason=f"{sentence}. {withheld}".strip(),
        run_path=ctx.run.path,
        computed_verdict=final.computed if final.computed != final.verdict else None,
        steps_completed=ctx.steps_completed,
    )
    return await _close(ctx, result, outcome, status="succeeded", summary=f"{sentence}.")


async def stopped(ctx: RunContext, result: StructuredResult, gate: GateResult) -> Outcome:
    """A gate refused: that is a result, and it ends the run."""
    reasons = "; ".join(gate.reasons) or "no reason was given"
    outcome = Outcome(
        exit_kind="stopped_by_gate",
        verdict="inconclusive",
        outcome_reason="incomplete_execution",
        reason=f"The gate {gate.gate} is {gate.status}: {reasons}",
        run_path=ctx.run.path,
        stopped_by=gate.gate,
        gate_status=gate.status,
        steps_completed=ctx.steps_completed,
    )
    summary = f"Stopped before training by the gate {gate.gate} ({gate.status})."
    return await _close(ctx, result, outcome, status="failed", summary=summary)


async def blocked(ctx: RunContext, result: StructuredResult, error: ServiceError) -> Outcome:
    """The service refused or was out of reach for too long: close the attempt, not the run."""
    released = await ctx.service.release_all()
    capacity = isinstance(error, CapacityBlocked)
    outcome = Outcome(
        exit_kind="capacity",
        verdict="inconclusive",
        outcome_reason="incomplete_execution",
        reason=str(error),
        run_path=ctx.run.path,
        retry_after_seconds=error.failure.retry_after if error.failure else None,
        steps_completed=ctx.steps_completed,
    )
    what = "has no capacity" if capacity else "is out of reach"
    block = {
        "error": error.error,
        "comparison_steps_completed": ctx.steps_completed,
        "released_clients": released,
    }
    ctx.run.append("blocked", outcome=outcome.to_record())
    write_journal(ctx)
    result.finish(
        status="failed",
        verdict=outcome.verdict,
        outcome_reason=outcome.outcome_reason,
        summary=f"The service {what}. The same command goes on where this attempt stopped.",
        capacity_block=block if capacity else None,
    )
    return outcome


async def refused(ctx: RunContext, result: StructuredResult, error: ServiceError) -> Outcome:
    """The service refused for a reason that does not go away by itself."""
    outcome = Outcome(
        exit_kind="service_refused",
        verdict="inconclusive",
        outcome_reason="incomplete_execution",
        reason=str(error),
        run_path=ctx.run.path,
        steps_completed=ctx.steps_completed,
    )
    ctx.run.append("blocked", outcome=outcome.to_record())
    write_journal(ctx)
    result.finish(
        status="failed",
        verdict=outcome.verdict,
        outcome_reason=outcome.outcome_reason,
        summary="The service refused a request; once that is put right, the same command goes on.",
    )
    return outcome


async def _close(
    ctx: RunContext, result: StructuredResult, outcome: Outcome, *, status: str, summary: str
) -> Outcome:
    """Post the final result, keep the outcome, and write what people read."""
    write_journal(ctx)
    result.finish(
        status=status,
        verdict=outcome.verdict,
        outcome_reason=outcome.outcome_reason,
        summary=summary,
    )
    ctx.run.append("finished", outcome=outcome.to_record())
    await write_reports(ctx)
    ctx.tell("decision", outcome.reason)
    return outcome


def _kind(verdict: str) -> ExitKind:
    kinds: dict[str, ExitKind] = {"supported": "supported", "refuted": "refuted"}
    return kinds.get(verdict, "inconclusive")
