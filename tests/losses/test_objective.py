"""One minibatch: joining, splitting, empty masks and the bridge to the service's SDK."""

import time

import numpy as np
import pytest
import torch

from losses.diagnostics import DiagnosticSettings, minibatch_diagnostics
from losses.dppo_rule import DppoRule
from losses.errors import LossConfigError, LossInputError
from losses.inputs import LossInputs
from losses.objective import CustomLoss, batch_loss, cross_entropy_weights
from losses.registry import make_loss
from tests.losses.builders import DPPO, GRPO, IMPORTANCE, POLICY_CONFIGS, inputs, logs, tensor


def minibatch(seed=0, *, lengths=(5, 1, 9, 3), dtype=torch.float32):
    rng = np.random.default_rng(seed)
    targets, given = [], []
    for length in lengths:
        sampling = -rng.exponential(1.0, length)
        current = np.minimum(sampling + rng.normal(0, 0.4, length), 0.0)
        targets.append(torch.tensor(current, dtype=dtype, requires_grad=True))
        given.append(
            LossInputs(
                sampling_logprobs_T=torch.tensor(sampling, dtype=dtype),
                advantages_T=torch.tensor(rng.normal(0, 1, length), dtype=dtype),
                loss_mask_T=torch.tensor(rng.random(length) < 0.8),
                anchor_logprobs_T=torch.tensor(sampling + 0.01, dtype=dtype),
            )
        )
    return targets, given


def gradients(targets):
    return [target.grad.clone() for target in targets]


def backward(config, targets, given, denominator=1.0):
    result = batch_loss(make_loss(config), targets, given, denominator=denominator)
    result.loss.backward()
    return result


@pytest.mark.parametrize("name", POLICY_CONFIGS)
def test_joined_datums_equal_datums_one_by_one(name):
    """The loss is the sum of the single losses and every gradient is bit for bit the same."""
    targets, given = minibatch()
    alone, _ = minibatch()

    together = backward(POLICY_CONFIGS[name], targets, given)
    total = 0.0
    for target, datum in zip(alone, given, strict=True):
        total += float(backward(POLICY_CONFIGS[name], [target], [datum]).loss.detach())

    assert float(together.loss.detach()) == pytest.approx(total, rel=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(gradients(targets), gradients(alone), strict=True))


@pytest.mark.parametrize("name", POLICY_CONFIGS)
def test_splitting_a_batch_does_not_change_the_gradient(name):
    """Sum of minibatches equals the whole when both are divided by the batch's denominator."""
    whole, given = minibatch(lengths=(1, 99, 3, 17))
    split, _ = minibatch(lengths=(1, 99, 3, 17))

    total = backward(POLICY_CONFIGS[name], whole, given, denominator=96.0)
    first = backward(POLICY_CONFIGS[name], split[:1], given[:1], denominator=96.0)
    rest = backward(POLICY_CONFIGS[name], split[1:], given[1:], denominator=96.0)

    parts = float(first.loss.detach()) + float(rest.loss.detach())
    assert float(total.loss.detach()) == pytest.approx(parts, rel=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(gradients(whole), gradients(split), strict=True))


def test_split_of_lengths_one_and_three_by_hand():
    """Lengths 1 and 3 with advantages +1 and -1, unmoved policy: sum (-1 + 3) / 4 = 0.5.

    A mean of the two sequences' means would be 0 instead.
    """
    targets = [logs(0.5).requires_grad_(), logs(0.5, 0.5, 0.5).requires_grad_()]
    given = [
        inputs(logs(0.5), tensor(1.0)),
        inputs(logs(0.5, 0.5, 0.5), tensor(-1.0, -1.0, -1.0)),
    ]

    result = backward(IMPORTANCE, targets, given, denominator=4.0)

    assert float(result.loss.detach()) == pytest.approx(0.5, rel=1e-14)
    assert result.loss_tokens == 4


