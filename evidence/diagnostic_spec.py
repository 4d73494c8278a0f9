"""The specs around a diagnostic: the revised one that it runs, and the comparison that may follow.

Neither replaces the original: both name its digest, carry its activation gate as it was planned,
and say that its hypothesis is not tested. Nothing here launches anything.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from evidence.diagnostic_file import EPOCHS, MINIBATCHES, DiagnosticFile
from evidence.diagnostic_rules import FIXED_RULES
from evidence.errors import InputError
from evidence.execution import ExecutionFile
from evidence.profile import ScaledPlan
from evidence.spec import Spec

NEXT_METRICS: tuple[Mapping[str, Any], ...] = (
    {
        "metric": "epoch2_dppo_masked_token_fraction",
        "measures": "share of loss tokens whose non-zero gradient the mask removes, all updates "
        "of the second pass as one pool",
        "min": FIXED_RULES["masked_fraction"]["min"],
        "max": FIXED_RULES["masked_fraction"]["max"],
    },
    {
        "metric": "epoch2_ppo_counterfactual_clip_fraction",
        "measures": "share of the same tokens that the baseline's ratio clip would remove",
        "min": FIXED_RULES["ppo_counterfactual_fraction"]["min"],
    },
    {
        "metric": "epoch2_policy_drift_abs_p_q90",
        "measures": "0.9 quantile of |p_current - p_sampler| over the same tokens",
        "min": FIXED_RULES["drift_abs_q90"]["min"],
    },
)


def revised_plan(spec: Spec, execution: ExecutionFile, settings: DiagnosticFile) -> ScaledPlan:
    """Return what a diagnostic runs, with every change as a deviation.

    Raises:
        InputError: if the arm does not mask by divergence, or its advantages come from a teacher.
    """
    _check_arm(execution, settings.arm)
    planned, raw, changed = execution.rollout, spec.raw, execution.raw
    deviations = [
        _deviation(
            "steps",
            f"{spec.steps} optimizer steps per arm over {execution.rollout_steps} rollout batches",
            f"at most {settings.max_updates} updates of arm {settings.arm} over one frozen batch, "
            f"in at most {settings.wall_minutes:g} wall minutes",
            settings,
        ),
        _deviation(
            "effective_batch",
            f"{planned.groups} groups of {planned.group_size} in {planned.minibatches} "
            f"minibatches, {planned.epochs} pass(es)",
            f"{settings.groups} groups of {settings.group_size} in {MINIBATCHES} minibatches of "
            f"complete groups, {EPOCHS} passes",
            settings,
        ),
        _deviation(
            "objective",
            "activation judged by the spec's own gate",
            "second-pass loss calls pooled by loss-token counts, judged by four fixed rules",
            settings,
        ),
        _deviation(
            "evaluator", "held-out evaluation of every arm", "none: train tasks only", settings
        ),
        _deviation("endpoint", spec.primary_endpoint_text, "none: no verdict is reached", settings),
    ]
    instead = (
        f"Whether the mask of arm {settings.arm} is active, and if not why, on one frozen batch of "
        f"{settings.groups} groups of {settings.group_size} train tasks on {spec.base_model}."
    )
    _reschedule(raw, changed, settings, rollout_steps=1)
    raw["title"] = f"Bounded diagnostic of arm {settings.arm}: {spec.title}"
    raw["success_criterion"] = (
        "None on the hypothesis, which is not tested. The mask counts as active if four fixed "
        "rules hold on the second pass over the batch."
    )
    raw["diagnostic"] = {
        "arm": settings.arm,
        "settings_sha256": settings.digest,
        "max_updates": settings.max_updates,
        "wall_minutes": settings.wall_minutes,
        "rules": copy.deepcopy(dict(FIXED_RULES)),
        "aggregation": "all second-pass loss calls as one pool, every loss token counted once",
    }
    return _derived(spec, raw, changed, deviations, instead)


def next_comparison(
    spec: Spec, execution: ExecutionFile, settings: DiagnosticFile
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the comparison that an active diagnostic suggests: a frozen spec and execution file.

    The schedule is the diagnostic's, the activation gate measures the second pass in its ranges;
    arms, losses, endpoint, decision rule and budget are the original's.
    """
    planned, raw, changed = execution.rollout, spec.raw, execution.raw
    updates = MINIBATCHES * EPOCHS
    steps = execution.rollout_steps * updates
    deviations = [
        _deviation(
            "effective_batch",
            f"{planned.groups} groups of {planned.group_size} in {planned.minibatches} "
            f"minibatches, {planned.epochs} pass(es)",
            f"{settings.groups} groups of {settings.group_size} in {MINIBATCHES} minibatches, "
            f"{EPOCHS} passes",
            settings,
        ),
        _deviation("steps", f"{spec.steps} optimizer steps", f"{steps} optimizer steps", settings),
    ]
    instead = (
        f"Whether {' and '.join(spec.arm_names)} differ as the original claims, with {updates} "
        "updates per rollout batch, a schedule under which the mask was observed to be active."
    )
    _reschedule(raw, changed, settings, rollout_steps=execution.rollout_steps)
    raw["title"] = f"{spec.title} (revised schedule)"
    gate = raw.get("activation_gate") or {}
    raw["activation_gate"] = {
        **gate,
        "applicable": True,
        "reason": "The schedule was revised after a bounded diagnostic; its fixed rules apply to "
        "the second pass of every pilot batch.",
        "checks": [*map(dict, NEXT_METRICS), *_kept_checks(gate, updates)],
    }
    plan = _derived(spec, raw, changed, deviations, instead)
    return plan.spec.raw, plan.execution.raw


