"""Initialization provenance: what each arm started from, as the service's answers show it.

Built from the recorded loads alone, so that it is the same whoever builds it, and grows by one
optimizer check with every restore.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.context import RunContext
from tasks.initialization import initialization_report
from tasks.openings import Openings
from tasks.restore_check import restore_checks

OPTIMIZER_KEYS = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")


def initialization_provenance(ctx: RunContext) -> dict[str, Any]:
    """The provenance of all trained arms so far, in the contract's form."""
    outputs = {event["arm"]: event for event in ctx.run.events("initial_output")}
    arms = []
    for arm in ctx.trained_arms:
        loads = Openings(ctx, arm.name, "train").recorded()
        if loads:
            arms.append(_entry(ctx, loads, outputs.get(arm.name)))
    return {"version": 1, "arms": arms}


def _entry(
    ctx: RunContext, loads: list[dict[str, Any]], output: Mapping[str, Any] | None
) -> dict[str, Any]:
    first = loads[0]
    checks = restore_checks(ctx, first["arm"])
    return {
        "arm": first["arm"],
        "initialization": _initialization(ctx, first),
        "restore_count": len(loads) - 1,
        "optimizer_checks": [_optimizer_check(ctx, load) for load in loads],
        "initial_output": _initial_output(output),
        **({"restore_checks": checks} if checks else {}),
    }


def _initialization(ctx: RunContext, load: Mapping[str, Any]) -> dict[str, Any]:
    observed = load["observed"] or {}
    report = initialization_report(ctx)
    proof = {
        "base_checkpoint": _base(ctx, load),
        "source": "server_response",
        "checkpoint_uri": load["requested_uri"],
        "loaded_checkpoint_uri": load["loaded_uri"],
        "load_succeeded": True,
        "checkpoint_scope": report.get("scope"),
        "checkpoint_immutable": report.get("immutable"),
        "evidence_ref": load["evidence"],
        "before_first_update": load["policy_version"] == 0 and load["restore"] == 0,
    }
    if observed.get("adapter_sha256"):
        proof["adapter_sha256"] = observed["adapter_sha256"]
    return proof


def _base(ctx: RunContext, load: Mapping[str, Any]) -> str:
    observed = load["observed"] or {}
    name = str(load["info"]["base_model"] or ctx.spec.base_model)
    digest = observed.get("base_sha256")
    return f"{name}@{digest}" if digest else name


def _optimizer_check(ctx: RunContext, load: Mapping[str, Any]) -> dict[str, Any]:
    optimizer = ctx.execution.optimizer.model_dump()
    reported = (load["observed"] or {}).get("optimizer") or {}
    config = {name: reported[name] for name in OPTIMIZER_KEYS if reported.get(name) is not None}
    actual = reported.get("type") or load["info"]["optimizer"]
    return {
        "after_restore": load["restore"],
        "before_next_update": True,
        "requested": optimizer["name"],
        "requested_config": {name: optimizer[name] for name in OPTIMIZER_KEYS},
        "actual": actual,
        "actual_config": config or None,
        "source": "server_response" if actual else "declared",
        "evidence_ref": load["evidence"],
    }


def _initial_output(output: Mapping[str, Any] | None) -> dict[str, Any]:
    if output is None:
        return {"available": False, "reason": "not captured before the first update"}
    return {
        "available": True,
        "batch_sha256": output["batch_sha256"],
        "output_sha256": output["output_sha256"],
        "scope": output["scope"],
        "evidence_ref": output["evidence"],
        "before_first_update": True,
    }
