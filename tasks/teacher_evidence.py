"""What the tables of a phase say about a teacher and a judge, for the gates; no service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evidence.canonical import loads_strict
from evidence.run import Run

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TeacherEvidence:
    """A phase's trained tokens as teacher and sampler score them; None where there is no teacher.

    Attributes:
        teacher_logprobs: [N] nats; NaN where the teacher gave none.
        student_logprobs: [N] nats, of the same tokens as sampled.
        judge_rationales: one a trajectory: the judge's words in its teacher's prompt.
    """

    teacher_logprobs: Floats | None = None
    student_logprobs: Floats | None = None
    judge_rationales: list[str | None] | None = None


def teacher_evidence(run: Run, arm: str, phase: str) -> TeacherEvidence:
    """Read what an arm's teacher gave in a phase."""
    table = run.read_all("rescoring", prefix=(arm, phase))

    def column(name: str) -> Floats:
        return np.asarray(table.column(name).to_numpy(), dtype=np.float64)

    return TeacherEvidence(
        teacher_logprobs=column("teacher_logprob"),
        student_logprobs=column("sampling_logprob"),
        judge_rationales=list(_rationales(run, arm, phase)),
    )


def _rationales(run: Run, arm: str, phase: str) -> Iterator[str | None]:
    words = {place: info.get("rationale") for place, info in _infos(run, arm, phase)}
    for key in run.keys("teachers", prefix=(arm, phase)):
        for row in run.read_table("teachers", key=key):
            place = (key[2], row["group"], row["sample"])
            yield words.get(place) if row["feedback_shown"] else None


def teacher_metrics(run: Run, arm: str, phase: str) -> dict[str, float]:
    """Count what an arm's teacher was shown and left out in a phase; empty without a teacher.

    Returns:
        ``teacher_trajectories``; of them ``teacher_solutions_shown``, ``teacher_solutions_dropped``
        (too long with it) and ``teacher_over_length`` (too long even so, no signal);
        ``teacher_missing_tokens`` and ``teacher_clipped_tokens`` of all trained ones; and
        ``teacher_mean_abs_gap``, the mean |teacher - sampling| of the last step in nats.
    """
    keys = run.keys("teachers", prefix=(arm, phase))
    rows = [row for key in keys for row in run.read_table("teachers", key=key)]
    if not rows:
        return {}
    numbers = {"teacher_trajectories": float(len(rows))}
    for name, column in (
        ("teacher_solutions_shown", "solution_shown"),
        ("teacher_solutions_dropped", "solution_dropped"),
        ("teacher_over_length", "over_length"),
        ("teacher_missing_tokens", "missing_tokens"),
        ("teacher_clipped_tokens", "clipped_tokens"),
    ):
        numbers[name] = float(sum(row[column] for row in rows))
    table = run.read_arrow("rescoring", key=keys[-1])
    gap = np.abs(
        table.column("teacher_logprob").to_numpy() - table.column("sampling_logprob").to_numpy()
    ).astype(np.float64)
    if np.isfinite(gap).any():
        numbers["teacher_mean_abs_gap"] = float(gap[np.isfinite(gap)].mean())
    return numbers


def judge_calls(run: Run, arms: Sequence[str], phase: str) -> list[bool]:
    """Whether three scores and a rationale could be read, call by call of the judge.

    Every graded episode has one answer that could, and `judge_failures` before it. A judge made of
    rules is counted as one call an episode.
    """
    calls: list[bool] = []
    for arm in arms:
        for _, info in _infos(run, arm, phase):
            if "judge_failures" in info:
                calls += [False] * len(info["judge_failures"])
                calls.append(bool(str(info.get("rationale") or "").strip()))
    return calls


def _infos(run: Run, arm: str, phase: str) -> Iterator[tuple[tuple[Any, int, int], dict[str, Any]]]:
    """Facts of every episode of a phase, with its step, group and sample."""
    for key in run.keys("rollouts", prefix=(arm, phase)):
        for row in run.read_table("rollouts", key=key):
            facts = loads_strict(row["info_json"] or "{}", where="info_json")
            yield (key[2], row["group"], row["sample"]), facts.get("info") or {}
