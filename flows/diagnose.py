"""A bounded diagnostic from plan to conclusion, as plain Python.

    outcome = run_diagnostic(plan)

The Prefect flow (`flows.diagnostic`) calls the same coroutine. The order is fixed: settings,
revised spec and deviations are written; the initial state is restored and seen; one batch is
sampled, scored and frozen; the updates follow, each held against the frozen batch; then the figures
are judged by fixed rules. Nothing is launched by its result.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

from evidence.canonical import canonical_bytes, sha256_hex
from evidence.errors import InputError
from evidence.result import StructuredResult
from evidence.run import Run
from flows import steps
from flows.diagnostic_end import blocked, cap_reached, completed, previous_outcome, refused
from flows.diagnostic_plan import DiagnosticOutcome, DiagnosticPlan
from flows.run import follow
from tasks.context import LaunchChoices, RunContext
from tasks.diagnostic_initial import initial_checkpoint
from tasks.diagnostic_learner import PHASE, FrozenLearner
from tasks.failures import CapacityBlocked, PermanentServiceError, ServiceOutage
from tasks.frozen_batch import assert_frozen
from tasks.learner import Learner
from tasks.reachability import ServerInfo
from tasks.service import Service
from tasks.service_identity import bind_identity
from tasks.wall_cap import CapReached, WallCap


def run_diagnostic(plan: DiagnosticPlan) -> DiagnosticOutcome:
    """Carry out a diagnostic, or go on with it where it was.

    Raises:
        InputError: if the initial state, the frozen batch or the plan cannot be used; everything
            finished is kept.
    """
    return asyncio.run(carry_out_diagnostic(plan))


async def carry_out_diagnostic(plan: DiagnosticPlan) -> DiagnosticOutcome:
    """Carry out a diagnostic; see `run_diagnostic`."""
    run = _open(plan)
    with run.lock():
        ended = previous_outcome(run)
        if ended is not None:
            return ended
        ctx = RunContext(
            run=run,
            spec=plan.revised.spec,
            execution=plan.revised.execution,
            service=Service(plan.service, policy=plan.policy),
            server=ServerInfo(models=()),
            progress=plan.progress,
            choices=LaunchChoices(original_gate=plan.revised.original_activation_gate),
        )
        follow(ctx)
        return await _conduct(ctx, plan)


def _open(plan: DiagnosticPlan) -> Run:
    return Run.create(
        plan.run_dir,
        run_id=plan.run_id,
        spec=plan.revised.spec.raw,
        execution=plan.revised.execution.raw,
        identity={
            "kind": PHASE,
            "original_spec_sha256": plan.original.original_spec_sha256,
            "settings_sha256": plan.settings.digest,
        },
    )


async def _conduct(ctx: RunContext, plan: DiagnosticPlan) -> DiagnosticOutcome:
    result = StructuredResult(ctx.run)
    cap = _begin(ctx, plan, result)
    try:
        async with cap.holding("the diagnostic"):
            await _measure(ctx, plan, cap)
        return completed(ctx, plan, result, cap)
    except CapReached as stop:
        return cap_reached(ctx, plan, result, cap, stop)
    except (CapacityBlocked, ServiceOutage) as error:
        return blocked(ctx, plan, result, cap, error)
    except PermanentServiceError as error:
        return refused(ctx, plan, result, cap, error)
    except InputError as error:
        ctx.run.append("stopped", field=error.field, error=str(error))
        raise
    finally:
        await ctx.service.release_all()


def _begin(ctx: RunContext, plan: DiagnosticPlan, result: StructuredResult) -> WallCap:
    """Write down everything that is fixed, before anything is measured or asked."""
    setup = time.monotonic() - plan.started
    _keep_settings(ctx, plan)
    result.start(f"Bounded diagnostic of arm {plan.settings.arm}: running.")
    result.deviate(
        (*plan.original.deviations, *plan.revised.deviations),
        original_hypothesis_tested=False,
        tested_instead=plan.revised.tested_instead,
    )
    ctx.run.append(
        "started",
        attempt=ctx.run.attempt,
        setup_seconds=setup,
        service=plan.service.describe(),
        budget=plan.budget.to_record(),
    )
    first = ctx.run.events("started")[0]
    began = datetime.fromisoformat(first["at"])

    def elapsed() -> float:
        return float(first["setup_seconds"]) + (datetime.now(UTC) - began).total_seconds()

    return WallCap(60.0 * plan.budget.cap_minutes, elapsed)


def _keep_settings(ctx: RunContext, plan: DiagnosticPlan) -> None:
    """Settings, both specs, deviations and what the earlier run said: each file once."""
    documents: dict[str, Any] = {
        "diagnostic-settings.json": plan.settings.raw,
        "original-spec.json": plan.original.spec.raw,
        "original-execution.json": plan.original.execution.raw,
        "revised-diagnostic-spec.json": plan.revised.spec.raw,
        "deviations.json": plan.revised.to_record(),
    }
    if plan.earlier is not None:
        documents["earlier-evidence.json"] = earlier_evidence(plan.earlier)
    for name, document in documents.items():
        ctx.run.write_file(name, canonical_bytes(document) + b"\n")


def earlier_evidence(earlier: Run) -> dict[str, Any]:
    """Digests of the earlier run's spec, gates and result, as they were found."""
    paths = [
        path
        for path in earlier.files()
        if path.startswith("gates/") or path in ("spec.json", "execution.json", "result.json")
    ]
    return {
        "run_id": earlier.run_id,
        "spec_sha256": earlier.spec_sha256,
        "files": {path: sha256_hex(earlier.read_bytes(path)) for path in sorted(paths)},
    }


