"""Feasibility: what the comparison will take, projected from what was measured in this run.

Seconds come from the run's own timings at the concurrency of the comparison, never from another
machine or model. Optional evaluations are dropped first when they do not fit, and that is said.
"""

from __future__ import annotations

from typing import Any

from evidence import feasibility
from evidence.canonical import canonical_bytes, digest
from evidence.gate import SourceRef
from tasks.clocks import seconds_since_start
from tasks.context import RunContext
from tasks.effective_config import effective_config
from tasks.evaluation import BASE
from tasks.gate_answer import GateAnswer
from tasks.pilot import JOINT_STEP
from tasks.restoration import digest_of_file


async def check_feasibility(ctx: RunContext) -> GateAnswer:
    """Project the comparison and hold it against the budget.

    Writes: the projection, and the event `optional_evaluations` that says whether they are done.
    """
    wanted = ctx.execution.evaluation.every is not None
    record = projection(ctx, optional=wanted)
    result = feasibility.validate(ctx.spec.raw, record)
    if wanted and result.status == "infeasible":
        record = projection(ctx, optional=False)
        result = feasibility.validate(ctx.spec.raw, record)
        ctx.run.append(
            "optional_evaluations", kept=False, reason="they do not fit the budget beside the rest"
        )
    elif wanted:
        ctx.run.append("optional_evaluations", kept=True, reason="they fit the budget")
    ctx.run.append("feasibility", record=record)
    path = ctx.run.write_file(
        f"feasibility-{digest(record)[:12]}.json", canonical_bytes(record) + b"\n"
    )
    gate = result.to_gate((SourceRef(path, digest_of_file(ctx, path)),))
    return GateAnswer(gate, {"feasibility": record})


def optional_evaluations_kept(ctx: RunContext) -> bool:
    """Whether evaluations between the steps are done."""
    decided = ctx.run.events("optional_evaluations")
    return bool(decided) and bool(decided[-1]["kept"])


def projection(ctx: RunContext, *, optional: bool) -> dict[str, Any]:
    """The feasibility report in the contract's form, from this run's measurements."""
    config = effective_config(ctx)
    spent = seconds_since_start(ctx)
    return {
        "config": config,
        "effective_config": config,
        "primary_endpoint": ctx.spec.primary_endpoint_text,
        "source": "ledger.jsonl, events timing",
        "measurements": {
            "setup": _measured(ctx, seconds=spent, units=1, planned=1, samples=0),
            "training": _training(ctx),
            "evaluation": _evaluation(ctx, optional=optional),
            **_generation_timings(ctx),
        },
        "generation": _generation(ctx),
        "recovery": {
            "seconds": ctx.execution.feasibility.recovery_seconds,
            "gpu_count": ctx.execution.feasibility.gpu_count,
            "allocation_source": ctx.execution.feasibility.allocation_source,
        },
    }


def _generation(ctx: RunContext) -> dict[str, int] | None:
    """The yield of generated tasks: all that are trained on were accepted; none is filtered."""
    found = ctx.run.events("generation")
    if not found:
        return None
    return {
        "attempted": found[-1]["attempted"],
        "accepted": found[-1]["accepted"],
        "target_accepted": found[-1]["accepted"],
        "filter_samples_per_candidate": 0,
    }


def _generation_timings(ctx: RunContext) -> dict[str, Any]:
    """What generating and auditing tasks took; the run does either once, as it was timed."""
    found = ctx.run.events("generation")
    if not found:
        return {}
    units = {"generation": found[-1]["attempted"], "audit": found[-1]["audited"]}
    return {
        name: _measured(
            ctx,
            seconds=found[-1]["seconds"][name],
            units=count,
            planned=count,
            samples=0,
        )
        for name, count in units.items()
    }


def _training(ctx: RunContext) -> dict[str, Any]:
    """Arm-steps, timed with all arms side by side."""
    arms = len(ctx.trained_arms)
    timed = ctx.timings(what=JOINT_STEP, phase=ctx.pilot_phase)
    seconds = timed[0]["seconds"] if timed else 0.0
    samples = timed[0]["samples"] if timed else 0
    units = timed[0]["units"] if timed else 0
    return _measured(
        ctx, seconds=seconds, units=units, planned=arms * ctx.rollout_steps, samples=samples
    )


def _evaluation(ctx: RunContext, *, optional: bool) -> dict[str, Any]:
    """Held-out items, timed on the base model."""
    items = len(ctx.eval_ids)
    rounds = len(ctx.arms)
    every = ctx.execution.evaluation.every
    if optional and every is not None:
        rounds += len(ctx.trained_arms) * ((ctx.rollout_steps - 1) // every)
    timed = ctx.timings(arm=BASE, what=BASE)
    return _measured(
        ctx,
        seconds=sum(event["seconds"] for event in timed),
        units=sum(event["units"] for event in timed),
        planned=items * rounds,
        samples=sum(event["samples"] for event in timed),
    )


def _measured(
    ctx: RunContext, *, seconds: float, units: int, planned: int, samples: int
) -> dict[str, Any]:
    settings = ctx.execution.feasibility
    return {
        "seconds": seconds,
        "units": units,
        "planned_units": planned,
        "samples": samples,
        "gpu_count": settings.gpu_count,
        "allocation_source": settings.allocation_source,
    }
