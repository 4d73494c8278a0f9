"""Policy losses against numbers worked out by hand."""

import dataclasses
import math

import pytest
import torch

from losses.dppo_rule import binary_kl
from losses.errors import LossInputError
from losses.parity import reference_terms
from losses.registry import make_loss
from tests.losses.builders import (
    CISPO,
    DPPO,
    GRPO,
    IMPORTANCE,
    POLICY_CONFIGS,
    inputs,
    logs,
    tensor,
)

NAN, INF = float("nan"), float("inf")


def run(config, target, given):
    target = target.clone().requires_grad_(True)
    output = make_loss(config)(target, given)
    (gradient,) = torch.autograd.grad(output.loss, target)
    detached = dataclasses.replace(
        output, loss=output.loss.detach(), per_token_T=output.per_token_T.detach()
    )
    return detached, gradient


def test_importance_sampling_by_hand():
    """Ratios 1.5 and 0.5 with A = 2 and -1: terms -3 and 0.5, which are also the gradient."""
    output, gradient = run(IMPORTANCE, logs(0.75, 0.25), inputs(logs(0.5, 0.5), tensor(2.0, -1.0)))

    assert output.per_token_T.tolist() == pytest.approx([-3.0, 0.5], rel=1e-14)
    assert gradient.tolist() == pytest.approx([-3.0, 0.5], rel=1e-14)
    assert float(output.loss) == pytest.approx(-2.5, rel=1e-14)
    assert output.keep_T.tolist() == [True, True]
    assert output.prob_ratio_T.tolist() == pytest.approx([1.5, 0.5], rel=1e-14)


def test_grpo_clip_by_hand():
    """-min(rA, clip(r, 0.8, 1.2)A) for r = 1.5, 0.5 with both signs.

    r=1.5: A=1 -> -1.2 held; A=-1 -> 1.5 kept. r=0.5: A=1 -> -0.5 kept; A=-1 -> 0.8 held.
    """
    output, gradient = run(
        GRPO,
        logs(0.75, 0.75, 0.25, 0.25),
        inputs(logs(0.5, 0.5, 0.5, 0.5), tensor(1.0, -1.0, 1.0, -1.0)),
    )

    assert output.per_token_T.tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8], rel=1e-14)
    assert gradient.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0], rel=1e-14)
    assert output.keep_T.tolist() == [False, True, True, False]


def test_grpo_clip_bounds_are_on_the_ratio_itself():
    """Bounds 0.5 and 3 let ratios 1.5 and 0.5 through on both sides."""
    output, gradient = run(
        GRPO | {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0},
        logs(0.75, 0.25),
        inputs(logs(0.5, 0.5), tensor(1.0, -1.0)),
    )

    assert output.keep_T.tolist() == [True, True]
    assert gradient.tolist() == pytest.approx([-1.5, 0.5], rel=1e-14)


def test_grpo_dual_clip_limits_negative_advantages_alone():
    """r = 5 > 3: A = -2 is charged 3 * 2 without gradient; A = 2 is held at 1.2 as ever."""
    output, gradient = run(
        GRPO | {"dual_clip": 3.0},
        logs(0.5, 0.5),
        inputs(logs(0.1, 0.1), tensor(-2.0, 2.0)),
    )

    assert output.per_token_T.tolist() == pytest.approx([6.0, -2.4], rel=1e-14)
    assert gradient.tolist() == [0.0, 0.0]
    assert output.keep_T.tolist() == [False, False]


def test_grpo_without_dual_clip_follows_large_ratios():
    """r = 5 with A = -2: term and gradient 10."""
    output, gradient = run(GRPO, logs(0.5), inputs(logs(0.1), tensor(-2.0)))

    assert float(output.loss) == pytest.approx(10.0, rel=1e-14)
    assert gradient.tolist() == pytest.approx([10.0], rel=1e-14)


def test_grpo_log_ratio_limit_stops_the_gradient():
    """25 nats against a limit of 20: e^20 is charged and nothing follows."""
    config = GRPO | {"log_ratio_limit_nats": 20.0}

    output, gradient = run(config, tensor(-5.0), inputs(tensor(-30.0), tensor(-1.0)))

    assert float(output.loss) == pytest.approx(math.exp(20.0), rel=1e-14)
    assert gradient.tolist() == [0.0]
    assert output.keep_T.tolist() == [False]


