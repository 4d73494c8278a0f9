"""Whether the stored scores of a teacher give the advantages that were trained with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evidence.run import Run
from tasks.stored_updates import StoredArm

TOLERANCE_NATS = 1e-4
"""Scores and advantages are stored with 32 bits."""
_COLUMNS = ("group", "sample", "position", "teacher_logprob", "sampling_logprob", "advantage")


def rescored_columns(run: Run, key: tuple[Any, ...]) -> dict[str, NDArray[Any]]:
    """Columns of `rescoring` of one rollout step, in key order: one row a trained token."""
    table = run.read_arrow("rescoring", key=key)
    return {name: np.asarray(table.column(name).to_numpy()) for name in _COLUMNS}


def rescoring_contradictions(stored: StoredArm, settings: Mapping[str, Any]) -> Iterator[str]:
    """Say where advantages do not follow from the teacher's scores and the arm's settings."""
    for step in stored.steps:
        key = (stored.arm, stored.phase, step)
        if not stored.run.has_table("rescoring", key=key):
            yield f"rescoring of step {step} is not there"
            continue
        columns = rescored_columns(stored.run, key)
        rewarded = {
            (row["group"], row["sample"]): row["advantage"]
            for row in stored.run.read_table("rollouts", key=key)
        }
        expected = expected_advantages(columns, settings, rewarded)
        different = ~(np.abs(columns["advantage"] - expected) <= TOLERANCE_NATS)
        if different.any():
            first = int(different.argmax())
            place = [int(columns[name][first]) for name in ("group", "sample", "position")]
            yield (
                f"step {step}: advantages of {int(different.sum())} tokens do not follow from the "
                f"teacher's scores, first at group {place[0]} sample {place[1]} position {place[2]}"
            )


def expected_advantages(
    columns: Mapping[str, NDArray[Any]],
    settings: Mapping[str, Any],
    rewarded: Mapping[tuple[int, int], float],
) -> NDArray[np.float64]:
    """Compute the advantages of a step anew, token by token.

    Args:
        columns: of `rescoring`.
        settings: the arm's advantage settings.
        rewarded: reward minus group mean, by group and sample.
    """
    bound = np.inf if settings["clip"] is None else float(settings["clip"])
    gap = columns["teacher_logprob"].astype(np.float64) - columns["sampling_logprob"]
    gap = np.where(np.isnan(gap), 0.0, gap)
    if settings["kind"] == "sdpo_token":
        return np.clip(gap, -bound, bound)
    found = np.empty(len(gap))
    places = np.stack([columns["group"], columns["sample"]], axis=1)
    for group, sample in np.unique(places, axis=0).tolist():
        rows = (places == (group, sample)).all(axis=1)
        if settings["kind"] == "sdpo_sequence":
            found[rows] = np.clip(gap[rows].mean(), -bound, bound)
        else:
            share = float(settings["grpo_weight"])
            clipped = np.clip(gap[rows], -bound, bound)
            found[rows] = share * rewarded[group, sample] + (1.0 - share) * clipped
    return found
