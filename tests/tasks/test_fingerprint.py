"""Whether a step landed is decided by the service's own count of steps, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.failures import Failure, FailureKind, ServiceOutage
from tasks.learner import decide_step

pytestmark = pytest.mark.anyio


class Counter:
    """A client of a service that has taken so many steps; None where it does not say."""

    def __init__(self, steps: int | None, *, gone: bool = False) -> None:
        self.steps, self.gone = steps, gone

    async def forward(self, datums: Any) -> Any:
        if self.gone:
            raise ServiceOutage("gone")
        return []

    async def observe(self) -> Any:
        return {"optimizer": {"steps": self.steps}}


def _error(kind: FailureKind) -> ServiceOutage:
    return ServiceOutage("x", failure=Failure(kind, "x"))


@pytest.mark.parametrize(
    ("client", "kind", "counts", "decision"),
    [
        (Counter(4), FailureKind.UNKNOWN, True, "applied, by the service's count"),
        (Counter(3), FailureKind.UNKNOWN, True, "not applied"),
        (Counter(5), FailureKind.UNKNOWN, True, "unknown"),
        (Counter(None), FailureKind.OUTAGE, True, "unknown"),
        (Counter(4), FailureKind.UNKNOWN, False, "unknown"),
        (Counter(4), FailureKind.LOST_MODEL, True, "unknown"),
        (Counter(4, gone=True), FailureKind.OUTAGE, True, "unknown"),
    ],
    ids=range(7),
)
async def test_step_is_decided(
    client: Counter, kind: FailureKind, counts: bool, decision: str
) -> None:
    """Three steps were taken before the one in doubt."""
    decided = await decide_step(client, [], 3, _error(kind), counts=counts)  # type: ignore[arg-type]

    assert decided == decision
