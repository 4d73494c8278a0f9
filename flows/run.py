"""A comparison from plan to outcome, as plain Python.

    outcome = run_comparison(plan)

The Prefect flow (`flows.comparison`) calls the same coroutine; every step then is a task.
"""

from __future__ import annotations

import asyncio
from typing import Any

from evidence.result import StructuredResult
from evidence.run import Run
from flows.arm import run_arm
from flows.endings import blocked, finished, previous_outcome, refused, stopped
from flows.gates import GateStopped, pass_gates
from flows.outcome import Outcome
from flows.plan import RunPlan
from flows.together import side_by_side
from tasks.clocks import wall_left_seconds
from tasks.context import LaunchChoices, RunContext
from tasks.failures import Failure, PermanentServiceError, ServiceError
from tasks.learner import Learner
from tasks.reachability import ServerInfo
from tasks.service import Service
from tasks.versions import package_versions


def run_comparison(plan: RunPlan) -> Outcome:
    """Carry out a comparison, or go on with it where it was.

    Raises:
        InputError: if the plan cannot be run, or the run directory is of another run.
        ServiceOutage: if the service is not there when the run is started.
    """
    return asyncio.run(carry_out(plan))


async def carry_out(plan: RunPlan) -> Outcome:
    """Carry out a comparison; see `run_comparison`."""
    run = open_run(plan)
    with run.lock():
        ended = previous_outcome(run, plan)
        if ended is not None:
            return ended
        service = Service(plan.service, policy=plan.policy)
        ctx = RunContext(
            run=run,
            spec=plan.spec,
            execution=plan.execution,
            service=service,
            server=await service.reach(),
            progress=plan.progress,
            choices=LaunchChoices(
                limit=plan.limit,
                accept_unverified=tuple(plan.accept_unverified),
                original_gate=plan.scaled.original_activation_gate,
            ),
        )
        follow(ctx)
        return await _conduct(ctx, plan)


def follow(ctx: RunContext) -> None:
    """Let the service know the run's steps, and the run the service's waits."""

    def waiting(what: str, failure: Failure, seconds: float) -> None:
        kind = failure.kind.value
        ctx.run.append("waiting", what=what, kind=kind, error=failure.text, seconds=seconds)
        ctx.tell("waiting", f"{what}: {kind}, next try in {seconds:.0f} s ({failure.text})")

    def slow(what: str, seconds: float) -> None:
        ctx.tell("waiting", f"{what}: no answer for {seconds:.0f} s yet")

    ctx.service.follow(
        steps_completed=lambda: ctx.steps_completed,
        on_wait=waiting,
        seconds_left=lambda: wall_left_seconds(ctx),
        on_slow=slow,
    )


def open_run(plan: RunPlan) -> Run:
    """Create the run directory, or open the one of the same run.

    Raises:
        ConflictError: if it is of another spec, execution file or limit.
    """
    return Run.create(
        plan.run_dir,
        run_id=plan.run_id,
        spec=plan.spec.raw,
        execution=plan.execution.raw,
        identity={"limit": plan.limit, "original_spec_sha256": plan.scaled.original_spec_sha256},
    )


async def _conduct(ctx: RunContext, plan: RunPlan) -> Outcome:
    result = StructuredResult(ctx.run)
    _start(ctx, plan, result)
    learners: dict[str, Learner] = {}
    try:
        learners = await pass_gates(ctx, result)
        await side_by_side([run_arm(ctx, learner, result) for learner in learners.values()])
        return finished(ctx, result)
    except GateStopped as stop:
        return stopped(ctx, stop.result)
    except PermanentServiceError as error:
        return refused(ctx, error)
    except ServiceError as error:  # what was lost or is in doubt is settled by the next attempt
        return await blocked(ctx, error)
    finally:
        await ctx.service.release_all()


def _start(ctx: RunContext, plan: RunPlan, result: StructuredResult) -> None:
    """Say that the run is running, and record every deviation before anything is trained."""
    result.start(f"{plan.spec.title}: running.")
    result.deviate(
        plan.scaled.deviations,
        original_hypothesis_tested=plan.scaled.original_hypothesis_tested,
        tested_instead=plan.scaled.tested_instead,
    )
    ctx.run.append(
        "started",
        attempt=ctx.run.attempt,
        service=plan.service.describe(),
        server=_described(ctx.server),
        versions=package_versions(),
        accept_unverified=list(ctx.accept_unverified),
    )


def _described(server: ServerInfo) -> dict[str, Any]:
    return {"models": list(server.models), "local": dict(server.local)}
