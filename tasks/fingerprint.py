"""Whether an optimizer step landed whose answer was lost, told without sending it again.

The batch of the step is scored twice more, forward only, and compared with the scores that the
same step's own forward pass got. On a service that repeats scores bit for bit, other scores mean
that the step landed: nothing else was in flight on its client, which sends a later request only
when the step's own has been answered or given up. Equal scores mean that it did not land, or that
it changed nothing; the step is then replayed on restored weights, which is right either way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def fingerprint(logprobs_D: Sequence[NDArray[np.float32]]) -> str:
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


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """What is known about a step whose answer was lost.

    Attributes:
        index: steps that were taken before it.
        before: fingerprint of its batch from the step's own forward pass; None if there is none.
        repeats: whether the service had given the same fingerprint twice before the step.
        after: fingerprints of its batch from two forward passes behind the step.
        steps: the service's own count of steps; None where it does not say.
    """

    index: int
    before: str | None
    repeats: bool
    after: tuple[str, str]
    steps: int | None

    def decide(self) -> str:
        """Return ``applied, by ...``, ``not applied, by ...`` or ``unknown``.

        Where count and scores contradict each other it is unknown, with one exception: a step
        whose gradient and moments are zero changes no score, so that the count alone tells it.
        """
        counted, scored = self._counted(), self._scored()
        if counted == "unknown" or (counted == "not applied" and scored == "applied"):
            return "unknown"
        if counted is None:
            return "unknown" if scored is None else f"{scored}, by the fingerprint"
        if counted == scored:
            return f"{counted}, by the service's count and the fingerprint"
        return f"{counted}, by the service's count"

    def _counted(self) -> str | None:
        if self.steps is None:
            return None
        return {self.index: "not applied", self.index + 1: "applied"}.get(self.steps, "unknown")

    def _scored(self) -> str | None:
        """What the scores say; None from a service that does not repeat them."""
        if not self.repeats or self.before is None or self.after[0] != self.after[1]:
            return None
        return "not applied" if self.after[0] == self.before else "applied"
