"""The likeliest tokens at each trained position, and what the teacher gives them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.datums import Support, TrainedSequence, empty_support
from tasks.sampling import ServiceSampler
from tasks.trajectories import TeacherPlan


@dataclass(frozen=True, slots=True)
class ScoredSupport:
    """K tokens at each position of one trajectory, scored by both sides.

    Attributes:
        tokens: [L, K] token ids, the likeliest first.
        student: [L, K] nats under the policy that sampled; NaN where nothing was scored.
        teacher: [L, K] nats under the teacher; NaN where nothing was scored.
    """

    tokens: NDArray[np.int64]
    student: NDArray[np.float64]
    teacher: NDArray[np.float64]

    @property
    def positions(self) -> NDArray[np.int64]:
        """Positions that were scored."""
        return np.flatnonzero(~np.isnan(self.teacher[:, 0]))

    def rows(self, plan: TeacherPlan) -> Iterator[dict[str, Any]]:
        """Yield rows of `supports` without their episode."""
        for position in self.positions[plan.trajectory.sequence.loss_mask[self.positions]].tolist():
            for rank, token in enumerate(self.tokens[position].tolist()):
                yield {
                    "position": position,
                    "rank": rank,
                    "token_id": token,
                    "sampling_logprob": float(self.student[position, rank]),
                    "teacher_logprob": float(self.teacher[position, rank]),
                }

    def of(self, sequence: TrainedSequence) -> Support:
        """The support as an update uses it."""
        support = empty_support(sequence, top_k=self.tokens.shape[1])
        support.tokens[self.positions] = self.tokens[self.positions]
        support.teacher_logprobs[self.positions] = self.teacher[self.positions]
        return support


async def scored_support(
    plan: TeacherPlan, student: ServiceSampler, teacher: ServiceSampler, *, top_k: int
) -> ScoredSupport:
    """Ask the policy for its likeliest tokens, and the teacher for their log-probabilities.

    Both read the trajectory's own tokens up to each position; a trajectory without a teacher's
    sequence has no support.

    Raises:
        PermanentServiceError: if the service returns no top-K scores.
    """
    sequence = plan.trajectory.sequence
    shape = (len(sequence.tokens), top_k)
    nothing = np.full(shape, np.nan)
    if plan.scored is None:
        return ScoredSupport(np.zeros(shape, dtype=np.int64), nothing, nothing)
    tokens, logprobs = await student.likeliest(sequence.tokens.tolist(), top_k=top_k)
    start, prefix = plan.trajectory.system_tokens, plan.scored.prefix_tokens
    trained = sequence.loss_mask[start:, None]
    asked = np.full((len(plan.scored.tokens), top_k), -1, dtype=np.int64)
    asked[prefix:] = np.where(trained, tokens[start:], -1)
    teacher_logprobs = nothing.copy()
    teacher_logprobs[start:] = (await teacher.scores_of(plan.scored.tokens, asked))[prefix:]
    return ScoredSupport(
        tokens, np.where(np.isnan(teacher_logprobs), np.nan, logprobs), teacher_logprobs
    )