def test_denominator_divides_loss_and_gradient_once():
    """Denominator 8 gives an eighth of denominator 1; outputs stay undivided."""
    ones, given = minibatch()
    eighths, _ = minibatch()

    plain = backward(GRPO, ones, given)
    divided = backward(GRPO, eighths, given, denominator=8.0)

    assert float(divided.loss.detach()) == pytest.approx(float(plain.loss.detach()) / 8.0)
    assert all(
        torch.allclose(a / 8.0, b) for a, b in zip(gradients(ones), gradients(eighths), strict=True)
    )
    assert torch.equal(divided.outputs_D[0].per_token_T, plain.outputs_D[0].per_token_T)


@pytest.mark.parametrize("name", POLICY_CONFIGS)
def test_fully_masked_datum_gets_a_zero_gradient(name):
    """The service refuses a datum without a gradient: it gets zeros, the others theirs."""
    targets, given = minibatch()
    given[2] = LossInputs(
        sampling_logprobs_T=given[2].sampling_logprobs_T,
        advantages_T=given[2].advantages_T,
        loss_mask_T=torch.zeros(9, dtype=torch.bool),
        anchor_logprobs_T=given[2].anchor_logprobs_T,
    )

    result = backward(POLICY_CONFIGS[name], targets, given)

    assert targets[2].grad.tolist() == [0.0] * 9
    assert result.outputs_D[2].loss_tokens == 0
    assert not result.empty
    assert any(grad.abs().sum() > 0 for grad in gradients(targets))


@pytest.mark.parametrize("name", POLICY_CONFIGS)
def test_empty_minibatch_is_zero_and_says_so(name):
    """Nothing trained anywhere: loss 0, gradient 0, ``empty``."""
    targets, given = minibatch(lengths=(3, 2))
    masked = [
        LossInputs(
            sampling_logprobs_T=datum.sampling_logprobs_T,
            advantages_T=datum.advantages_T,
            loss_mask_T=torch.zeros_like(datum.loss_mask_T),
            anchor_logprobs_T=datum.anchor_logprobs_T,
        )
        for datum in given
    ]

    result = backward(POLICY_CONFIGS[name], targets, masked)

    assert result.empty
    assert result.loss_tokens == 0
    assert float(result.loss.detach()) == 0.0
    assert [grad.tolist() for grad in gradients(targets)] == [[0.0] * 3, [0.0] * 2]


def test_datum_without_targets_is_allowed():
    """A datum of zero targets has an empty gradient."""
    targets = [torch.zeros(0, requires_grad=True), logs(0.5).requires_grad_()]
    given = [inputs(tensor(), tensor(), []), inputs(logs(0.5), tensor(1.0))]

    backward(IMPORTANCE, targets, given)

    assert targets[0].grad.shape == (0,)


def test_float32_log_probabilities_are_decided_in_float64():
    """ln 0.5 rounded to float32 is 0.49999999904767284 in float64: beyond 0.5 from 1, so dropped.

    In float32 it would be exactly 0.5 and kept.
    """
    target = torch.tensor([-0.6931471824645996], dtype=torch.float32, requires_grad=True)
    given = [inputs(torch.zeros(1), torch.tensor([-1.0]))]
    loss = make_loss(DPPO | {"delta_low": 0.5, "delta_high": 0.5})

    wide = batch_loss(loss, [target], given, denominator=1.0)
    narrow = batch_loss(loss, [target], given, denominator=1.0, dtype=torch.float32)

    assert wide.outputs_D[0].keep_T.tolist() == [False]
    assert narrow.outputs_D[0].keep_T.tolist() == [True]


def test_bad_datum_is_named():
    """Datum, field, position and value are in the message."""
    targets, given = minibatch()
    bad = given[3].sampling_logprobs_T.clone()
    bad[1] = float("nan")
    mask = torch.ones(3, dtype=torch.bool)
    given[3] = inputs(bad, given[3].advantages_T, mask, anchor_logprobs_T=bad)

    with pytest.raises(
        LossInputError, match="datum 3: sampling_logprobs_T: nan on trained token 1"
    ):
        batch_loss(make_loss(GRPO), targets, given, denominator=1.0)


