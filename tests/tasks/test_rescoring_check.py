"""The second way to the rescored values: tokens that the service leaves out are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from envs.teacher import TeacherSequence
from tasks.datums import TrainedSequence
from tasks.rescoring import aligned_scores
from tasks.rescoring_check import AlignmentError, alignment_error
from tasks.trajectories import TeacherPlan, Trajectory

NAN = float("nan")
INFINITE = -float("inf")


def _plan() -> TeacherPlan:
    """A prompt of two tokens, a turn of two, a tool result, and a turn of one token.

    The teacher's prompt has three tokens.
    """
    tokens = [0, 1, 10, 11, 2, 12]
    sequence = TrainedSequence(
        group=0,
        sample=0,
        tokens=np.array(tokens),
        loss_mask=np.array([False, False, True, True, False, True]),
        sampling_logprobs=np.zeros(6),
        advantages=np.zeros(6),
    )
    scored = TeacherSequence((7, 8, 9, *tokens[2:]), 1, 3, False, False, True)
    return TeacherPlan(Trajectory(sequence, 1.0, None, 0.0, 2, "x", ()), None, "x", scored)


class Service:
    """Scores a token by its id, and those of ``instead`` by another value; may stop early."""

    def __init__(self, instead: dict[int, float | None], *, cut: int = 0) -> None:
        self._instead, self._cut = instead, cut

    async def compute_logprobs(self, tokens: Sequence[int]) -> list[float | None]:
        values = [self._instead.get(token, -float(token)) for token in tokens]
        return values[: len(values) - self._cut]


def _compared(first: Service, again: Service) -> AlignmentError:
    plan = _plan()
    served: Any = first
    aligned = asyncio.run(aligned_scores(plan, served))
    repeated: Any = again
    return asyncio.run(alignment_error([plan], [aligned], repeated))


@pytest.mark.parametrize("nothing", [None, NAN, INFINITE])
@pytest.mark.parametrize("first", [True, False])
def test_token_without_a_value_is_counted_and_left_out_of_the_means(
    nothing: float | None, first: bool
) -> None:
    """Token 12 has no value in one of the two ways; token 10 is 0.5 nats off, token 11 exact."""
    plain, holed = Service({10: -9.5}), Service({12: nothing})
    found = _compared(holed, plain) if first else _compared(plain, holed)

    assert found.to_record() == {
        "tokens": 2,
        "unanswered": 1,
        "turns": 2,
        "max_abs": 0.5,
        "mean_abs": 0.25,
    }


def test_answer_that_ends_early_lacks_its_last_tokens() -> None:
    """One token of each turn is left out; the other one of the first turn stays in its place."""
    found = _compared(Service({}), Service({}, cut=1))

    assert (found.tokens, found.unanswered, found.max_abs) == (1, 2, 0.0)


def test_nothing_answered_leaves_no_means() -> None:
    silent = Service({10: None, 11: None, 12: None})

    assert _compared(silent, silent) == AlignmentError(
        tokens=0, unanswered=3, turns=2, max_abs=0.0, mean_abs=0.0
    )