def _check_arm(execution: ExecutionFile, name: str) -> None:
    arm = execution.arms.get(name)
    if arm is None:
        raise InputError("arm", name, f"one of the arms {', '.join(execution.arms)}")
    kind = None if arm.loss is None else arm.loss.kind
    if kind != "dppo":
        raise InputError("arm", f"{name} ({kind})", "an arm whose loss masks by divergence (dppo)")
    advantage = execution.advantage_of(name).kind
    if advantage != "group_mean":
        expected = "group_mean: a diagnostic samples one batch and asks no teacher"
        raise InputError(f"advantage of arm {name}", advantage, expected)


def _kept_checks(gate: Mapping[str, Any], updates: int) -> list[dict[str, Any]]:
    """The checks of configuration, with the new number of updates per batch."""
    kept = []
    for check in gate.get("checks") or []:
        if check.get("metric") == "executed_updates_per_batch":
            kept.append({**check, "min": updates, "max": updates})
        elif check.get("metric") == "executed_base_model":
            kept.append(dict(check))
    return kept


def _deviation(field: str, original: str, effective: str, why: DiagnosticFile) -> dict[str, str]:
    return {"field": field, "original": original, "effective": effective, "reason": why.reason}


def _reschedule(
    raw: dict[str, Any], execution: dict[str, Any], settings: DiagnosticFile, *, rollout_steps: int
) -> None:
    execution["rollout"] |= {
        "groups": settings.groups,
        "group_size": settings.group_size,
        "minibatches": MINIBATCHES,
        "epochs": EPOCHS,
    }
    execution["rollout_steps"] = rollout_steps
    raw["batch_size"] = settings.groups * settings.group_size
    raw["steps"] = rollout_steps * MINIBATCHES * EPOCHS
    for arm in raw["arms"]:
        if arm.get("updates_per_batch") is not None:
            arm["updates_per_batch"] = MINIBATCHES * EPOCHS


def _derived(
    spec: Spec,
    raw: dict[str, Any],
    execution: dict[str, Any],
    deviations: Sequence[Mapping[str, str]],
    instead: str,
) -> ScaledPlan:
    gate = spec.raw.get("original_activation_gate", spec.raw.get("activation_gate"))
    raw.update(
        derived_from=spec.digest,
        original_activation_gate=copy.deepcopy(gate),
        deviations=[dict(entry) for entry in deviations],
        original_hypothesis_tested=False,
        tested_instead=instead,
    )
    revised = Spec.parse(raw)
    execution["spec_sha256"] = revised.digest
    return ScaledPlan(
        spec=revised,
        execution=ExecutionFile.parse(execution),
        deviations=tuple(deviations),
        original_hypothesis_tested=False,
        tested_instead=instead,
        original_spec_sha256=spec.digest,
        original_activation_gate=gate,
    )
