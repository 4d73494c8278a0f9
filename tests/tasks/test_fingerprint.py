"""Whether a step landed is decided by scores of its batch and the service's count, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tasks.failures import Failure, FailureKind, ServiceOutage
from tasks.fingerprint import StepEvidence, fingerprint
from tasks.witness import Witness

pytestmark = pytest.mark.anyio

OLD, NEW = [np.float32([-1.0, -2.0])], [np.float32([-1.0, -2.0000002])]
FAR, NEAR = [np.float32([-1.25, -2.75])], [np.float32([-1.25, -2.7499])]
"""0.25 and 0.75 nats from the old ones, 0.5 in the mean; and just less."""
NOT_FINITE = [np.float32([-1.0, -np.inf])]


class Client:
    """A client whose scores are given one after the other; the last one stays."""

    def __init__(self, *scores: Any, steps: int | None = None, gone: bool = False) -> None:
        self.scores, self.steps, self.gone = list(scores), steps, gone

    async def forward(self, datums: Any) -> Any:
        return self.scores.pop(0) if len(self.scores) > 1 else self.scores[0]

    async def score_again(self, datums: Any) -> Any:
        if self.gone:
            raise ServiceOutage("gone")
        return await self.forward(datums)

    async def observe(self) -> Any:
        return {"optimizer": {"steps": self.steps}}


def _error(kind: FailureKind) -> ServiceOutage:
    return ServiceOutage("x", failure=Failure(kind, "x"))


async def _decided(
    client: Client,
    *,
    counts: bool = False,
    kind: FailureKind = FailureKind.UNKNOWN,
    inside: Sequence[Any] = OLD,
) -> str:
    """Three steps were taken before the one in doubt; `inside` are the step's own scores."""
    witness, anything = Witness(counts=counts), client
    await witness.look(anything, [])  # type: ignore[arg-type]
    witness.compare(inside)
    return await witness.decide(anything, [], 3, _error(kind))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("client", "decision"),
    [
        (Client(OLD, FAR), "applied, by the fingerprint"),
        (Client(OLD, NEAR), "unknown"),
        (Client(OLD, NEW), "unknown"),
        (Client(OLD), "not applied, by the fingerprint"),
        (Client(OLD, FAR, OLD), "unknown"),
        (Client(OLD, NOT_FINITE), "unknown"),
        (Client(OLD, [np.float32([-5.0])]), "unknown"),
        (Client(NEW, NEW), "unknown"),
        (Client(NEW, OLD), "unknown"),
        (Client(OLD, FAR, gone=True), "unknown"),
    ],
    ids=[
        *("far", "just_too_near", "last_place", "the_same", "changes_between_two_looks"),
        *("not_finite", "another_batch", "never_repeated", "noisy_and_the_same", "gone"),
    ],
)
async def test_step_is_decided_by_scores_alone(client: Client, decision: str) -> None:
    """Half a nat in the mean is a step; the last place is what another replica gives as well."""
    assert await _decided(client) == decision


@pytest.mark.parametrize(
    ("first", "moved", "decision"),
    [
        (0.0625, 1.25, "applied, by the fingerprint"),
        (0.0625, 1.24, "unknown"),
        (0.0, 0.5, "applied, by the fingerprint"),
        (np.nan, 8.0, "unknown"),
    ],
    ids=["twenty_times", "less", "no_noise", "noise_not_known"],
)
async def test_step_is_twenty_times_what_two_passes_over_the_same_weights_differ_by(
    first: float, moved: float, decision: str
) -> None:
    client = Client([np.float32([-1.0 - first])], [np.float32([-1.0 - moved])])

    assert await _decided(client, inside=[np.float32([-1.0])]) == decision


async def test_noise_between_the_two_looks_behind_a_step_counts_as_well() -> None:
    """Both are 1 nat or more away, but 0.25 nats from each other: 20 times that is 5 nats."""
    away, further = [np.float32([-2.0])], [np.float32([-2.25])]
    client = Client([np.float32([-1.0])], away, further)

    assert await _decided(client, inside=[np.float32([-1.0])]) == "unknown"


async def test_update_that_did_not_land_is_not_taken_for_one_that_did_on_another_replica() -> None:
    """Two passes agree before the step by chance, and two behind it on another replica: every
    score of it is off by what bfloat16 rounds it by."""
    here = [np.float32([-3.0, -20.0, -0.5])]
    elsewhere = [np.float32([-3.015625, -20.125, -0.50390625])]

    assert await _decided(Client(here, elsewhere), inside=here) == "unknown"


@pytest.mark.parametrize(
    ("client", "decision"),
    [
        (Client(OLD, NEW, steps=4), "applied, by the service's count and the fingerprint"),
        (Client(OLD, steps=3), "not applied, by the service's count and the fingerprint"),
        (Client(OLD, steps=4), "applied, by the service's count"),
        (Client(OLD, NEW, steps=3), "unknown"),
        (Client(OLD, NEW, steps=5), "unknown"),
        (Client(OLD, FAR, steps=3), "unknown"),
        (Client(OLD, NEW, steps=None), "unknown"),
        (Client(OLD, FAR, steps=None), "applied, by the fingerprint"),
        (Client(NEW, steps=4), "applied, by the service's count"),
    ],
    ids=[
        *("agree", "agree_not", "changed_nothing", "contradict", "two", "contradict_widely"),
        *("silent", "silent_and_far", "not_repeating"),
    ],
)
async def test_count_of_the_service_is_more_evidence(client: Client, decision: str) -> None:
    assert await _decided(client, counts=True) == decision


@pytest.mark.parametrize("kind", [FailureKind.LOST_MODEL, FailureKind.PERMANENT])
async def test_step_on_a_lost_model_is_not_asked_about(kind: FailureKind) -> None:
    assert await _decided(Client(OLD, NEW, steps=4), counts=True, kind=kind) == "unknown"


async def test_step_without_scores_of_its_own_is_not_decided_by_scores() -> None:
    """The forward pass inside the step never came back."""
    assert await _decided(Client(OLD, FAR), inside=[]) == "unknown"


async def test_batch_is_scored_beforehand_for_the_first_step_of_a_client_alone() -> None:
    witness, client = Witness(counts=False), Client(OLD, NEW, OLD)

    for _ in range(3):
        await witness.look(client, [])  # type: ignore[arg-type]
        witness.compare(OLD)

    assert len(client.scores) == 2
    assert witness.repeats is True


def test_fingerprint_tells_where_one_sequence_ends() -> None:
    """The same numbers, split differently, are another batch."""
    one = fingerprint([np.float32([1.0]), np.float32([2.0, 3.0])])
    other = fingerprint([np.float32([1.0, 2.0]), np.float32([3.0])])

    assert one != other
    assert one == fingerprint([np.float32([1.0]), np.float32([2.0, 3.0])])


def test_evidence_without_anything_decides_nothing() -> None:
    empty = StepEvidence(
        index=0, before=None, repeats=False, noise=float("nan"), after=(FAR, FAR), steps=None
    )

    assert empty.decide() == "unknown"