def test_grpo_recompute_anchor_moves_the_ratio():
    """Against the anchor 0.6 the ratio of 0.75 is 1.25, against the sampler 0.75 it is 1."""
    given = inputs(logs(0.75), tensor(1.0), anchor_logprobs_T=logs(0.6))

    plain, _ = run(GRPO, logs(0.75), given)
    moved, _ = run(GRPO | {"anchor": "recompute"}, logs(0.75), given)

    assert float(plain.loss) == pytest.approx(-1.0, rel=1e-14)
    assert float(moved.loss) == pytest.approx(-1.2, rel=1e-14)


def test_cispo_by_hand():
    """Ratio 5 is weighted with 2, ratio 0.2 with 0.5; gradient -A * weight, no token is lost."""
    output, gradient = run(CISPO, logs(0.5, 0.1), inputs(logs(0.1, 0.5), tensor(1.0, -1.0)))

    assert gradient.tolist() == pytest.approx([-2.0, 0.5], rel=1e-14)
    assert output.per_token_T.tolist() == pytest.approx(
        [-2.0 * math.log(0.5), 0.5 * math.log(0.1)], rel=1e-14
    )
    assert output.keep_T.tolist() == [True, True]


def test_dppo_by_hand():
    """0.5 -> 0.6 kept with ratio 1.2: term -1.2 * ln 0.6; 0.5 -> 0.75 dropped: exactly 0."""
    output, gradient = run(DPPO, logs(0.6, 0.75), inputs(logs(0.5, 0.5), tensor(1.0, 1.0)))

    assert float(output.per_token_T[0]) == pytest.approx(-1.2 * math.log(0.6), rel=1e-14)
    assert float(output.per_token_T[1]) == 0.0
    assert gradient.tolist() == pytest.approx([-1.2, 0.0], rel=1e-14)
    assert output.keep_T.tolist() == [True, False]


def test_dppo_recompute_moves_the_mask_alone():
    """Anchor 0.7: 0.75 is within 0.15 of it; the ratio stays 0.75 / 0.5."""
    given = inputs(logs(0.5), tensor(1.0), anchor_logprobs_T=logs(0.7))

    output, gradient = run(DPPO | {"anchor": "recompute"}, logs(0.75), given)

    assert output.keep_T.tolist() == [True]
    assert gradient.tolist() == pytest.approx([-1.5], rel=1e-14)


@pytest.mark.parametrize("above", [0.0, 1.2e-7, 1e-4])
def test_dppo_kl_takes_a_probability_above_one_for_one(above):
    """0.5 -> 1 is far and dropped, 1 -> 0.5 too, 1 -> 1 is no move; the reference says the same.

    Services return logarithms of probabilities near 1 that round to a little above 0.
    """
    config = DPPO | {"divergence": "binary_kl", "delta_low": 0.05, "delta_high": 0.05}
    current = torch.tensor([above, math.log(0.5), above], dtype=torch.float64)
    sampling = torch.tensor([math.log(0.5), above, 0.0], dtype=torch.float64)
    advantages = tensor(1.0, -1.0, 1.0)

    output, _ = run(config, current, inputs(sampling, advantages))
    expected = reference_terms(
        config,
        current=current.numpy(),
        sampling=sampling.numpy(),
        advantages=advantages.numpy(),
        mask=[1.0, 1.0, 1.0],
    )

    assert output.keep_T.tolist() == [False, False, True]
    assert expected.keep.tolist() == [False, False, True]


def test_binary_kl_of_a_probability_above_one_is_that_of_one():
    """0.5 ln 0.5 + 0.5 ln(0.5 / 1e-8), both complements with 1e-8 added."""
    found = binary_kl(tensor(1.2e-7, 0.0), logs(0.5, 0.5))

    assert found.tolist() == pytest.approx([8.5172, 8.5172], rel=1e-5)


def test_dppo_without_cap_is_limited_at_20_nats():
    """25 nats: the ratio is e^20."""
    config = DPPO | {"ratio_cap": None}

    _, gradient = run(config, tensor(-35.0), inputs(tensor(-60.0), tensor(1.0)))

    assert gradient.tolist() == pytest.approx([-math.exp(20.0)], rel=1e-14)


