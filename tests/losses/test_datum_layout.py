"""From turns to aligned arrays."""

import pytest

from losses.datum_layout import SampledTurn, datum_arrays
from losses.errors import LossInputError


def turn(observation, action, **over) -> SampledTurn:
    values = {"action_logprobs": [-0.5] * len(action)} | over
    return SampledTurn(observation_tokens=observation, action_tokens=action, **values)


def test_arrays_are_shifted_by_one_and_tool_tokens_are_inert():
    """tokens  1 2 | 7 8 | 3 | 9: target 2 7 8 3 9, trained 7 8 9."""
    arrays = datum_arrays(
        [turn([1, 2], [7, 8], action_logprobs=[-0.1, -0.2]), turn([3], [9])], advantage=2.0
    )

    assert arrays.input_tokens_T == (1, 2, 7, 8, 3)
    assert arrays.target_tokens_T == (2, 7, 8, 3, 9)
    assert arrays.sampling_logprobs_T == (0.0, -0.1, -0.2, 0.0, -0.5)
    assert arrays.advantages_T == (0.0, 2.0, 2.0, 0.0, 2.0)
    assert arrays.loss_mask_T == (False, True, True, False, True)


def test_untrained_turn_stays_in_the_sequence_without_a_gradient():
    """Its tokens are there, its mask and advantage are not."""
    arrays = datum_arrays([turn([1], [7], trained=False), turn([3], [9])], advantage=2.0)

    assert arrays.target_tokens_T == (7, 3, 9)
    assert arrays.loss_mask_T == (False, False, True)
    assert arrays.advantages_T == (0.0, 0.0, 2.0)


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([turn([1], [7], action_logprobs=[])], "turn 0: action_logprobs: 0 entries; expected 1"),
        ([turn([1], [])], "turns: 1 tokens in all; expected at least 2"),
        ([], "turns: 0 tokens"),
        ([turn([], [7, 8])], "the first token is a sampled one"),
    ],
)
def test_impossible_trajectory_is_refused(turns, message):
    """What and where."""
    with pytest.raises(LossInputError, match=message):
        datum_arrays(turns, advantage=1.0)