def test_datum_of_other_length_is_named():
    """Joined end to end, a short field would shift every datum after it."""
    targets, given = minibatch()
    given[1] = inputs(tensor(-1.0, -1.0), tensor(1.0), [True], anchor_logprobs_T=tensor(-1.0))

    with pytest.raises(LossInputError, match="datum 1: sampling_logprobs_T: 2 tokens; expected 1"):
        batch_loss(make_loss(GRPO), targets, given, denominator=1.0)


def test_optional_field_for_some_datums_is_refused():
    """Weights for one datum of two cannot be joined."""
    targets = [logs(0.5).requires_grad_(), logs(0.5).requires_grad_()]
    given = [
        inputs(logs(0.5), tensor(1.0), weights_T=tensor(1.0)),
        inputs(logs(0.5), tensor(1.0)),
    ]

    with pytest.raises(LossInputError, match="datum 1: weights_T: None"):
        batch_loss(make_loss(GRPO), targets, given, denominator=1.0)


def test_overflowing_loss_is_refused():
    """900 nats upwards with A < 0 and no bound above: infinite, so nothing is sent."""
    with pytest.raises(LossInputError, match="loss: inf; expected a finite sum"):
        batch_loss(
            make_loss(GRPO),
            [tensor(0.0).requires_grad_()],
            [inputs(tensor(-900.0), tensor(-1.0))],
            denominator=1.0,
        )


@pytest.mark.parametrize("denominator", [0.0, -1.0, float("nan"), float("inf")])
def test_denominator_must_divide(denominator):
    """The value is in the message."""
    with pytest.raises(LossConfigError, match="denominator"):
        batch_loss(
            make_loss(GRPO),
            [logs(0.5)],
            [inputs(logs(0.5), tensor(1.0))],
            denominator=denominator,
        )


def test_minibatch_without_datums_is_refused():
    """An empty list is a caller's error, unlike an empty mask."""
    with pytest.raises(LossInputError, match="inputs_D: 0 datums"):
        batch_loss(make_loss(GRPO), [], [], denominator=1.0)


def test_custom_loss_gives_cross_entropy_weights():
    """weights = -dL/dlogprob: A * r = 1.2 for the kept token, 0 for the dropped and masked ones."""
    target = logs(0.6, 0.75, 0.6).to(torch.float32).requires_grad_()
    given = [inputs(logs(0.5, 0.5, 0.5), tensor(1.0, 1.0, 1.0), [True, True, False])]
    bridge = CustomLoss(make_loss(DPPO), given, denominator=2.0)

    loss, metrics = bridge("data", [target])
    loss.backward()
    (weights,) = cross_entropy_weights([target])

    assert weights.tolist() == pytest.approx([0.6, 0.0, 0.0], rel=1e-6)
    assert weights.dtype == torch.float32
    assert metrics == {}
    assert bridge.calls[0].outputs_D[0].keep_T.tolist() == [True, False, False]


def test_datum_without_gradient_is_named():
    """Before ``backward`` there is nothing to send."""
    with pytest.raises(LossInputError, match="datum 0: no gradient"):
        cross_entropy_weights([logs(0.5).requires_grad_()])


def test_minibatch_of_64_by_256_costs_milliseconds():
    """Loss, gradient and diagnostics of 16,384 tokens: under 100 ms at worst, typically 10."""
    targets, given = minibatch(lengths=(256,) * 64)
    loss = make_loss(DPPO)
    settings = DiagnosticSettings(
        rule=DppoRule(divergence="binary_tv", anchor="sampling", delta_low=0.15, delta_high=0.15),
        ratio_cap=10.0,
        ppo_low_threshold=0.8,
        ppo_high_threshold=1.2,
    )
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        result = batch_loss(loss, targets, given, denominator=1.0)
        result.loss.backward()
        minibatch_diagnostics(targets, given, result.outputs_D, settings=settings)
        best = min(best, time.process_time() - start)

    assert best < 0.1
