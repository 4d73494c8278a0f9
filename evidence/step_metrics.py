"""Rewards and lengths of each rollout step, from the rollout tables."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Any

from evidence.run import Run


def step_metrics(run: Run) -> list[dict[str, Any]]:
    """Return one row for each rollout step that was completed, sorted by arm, phase and step.

    ``groups_with_signal`` counts groups in which an advantage is not 0: the others teach nothing.
    Fractions are over completions; ``correct_fraction`` is null where nothing was graded.
    """
    return [metrics_of_step(run, key) for key in run.keys("rollouts")]


def metrics_of_step(run: Run, key: tuple[Any, ...]) -> dict[str, Any]:
    """Return the row of one rollout step, by the key of its rollout table."""
    table = run.read_arrow("rollouts", key=key)
    column = {name: table.column(name).to_pylist() for name in table.column_names}
    count = table.num_rows
    rewards = column["reward"]
    graded = [value for value in column["correct"] if value is not None]
    pairs = zip(column["group"], column["advantage"], strict=True)
    arm, phase, step = key
    return {
        "arm": arm,
        "phase": phase,
        "step": step,
        "completions": count,
        "reward_mean": fmean(rewards) if count else None,
        "reward_std": pstdev(rewards) if count else None,
        "correct_fraction": fmean(map(float, graded)) if graded else None,
        "truncated_fraction": fmean(map(float, column["truncated"])) if count else None,
        "completion_tokens_mean": fmean(column["completion_tokens"]) if count else None,
        "groups": len(set(column["group"])),
        "groups_with_signal": len({group for group, advantage in pairs if advantage != 0.0}),
    }
