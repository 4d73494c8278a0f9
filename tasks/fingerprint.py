"""Whether an optimizer step landed whose answer was lost, told without sending it again.

The batch of the step is scored twice more, forward only, and compared with the scores that the
same step's own forward pass got. Nothing else was in flight on its client, which sends a later
request only when the step's own has been answered or given up.

Where the service counts its steps, the count decides, and scores may only contradict it. Without
a count, equal scores mean that the step did not land, or that it changed nothing. Other scores
mean little: another replica, or another batch around ours, gives other last bits at any moment,
however often two passes agreed before. The step counts as landed only where the scores have moved
further than rounding can move them. Everything between is unknown. A step that did not land, and
one that is unknown, is replayed on restored weights, which is right whether it landed or not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Scores = Sequence[NDArray[np.float32]]
"""Log-probabilities of the targets of a batch: [T] of each datum, nats."""

MOVED_NATS = 0.5
"""Mean move of a log-probability, nats, from which on rounding is no explanation.

bfloat16 keeps 8 significant bits: a log-probability between -32 and -16 is rounded by up to 0.0625.
What two implementations of one model in bfloat16 differ by was measured as 0.01 to 0.04 in the
mean over tokens, and 0.3 to 0.5 at the worst single token of hundreds: here the mean has to be
what the worst token was there. A usual step moves scores by less, and is replayed."""
TIMES_NOISE = 20.0
"""The mean move is also at least so many times what two passes over the same weights differed by."""


def fingerprint(logprobs_D: Scores) -> str:
    """SHA-256 of the scores of a batch, to the last bit.

    Args:
        logprobs_D: [T] of each datum, nats.
    """
    seen = hashlib.sha256()
    for logprobs in logprobs_D:
        values = np.ascontiguousarray(logprobs, dtype="<f4")
        seen.update(len(values).to_bytes(8, "little"))
        seen.update(values.tobytes())
    return seen.hexdigest()


def mean_difference(one_D: Scores, other_D: Scores) -> float:
    """Mean over all tokens of the absolute difference of two scorings of a batch, nats.

    Args:
        one_D: [T] of each datum, nats.
        other_D: likewise.

    Returns:
        At least 0; NaN where a score is not finite, the lengths differ or there is no token.
    """
    lengths = [[len(logprobs) for logprobs in scores] for scores in (one_D, other_D)]
    if lengths[0] != lengths[1] or not sum(lengths[0]):
        return float("nan")
    one, other = (np.concatenate(list(scores)).astype(np.float64) for scores in (one_D, other_D))
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return float("nan")
    return float(np.mean(np.abs(one - other)))


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """What is known about a step whose answer was lost.

    Attributes:
        index: steps that were taken before it.
        before: scores of its batch from the step's own forward pass; None if there are none.
        repeats: whether the service had given the same scores twice, bit for bit, on this client.
        noise: mean difference of these two scorings, nats; NaN if they were not compared.
        after: scores of its batch from two forward passes behind the step.
        steps: the service's own count of steps; None where it does not say.
    """

    index: int
    before: Scores | None
    repeats: bool
    noise: float
    after: tuple[Scores, Scores]
    steps: int | None

    def decide(self) -> str:
        """Return ``applied, by ...``, ``not applied, by ...`` or ``unknown``.

        Where count and scores contradict each other it is unknown, with one exception: a step
        whose gradient and moments are zero changes no score, so that the count alone tells it.
        """
        counted, scored = self._counted(), self._scored()
        if counted is None:
            return self._by_scores_alone(scored)
        if counted == "unknown" or (counted == "not applied" and scored == "applied"):
            return "unknown"
        if counted == scored:
            return f"{counted}, by the service's count and the fingerprint"
        return f"{counted}, by the service's count"

    def _by_scores_alone(self, scored: str | None) -> str:
        if scored == "not applied":
            return "not applied, by the fingerprint"
        return "applied, by the fingerprint" if self._beyond_rounding() else "unknown"

    def _counted(self) -> str | None:
        if self.steps is None:
            return None
        return {self.index: "not applied", self.index + 1: "applied"}.get(self.steps, "unknown")

    def _scored(self) -> str | None:
        """What the scores say beside a count; None from a service that does not repeat them."""
        if self.before is None:
            return None
        before, first, second = map(fingerprint, (self.before, *self.after))
        if not self.repeats or first != second:
            return None
        return "not applied" if first == before else "applied"

    def _beyond_rounding(self) -> bool:
        """Whether both scorings behind the step are far from the one before it; never for NaN."""
        if self.before is None:
            return False
        moved = np.min([mean_difference(self.before, after) for after in self.after])
        noise = np.max([self.noise, mean_difference(*self.after)])
        return bool(moved >= np.max([MOVED_NATS, TIMES_NOISE * noise]))
