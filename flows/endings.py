"""The ways a run can end. Each is written down before it is carried out.

The ledger's event ``ending`` holds everything that closes an attempt; carrying it out can be
repeated, so that a process that is killed while it closes leaves nothing half closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

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
    """How the run ended before, if it has ended for good; an ending that was cut off is completed.

    A capacity block ends an attempt, not the run. A gate whose evidence was missing ends the run
    until somebody accepts that by name.
    """
    complete_ending(run)
    ended = [event for event in run.events("ended") if event["final"]]
    if not ended:
        return None
    outcome = Outcome.from_record(ended[-1]["outcome"])
    accepted = outcome.gate_status == "unverified" and outcome.stopped_by in plan.accept_unverified
    return None if accepted else outcome


def finished(ctx: RunContext, result: StructuredResult) -> Outcome:
    """Every arm is trained and evaluated: judge, and close the run."""
    result.post_block("initialization_provenance", initialization_provenance(ctx))
    judged, final = decide(ctx, result)
    sentence = interval_sentence(judged)
    result.post_block("verdict_detail", final.to_record())
    result.post_usage(wall_seconds=seconds_since_start(ctx))
    kinds: dict[str, ExitKind] = {"supported": "supported", "refuted": "refuted"}
    outcome = Outcome(
        exit_kind=kinds.get(final.verdict, "inconclusive"),
        verdict=final.verdict,
        outcome_reason=final.outcome_reason,
        reason=" ".join([f"{sentence}.", *final.withheld]),
        run_path=ctx.run.path,
        computed_verdict=final.computed if final.computed != final.verdict else None,
        steps_completed=ctx.steps_completed,
    )
    return _end(ctx, outcome, status="succeeded", summary=f"{sentence}.")


def stopped(ctx: RunContext, gate: GateResult) -> Outcome:
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
    return _end(ctx, outcome, status="failed", summary=summary)


async def blocked(ctx: RunContext, error: ServiceError) -> Outcome:
    """The service refused or was out of reach for too long: close the attempt, not the run."""
    await ctx.service.release_all()
    capacity = isinstance(error, CapacityBlocked)
    outcome = _interrupted(ctx, error, "capacity")
    block = {
        "error": error.error,
        "comparison_steps_completed": ctx.steps_completed,
        "released_clients": all(release.confirmed for release in ctx.service.releases),
        "released": [asdict(release) for release in ctx.service.releases],
    }
    what = "has no capacity" if capacity else "is out of reach"
    return _end(
        ctx,
        outcome,
        status="failed",
        summary=f"The service {what}. The same command goes on where this attempt stopped.",
        capacity_block=block if capacity else None,
        final=False,
    )


def refused(ctx: RunContext, error: ServiceError) -> Outcome:
    """The service refused for a reason that does not go away by itself."""
    return _end(
        ctx,
        _interrupted(ctx, error, "service_refused"),
        status="failed",
        summary="The service refused a request; once that is put right, the same command goes on.",
        final=False,
    )


def _interrupted(ctx: RunContext, error: ServiceError, kind: ExitKind) -> Outcome:
    return Outcome(
        exit_kind=kind,
        verdict="inconclusive",
        outcome_reason="incomplete_execution",
        reason=str(error),
        run_path=ctx.run.path,
        retry_after_seconds=error.failure.retry_after if error.failure else None,
        steps_completed=ctx.steps_completed,
    )


def _end(
    ctx: RunContext,
    outcome: Outcome,
    *,
    status: str,
    summary: str,
    capacity_block: Mapping[str, Any] | None = None,
    final: bool = True,
) -> Outcome:
    """Write down how the attempt ends, and carry it out."""
    closing = {
        "status": status,
        "verdict": outcome.verdict,
        "outcome_reason": outcome.outcome_reason,
        "summary": summary,
        "capacity_block": capacity_block,
    }
    ctx.run.append(
        "ending", outcome=outcome.to_record(), closing=closing, final=final, attempt=ctx.run.attempt
    )
    complete_ending(ctx.run)
    ctx.tell("decision", outcome.reason)
    return outcome


def complete_ending(run: Run) -> None:
    """Carry out the last ending that was written down, as far as that has not been done."""
    endings = run.events("ending")
    if not endings:
        return
    ending = endings[-1]
    done = {event["event"] for event in run.events() if event["n"] > ending["n"]}
    if "ended" in done or "started" in done:
        return
    closed = "attempt_closed" in done
    write_journal(run, attempt=ending.get("attempt", run.attempt - 1 if closed else run.attempt))
    StructuredResult(run).finish(**ending["closing"])
    if ending["final"]:
        write_reports(run)
    run.append("ended", outcome=ending["outcome"], final=ending["final"])
