"""Whether rescored tokens are the right ones: a second, slower way to the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from losses.sdpo_advantage import AlignedTeacher
from tasks.context import settle_all
from tasks.sampling import ServiceSampler
from tasks.trajectories import TeacherPlan


@dataclass(frozen=True, slots=True)
class AlignmentError:
    """Rescored values against values that were computed again, over trained tokens.

    Attributes:
        tokens: compared.
        unanswered: not compared, because one of the two ways gave no finite value.
        turns: agent turns they come from.
        max_abs: largest difference in nats.
        mean_abs: mean difference in nats.
    """

    tokens: int
    unanswered: int
    turns: int
    max_abs: float
    mean_abs: float

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return {
            "tokens": self.tokens,
            "unanswered": self.unanswered,
            "turns": self.turns,
            "max_abs": self.max_abs,
            "mean_abs": self.mean_abs,
        }


def sampled_spans(loss_mask: Sequence[bool] | NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of every unbroken run of trained tokens: the agent's turns."""
    mask = np.asarray(loss_mask, dtype=bool)
    edges = np.flatnonzero(np.diff(np.r_[False, mask, False]))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


async def alignment_error(
    plans: Sequence[TeacherPlan], aligned: Sequence[AlignedTeacher], scorer: ServiceSampler
) -> AlignmentError:
    """Score every turn again by itself, and compare.

    A turn's context ends with the turn, so its values are the last ones of the answer: no offset
    between the two sequences is needed, and none can be wrong. A token that the service gave no
    value is counted, and left out of the means.
    """
    differences: list[float] = []
    turns = 0
    for plan, values in zip(plans, aligned, strict=True):
        if plan.scored is None:
            continue
        again = await settle_all(
            [
                recomputed_turn(plan, start, end, scorer)
                for start, end in sampled_spans(plan.trajectory.sequence.loss_mask)
            ]
        )
        turns += len(again)
        for start, recomputed in again:
            ours = values.teacher_logprobs_T[start - 1 : start - 1 + len(recomputed)].tolist()
            differences += [abs(a - b) for a, b in zip(ours, recomputed, strict=True)]
    every = np.array(differences, dtype=np.float64)
    found = every[np.isfinite(every)]
    return AlignmentError(
        tokens=found.size,
        unanswered=every.size - found.size,
        turns=turns,
        max_abs=float(found.max()) if found.size else 0.0,
        mean_abs=float(found.mean()) if found.size else 0.0,
    )


async def recomputed_turn(
    plan: TeacherPlan, start: int, end: int, scorer: ServiceSampler
) -> tuple[int, list[float]]:
    """One turn's start and the log-probabilities of its tokens, NaN where there is none.

    An answer that is shorter than what was asked for leaves out the last tokens.
    """
    if plan.scored is None:
        raise ValueError("a trajectory without a teacher's sequence has no turn to score")
    prefix = plan.scored.tokens[: plan.scored.prefix_tokens]
    rest = plan.trajectory.sequence.tokens[plan.trajectory.system_tokens : end].tolist()
    asked = [*prefix, *rest]
    answer = await scorer.compute_logprobs(asked)
    last = [*answer, *[None] * (len(asked) - len(answer))][start - end :]
    return start, [float("nan") if value is None else value for value in last]
