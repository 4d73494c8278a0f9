"""The numbers of one arm that are posted while it trains and when it is done."""

from __future__ import annotations

import math
from typing import Any

from evidence.episode_metrics import evaluation_metrics, headline
from tasks.arms import ArmPlan
from tasks.context import RunContext
from tasks.evaluation import FINAL, mean_scores
from tasks.teacher_evidence import teacher_metrics

_OF_THE_LAST_UPDATE = (
    "masked_fraction",
    "ppo_counterfactual_fraction",
    "drift_abs_q90",
    "drift_abs_max",
)


def arm_metrics(ctx: RunContext, arm: ArmPlan) -> dict[str, float]:
    """Updates done, reward of the last rollout step, drift of the last update, final scores.

    Where a teacher gives the advantages: what it was shown and left out (`teacher_metrics`).

    Where episodes are conversations: also the share of the judge's and the simulator's answers
    that could be used, and the policy's turns that could not, in the final evaluation.
    """
    numbers: dict[str, float] = {}
    updates = ctx.run.keys("updates", prefix=(arm.name, "train"))
    if updates:
        numbers["optimizer_steps"] = float(len(updates))
        row = ctx.run.read_table("updates", key=updates[-1])[0]
        numbers |= {name: row[name] for name in _OF_THE_LAST_UPDATE if _is_number(row.get(name))}
        rewards = ctx.run.read_arrow("rollouts", key=(arm.name, "train", row["step"]))
        values = rewards.column("reward").to_pylist()
        numbers["reward_mean_last_step"] = sum(values) / len(values)
    numbers |= teacher_metrics(ctx.run, arm.name, "train")
    if ctx.run.has_table("evaluations", key=(arm.name, FINAL)):
        numbers |= mean_scores(ctx, arm.name, FINAL)
        numbers |= headline(evaluation_metrics(ctx.run, arm.name, FINAL))
    return numbers


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
