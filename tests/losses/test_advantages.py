"""Group advantages against numbers worked out by hand."""

import math

import pytest
import torch

from losses.advantages import (
    broadcast_advantages,
    group_advantages,
    group_mean_advantages,
    informative_groups,
    total_reward,
    verl_group_advantages,
    verl_outcome_advantages,
)
from losses.errors import LossConfigError, LossInputError
from tests.losses.builders import tensor


def test_group_mean_by_hand():
    """Rewards 1, 0, 0, 1: mean 0.5, no division by a standard deviation."""
    assert group_mean_advantages(tensor(1, 0, 0, 1)).tolist() == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1e6 + 0.1])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_equal_rewards_give_exactly_zero(dtype, reward, size):
    """0.1 three times has a mean of 0.10000000000000002; the advantage is still 0, not 1e-17."""
    rewards = torch.full((size,), reward, dtype=dtype)

    assert group_mean_advantages(rewards).tolist() == [0.0] * size
    if size > 1:
        spread = verl_group_advantages(rewards, norm_by_std=True, epsilon=1e-6)
        assert spread.tolist() == [0.0] * size


def test_large_offset_needs_float64():
    """1e6 + (0.5, 0.75): float64 centres to -+0.125 within 1e-10, float32 sees steps of 1/16."""
    rewards = [1e6 + 0.50, 1e6 + 0.76]

    exact = group_mean_advantages(torch.tensor(rewards, dtype=torch.float64))
    coarse = group_mean_advantages(torch.tensor(rewards, dtype=torch.float32))

    assert exact.tolist() == pytest.approx([-0.13, 0.13], abs=1e-9)
    assert coarse.tolist() == pytest.approx([-0.125, 0.125], abs=1e-9)


def test_verl_with_standard_deviation_by_hand():
    """Rewards 1, 0, 0: mean 1/3, sample standard deviation sqrt(1/3); 2/3 / 0.577 = 1.1547."""
    expected_std = math.sqrt(1.0 / 3.0)

    values = verl_group_advantages(tensor(1, 0, 0), norm_by_std=True, epsilon=1e-6)

    assert values.tolist() == pytest.approx(
        [(2 / 3) / (expected_std + 1e-6), *[(-1 / 3) / (expected_std + 1e-6)] * 2], rel=1e-14
    )


def test_singleton_group_differs_between_the_two_forms():
    """Group mean: 0. verl: the raw reward, over 1 + epsilon with the standard deviation."""
    assert group_mean_advantages(tensor(0.7)).tolist() == [0.0]
    assert verl_group_advantages(tensor(0.7), norm_by_std=False, epsilon=1e-6).tolist() == [0.7]
    assert verl_group_advantages(tensor(0.7), norm_by_std=True, epsilon=1e-6).tolist() == [
        pytest.approx(0.7 / (1 + 1e-6), rel=1e-15)
    ]


def test_rewards_that_float32_cannot_tell_apart_are_equal():
    """0.1 in float32, eight times: no advantage of thousands from a residue over epsilon."""
    rewards = torch.full((8,), 0.1, dtype=torch.float32)
    rewards_from_sums = rewards + torch.zeros(8)

    values = verl_group_advantages(rewards_from_sums, norm_by_std=True, epsilon=1e-6)

    assert values.tolist() == [0.0] * 8


def test_outcome_advantages_group_interleaved_sequences():
    """Groups a, b, a, b; token rewards add up; padding stays exactly 0."""
    rewards = torch.tensor([[0.5, 0.5], [0, 0], [0, 0], [0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False], [True, True], [True, True]])

    spread = verl_outcome_advantages(
        rewards, mask, groups_B=["a", "b", "a", "b"], norm_by_std=False, epsilon=1e-6
    )

    assert spread.tolist() == [[0.5, 0.5], [-0.5, 0.0], [-0.5, -0.5], [0.5, 0.5]]


def test_broadcast_is_zero_off_the_mask():
    """Also for an infinite advantage, which no product with 0 would remove."""
    spread = broadcast_advantages(tensor(math.inf, 2.0), torch.tensor([[False], [True]]))

    assert spread.tolist() == [[0.0], [2.0]]


def test_informative_groups_can_keep_one():
    """All constant: the published rule keeps the first group."""
    assert informative_groups([[1, 1], [1, 0], [0, 0]], keep_one=False) == [1]
    assert informative_groups([[1, 1], [0, 0]], keep_one=True) == [0]
    assert informative_groups([[1, 1], [0, 0]], keep_one=False) == []
    assert informative_groups([], keep_one=True) == []


def test_total_reward_adds_steps_and_final():
    """0.25 + 0.5 + 1."""
    assert total_reward([0.25, 0.5], 1.0) == 1.75


@pytest.mark.parametrize("function", [group_mean_advantages])
@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (tensor(), r"rewards_G: shape \(0,\)"),
        (tensor(1.0, math.nan), "rewards_G: .*nan"),
        (tensor(1.0, math.inf), "rewards_G: .*inf"),
        (torch.zeros(2, 2), r"rewards_G: shape \(2, 2\)"),
    ],
)
def test_unusable_rewards_are_refused(function, rewards, message):
    """A missing reward is never a 0."""
    with pytest.raises(LossInputError, match=message):
        function(rewards)


def test_groups_must_name_every_sequence():
    """Three sequences, two names."""
    with pytest.raises(LossInputError, match="groups_B: 2 entries; expected 3"):
        verl_outcome_advantages(
            torch.zeros(3, 1),
            torch.ones(3, 1, dtype=torch.bool),
            groups_B=["a", "b"],
            norm_by_std=False,
            epsilon=1e-6,
        )


def test_registered_advantage_without_and_with_standard_deviation():
    """std_norm chooses between the two forms."""
    rewards = tensor(1, 0)

    plain = group_advantages({"kind": "group_mean", "std_norm": False}, rewards)
    scaled = group_advantages({"kind": "group_mean", "std_norm": True, "epsilon": 1e-6}, rewards)

    assert plain.tolist() == [0.5, -0.5]
    assert scaled.tolist() == pytest.approx(
        [0.5 / (math.sqrt(0.5) + 1e-6)] * 1 + [-0.5 / (math.sqrt(0.5) + 1e-6)]
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "gae"}, "advantage.kind: 'gae'"),
        ({"kind": "group_mean"}, "advantage.std_norm: None"),
        ({"kind": "group_mean", "std_norm": 1}, "advantage.std_norm: 1"),
    ],
)
def test_registered_advantage_must_be_known(config, message):
    """Field and value are in the message."""
    with pytest.raises(LossConfigError, match=message):
        group_advantages(config, tensor(1, 0))
