"""What a learner knows about its client's scores, so that a step in doubt can be decided."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tinker

from tasks.failures import FailureKind, ServiceError
from tasks.fingerprint import Scores, StepEvidence, fingerprint, mean_difference
from tasks.trainer import Trainer

_GONE = (FailureKind.LOST_MODEL, FailureKind.PERMANENT)


class Witness:
    """Watches the scores of one training client.

    The batch of the client's first step is scored once more before the step, forward only; that
    is all it costs while nothing goes wrong. What the scores of the step's own forward pass differ
    by from these is this client's noise.

    Args:
        counts: whether the service reports how many steps it has taken, as the embedded one does.
    """

    def __init__(self, *, counts: bool) -> None:
        self._counts = counts
        self._first: Scores | None = None
        self._before: Scores | None = None
        self._repeats: bool | None = None
        self._noise = float("nan")

    @property
    def repeats(self) -> bool | None:
        """Whether the scores were repeated bit for bit; None before the first step."""
        return self._repeats

    async def look(self, trainer: Trainer, datums: Sequence[tinker.Datum]) -> None:
        """Score the batch that is about to be trained, before the client's first step alone."""
        if self._first is None:
            self._first = await trainer.forward(datums)

    def compare(self, logprobs_D: Scores) -> None:
        """Take note of what the step's own forward pass got; nothing if it did not come so far."""
        self._before = [np.array(values, np.float32) for values in logprobs_D] or None
        if self._repeats is None and self._first is not None and self._before is not None:
            self._repeats = fingerprint(self._before) == fingerprint(self._first)
            self._noise = mean_difference(self._before, self._first)

    async def decide(
        self, trainer: Trainer, datums: Sequence[tinker.Datum], index: int, error: Exception
    ) -> str:
        """Decide whether a step landed whose answer was lost.

        Args:
            trainer: the client it was sent to.
            datums: its batch; scoring it waits in the same queue, behind the step.
            index: steps that were taken before it.
            error: what came in the place of the answer.

        Returns:
            ``applied, by ...``; ``not applied, by ...``; else ``unknown``. Only after the first
            may the client be used on.
        """
        failure = error.failure if isinstance(error, ServiceError) else None
        if failure is not None and failure.kind in _GONE:
            return "unknown"
        try:
            first = await trainer.score_again(datums)
            second = await trainer.score_again(datums)
            observed = await trainer.observe() if self._counts else None
        except ServiceError:
            return "unknown"
        steps = ((observed or {}).get("optimizer") or {}).get("steps")
        return StepEvidence(
            index=index,
            before=self._before,
            repeats=bool(self._repeats),
            noise=self._noise,
            after=(first, second),
            steps=steps,
        ).decide()