@pytest.mark.parametrize("divergence", ["topk_tv", "topk_kl"])
def test_dppo_topk_uses_the_given_divergence(divergence):
    """0.2 exceeds 0.15 upwards: dropped. 0.15 itself does not, either way. 0.2 that comes back is
    kept; downwards with A < 0 it is dropped."""
    given = inputs(
        logs(0.5, 0.5, 0.5, 0.5, 0.5),
        tensor(1.0, 1.0, 1.0, -1.0, -1.0),
        divergence_T=tensor(0.2, 0.15, 0.2, 0.2, 0.15),
    )

    output, _ = run(
        DPPO | {"divergence": divergence, "top_k": 4}, logs(0.51, 0.51, 0.49, 0.49, 0.49), given
    )

    assert output.keep_T.tolist() == [False, True, True, False, True]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ratio_exactly_at_its_bound_is_kept(advantage):
    """Ratio 2 against 1 + 1 upwards, ratio 0.5 against 1 - 0.5 downwards: strict."""
    config = DPPO | {"divergence": "ratio", "delta_low": 0.5, "delta_high": 1.0}
    target = logs(0.5) if advantage < 0 else tensor(0.0)
    sampling = tensor(0.0) if advantage < 0 else logs(0.5)

    output, _ = run(config, target, inputs(sampling, tensor(advantage)))

    assert output.keep_T.tolist() == [True]


def test_dppo_topk_without_divergence_is_refused():
    """A top-K form cannot fall back to the binary one."""
    with pytest.raises(LossInputError, match="divergence_T: None"):
        run(DPPO | {"divergence": "topk_kl", "top_k": 4}, logs(0.5), inputs(logs(0.5), tensor(1.0)))


def test_dppo_refuses_rollout_weights():
    """Its own ratio already corrects the rollout."""
    given = inputs(logs(0.5), tensor(1.0), weights_T=tensor(2.0))

    with pytest.raises(LossInputError, match="weights_T: given"):
        run(DPPO, logs(0.5), given)


@pytest.mark.parametrize("name", ["importance_sampling", "grpo_clip", "cispo"])
def test_rollout_weights_multiply_terms_and_gradients(name):
    """A weight of 2 doubles what a weight of 1 gives."""
    config = POLICY_CONFIGS[name]
    one, grad_one = run(config, logs(0.55), inputs(logs(0.5), tensor(1.0), weights_T=tensor(1.0)))
    two, grad_two = run(config, logs(0.55), inputs(logs(0.5), tensor(1.0), weights_T=tensor(2.0)))

    assert float(two.loss) == 2.0 * float(one.loss)
    assert grad_two.tolist() == [2.0 * grad_one.item()]


@pytest.mark.parametrize("name", POLICY_CONFIGS)
@pytest.mark.parametrize("garbage", [NAN, -INF, INF])
def test_garbage_under_the_mask_is_inert(name, garbage):
    """NaN and infinities off the mask change nothing, bit by bit, and get gradient 0."""
    clean = inputs(
        logs(0.5, 0.5), tensor(1.0, 1.0), [True, False], anchor_logprobs_T=logs(0.5, 0.5)
    )
    dirty = inputs(
        torch.cat([logs(0.5), tensor(garbage)]),
        tensor(1.0, garbage),
        [True, False],
        anchor_logprobs_T=torch.cat([logs(0.5), tensor(garbage)]),
    )

    expected, expected_gradient = run(POLICY_CONFIGS[name], logs(0.6, 0.6), clean)
    output, gradient = run(POLICY_CONFIGS[name], torch.cat([logs(0.6), tensor(garbage)]), dirty)

    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(gradient, expected_gradient)
    assert output.per_token_T[1] == 0.0
    assert output.keep_T.tolist()[1] is False
    assert output.prob_ratio_T[1] == 1.0


@pytest.mark.parametrize("name", POLICY_CONFIGS)
@pytest.mark.parametrize("field", ["target", "sampling", "advantages", "anchor"])
def test_non_finite_on_a_trained_token_is_refused(name, field):
    """The message names the field, the token and the value."""
    values = {
        "target": logs(0.5, 0.5),
        "sampling": logs(0.5, 0.5),
        "advantages": tensor(1.0, 1.0),
        "anchor": logs(0.5, 0.5),
    }
    values[field][1] = -INF
    given = inputs(values["sampling"], values["advantages"], anchor_logprobs_T=values["anchor"])

    with pytest.raises(LossInputError, match=rf"{field}.*: -inf on trained token 1 \(1 such"):
        run(POLICY_CONFIGS[name], values["target"], given)