async def _measure(ctx: RunContext, plan: DiagnosticPlan, cap: WallCap) -> None:
    settings = plan.settings
    cap.check("the service was asked for anything")
    ctx.server = await ctx.service.reach()
    await bind_identity(ctx)
    uri = await initial_checkpoint(
        ctx,
        settings.initial_state.checkpoint or earlier_checkpoint(plan.earlier),
        accept_unreported=settings.initial_state.accept_unreported_immutability,
    )
    cap.check("the initial state was loaded")
    arm = ctx.arm(settings.arm)
    learner = FrozenLearner(ctx, arm, init_uri=uri, max_updates=settings.max_updates)
    try:
        await steps.DIAGNOSTIC_INITIAL(ctx, learner, uri)
        cap.check("the batch was sampled")
        await steps.DIAGNOSTIC_BATCH(ctx, learner)
        cap.check("the batch was frozen")
        await _sentinels(ctx, plan, learner, 0)
        await steps.DIAGNOSTIC_FREEZE(ctx, learner)
        await _updates(ctx, plan, cap, learner)
    finally:
        await learner.drop()


def earlier_checkpoint(earlier: Run | None) -> str | None:
    """The initialization checkpoint of the earlier run, if there is one."""
    known = [] if earlier is None else earlier.events("initialization")
    return str(known[0]["uri"]) if known else None


async def _updates(ctx: RunContext, plan: DiagnosticPlan, cap: WallCap, learner: Learner) -> None:
    total = plan.settings.max_updates
    for update in range(total):
        cap.check(f"update {update}")
        assert_frozen(ctx.run)
        await steps.UPDATE(ctx, learner, update)
        done = update + 1
        ctx.tell(PHASE, arm=learner.arm.name, done=done, total=total)
        if done in plan.settings.sentinels.after_updates:
            cap.check(f"the sentinels after update {done}")
            await _sentinels(ctx, plan, learner, done)
    if total == ctx.execution.rollout.updates_per_step:
        cap.check("the final checkpoint")
        await steps.CHECKPOINT(ctx, learner, 0)


async def _sentinels(ctx: RunContext, plan: DiagnosticPlan, learner: Learner, done: int) -> None:
    await steps.DIAGNOSTIC_SENTINELS(
        ctx, learner, count=plan.settings.sentinels.sequences, updates_done=done
    )
