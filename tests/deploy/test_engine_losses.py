"""The built-in losses against numbers derived by hand, and their derivatives against autograd."""

import math

import pytest
import torch

from deploy.local_service.builtin_losses import LOSSES, find_loss, settings
from evidence.errors import InputError

LN2 = math.log(2.0)


def evaluate(name, given, config=None, **inputs):
    loss = find_loss(name)
    tensors = {key: torch.tensor(value) for key, value in inputs.items()}
    return loss.function(torch.tensor(given), tensors, settings(loss, config))


def test_cross_entropy_is_a_weighted_negative_sum():
    """-(1 * -1 + 0 * -2 + 0.5 * -4) = 1 + 0 + 2."""
    value = evaluate("cross_entropy", [-1.0, -2.0, -4.0], weights=[1.0, 0.0, 0.5])
    assert value.per_token.tolist() == [1.0, 0.0, 2.0]
    assert value.derivative.tolist() == [-1.0, 0.0, -0.5]


def test_importance_sampling_weighs_advantages_by_the_ratio():
    """Ratios 2 and 1/2, advantages 3 and -1: -(2 * 3) and -(1/2 * -1)."""
    value = evaluate(
        "importance_sampling", [-1.0, -1.0], logprobs=[-1 - LN2, -1 + LN2], advantages=[3.0, -1.0]
    )
    assert value.per_token.tolist() == pytest.approx([-6.0, 0.5])
    assert value.derivative.tolist() == pytest.approx([-6.0, 0.5])


def test_ppo_keeps_the_smaller_of_plain_and_clipped():
    """Bounds 0.8 and 1.2.

    r=2, A=1: min(2, 1.2), no gradient. r=2, A=-1: min(-2, -1.2), gradient.
    r=1/2, A=1: min(0.5, 0.8), gradient. r=1/2, A=-1: min(-0.5, -0.8), none. r=1: gradient.
    """
    value = evaluate(
        "ppo",
        [-1.0] * 5,
        logprobs=[-1 - LN2, -1 - LN2, -1 + LN2, -1 + LN2, -1.0],
        advantages=[1.0, -1.0, 1.0, -1.0, 1.0],
    )
    assert value.per_token.tolist() == pytest.approx([-1.2, 2.0, -0.5, 0.8, -1.0])
    assert value.derivative.tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0, -1.0])


def test_ppo_bounds_can_be_changed():
    """r=2 within [0.8, 2.5] is not clipped."""
    config = {"clip_high_threshold": 2.5}
    value = evaluate("ppo", [-1.0], config, logprobs=[-1 - LN2], advantages=[1.0])
    assert value.per_token.tolist() == pytest.approx([-2.0])


def test_cispo_clips_the_ratio_and_lets_every_token_have_a_gradient():
    """r=8 is cut to 4: -(4 * lp * A) with lp=-1, A=2; derivative -(4 * 2)."""
    value = evaluate("cispo", [-1.0], logprobs=[-1 - 3 * LN2], advantages=[2.0])
    assert value.per_token.tolist() == pytest.approx([8.0])
    assert value.derivative.tolist() == pytest.approx([-8.0])


def test_dro_adds_a_quadratic_penalty():
    """lp=-1, old=-3, A=2, beta=0.5: -(-1 * 2 - 0.25 * 2^2) = 3; derivative -(2 - 0.5 * 2) = -1."""
    value = evaluate("dro", [-1.0], {"beta": 0.5}, logprobs=[-3.0], advantages=[2.0])
    assert value.per_token.tolist() == pytest.approx([3.0])
    assert value.derivative.tolist() == pytest.approx([-1.0])


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_derivative_agrees_with_autograd(name):
    torch.manual_seed(0)
    loss = find_loss(name)
    logprobs = (-2 * torch.rand(50, dtype=torch.float64)).requires_grad_()
    inputs = {
        "weights": torch.randn(50, dtype=torch.float64),
        "logprobs": -2 * torch.rand(50, dtype=torch.float64),
        "advantages": torch.randn(50, dtype=torch.float64),
    }
    value = loss.function(logprobs, inputs, settings(loss, None))
    value.per_token.sum().backward()
    torch.testing.assert_close(value.derivative.detach(), logprobs.grad)


def test_unknown_loss_is_refused_by_name():
    with pytest.raises(InputError, match=r"loss_fn: expected one of cross_entropy.*'gspo'"):
        find_loss("gspo")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"epsilon": 0.2}, "loss_fn_config.epsilon"),
        ({"clip_low_threshold": float("nan")}, "finite number"),
        ({"clip_low_threshold": "0.8"}, "finite number"),
    ],
)
def test_unusable_settings_are_refused(config, message):
    with pytest.raises(InputError, match=message):
        settings(LOSSES["ppo"], config)