@pytest.mark.parametrize("name", POLICY_CONFIGS)
def test_fully_masked_sequence_gives_zero_with_a_gradient(name):
    """The loss is 0, says that it is empty, and the gradient is a tensor of zeros."""
    given = inputs(
        logs(0.5, 0.5), tensor(1.0, -1.0), [False, False], anchor_logprobs_T=logs(0.5, 0.5)
    )

    output, gradient = run(POLICY_CONFIGS[name], logs(0.9, 0.1), given)

    assert float(output.loss) == 0.0
    assert output.loss_tokens == 0
    assert gradient.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", POLICY_CONFIGS)
def test_zero_advantage_gives_exactly_zero_even_where_the_ratio_overflows(name):
    """900 nats overflow float64; 0 times that is 0 here."""
    given = inputs(tensor(-900.0, -1.0), tensor(0.0, 0.0), anchor_logprobs_T=tensor(-900.0, -1.0))

    output, gradient = run(POLICY_CONFIGS[name], tensor(0.0, -0.5), given)

    assert float(output.loss) == 0.0
    assert gradient.abs().tolist() == [0.0, 0.0]


def test_clipped_token_has_zero_gradient_even_where_the_ratio_overflows():
    """900 nats upwards with A > 0: held at 1.2, gradient 0 and not NaN."""
    output, gradient = run(GRPO, tensor(0.0), inputs(tensor(-900.0), tensor(1.0)))

    assert float(output.loss) == pytest.approx(-1.2, rel=1e-14)
    assert gradient.tolist() == [0.0]


@pytest.mark.parametrize("name", POLICY_CONFIGS)
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_arithmetic_is_in_the_targets_dtype_and_never_in_half(name, dtype, expected):
    """Half precision is widened: it would flip decisions."""
    given = inputs(logs(0.5), tensor(1.0), anchor_logprobs_T=logs(0.5))

    output, gradient = run(POLICY_CONFIGS[name], logs(0.6).to(dtype), given)

    assert output.loss.dtype == expected
    assert output.per_token_T.dtype == expected
    assert gradient.dtype == dtype


@pytest.mark.parametrize("name", POLICY_CONFIGS)
def test_inputs_are_not_modified(name):
    """The tensors a caller passes are the same afterwards."""
    target = logs(0.6, 0.2)
    given = inputs(
        logs(0.5, 0.5), tensor(1.0, -1.0), [True, False], anchor_logprobs_T=logs(0.5, 0.5)
    )
    before = [value.clone() for value in (target, given.sampling_logprobs_T, given.advantages_T)]

    run(POLICY_CONFIGS[name], target, given)

    after = (target, given.sampling_logprobs_T, given.advantages_T)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"loss_mask_T": torch.tensor([1.0, 1.0])}, "loss_mask_T: dtype torch.float32"),
        ({"loss_mask_T": torch.tensor([True])}, r"loss_mask_T: shape \(1,\); expected \(2,\)"),
        ({"advantages_T": tensor(1.0)}, r"advantages_T: shape \(1,\); expected \(2,\)"),
        ({"sampling_logprobs_T": tensor(-1.0)}, r"sampling_logprobs_T: shape \(1,\)"),
        ({"anchor_logprobs_T": tensor(-1.0)}, r"anchor_logprobs_T: shape \(1,\)"),
        ({"weights_T": tensor(1.0)}, r"weights_T: shape \(1,\)"),
    ],
)
def test_misfitting_field_is_refused_by_name(over, message):
    """Field, what it is and what was expected are in the message."""
    given = dataclasses.replace(inputs(logs(0.5, 0.5), tensor(1.0, 1.0)), **over)

    with pytest.raises(LossInputError, match=message):
        run(IMPORTANCE, logs(0.5, 0.5), given)


def test_two_axes_are_refused():
    """A padded batch must not be broadcast against one mask."""
    with pytest.raises(LossInputError, match=r"target_logprobs: shape \(2, 2\); expected \[T\]"):
        run(
            IMPORTANCE,
            torch.zeros(2, 2, dtype=torch.float64),
            inputs(logs(0.5, 0.5), tensor(1.0, 1.0)),
        )


def test_recompute_without_anchor_is_refused():
    """The sampling log-probabilities never stand in for the anchor."""
    with pytest.raises(LossInputError, match="anchor_logprobs_T: None"):
        run(DPPO | {"anchor": "recompute"}, logs(0.5), inputs(logs(0.5), tensor(1.0)))
