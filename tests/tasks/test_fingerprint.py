"""Whether a step landed is decided by scoring its own minibatch again, twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tasks.failures import Failure, FailureKind, ServiceOutage
from tasks.learner import decide_step

pytestmark = pytest.mark.anyio

BEFORE = [np.array([-1.0, -2.0], dtype=np.float32)]
AFTER = [np.array([-0.9, -2.1], dtype=np.float32)]
NOISE = [np.array([-0.9, -2.2], dtype=np.float32)]


class Scorer:
    """Answers forwards from a list."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    async def forward(self, datums: Any) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _error(kind: FailureKind) -> ServiceOutage:
    return ServiceOutage("x", failure=Failure(kind, "x"))


@pytest.mark.parametrize(
    ("scores", "kind", "decision"),
    [
        ((AFTER, AFTER), FailureKind.UNKNOWN, "applied, by fingerprint"),
        ((BEFORE, BEFORE), FailureKind.UNKNOWN, "not applied"),
        ((AFTER, NOISE), FailureKind.UNKNOWN, "unknown"),
        ((BEFORE, NOISE), FailureKind.OUTAGE, "unknown"),
        ((AFTER, AFTER), FailureKind.LOST_MODEL, "unknown"),
        ((ServiceOutage("gone"),), FailureKind.OUTAGE, "unknown"),
    ],
    ids=range(6),
)
async def test_step_is_decided(scores: tuple[Any, ...], kind: FailureKind, decision: str) -> None:
    decided = await decide_step(Scorer(*scores), [], BEFORE, _error(kind))  # type: ignore[arg-type]

    assert decided == decision
