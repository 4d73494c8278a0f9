"""Aggregations against numbers worked out by hand."""

import pytest
import torch

from losses.aggregation import AGGREGATIONS, aggregate, denominator_value, local_denominator
from losses.errors import LossConfigError, LossInputError
from tests.losses.builders import tensor

TERMS = [tensor(1.0, 2.0, 100.0), tensor(3.0, float("nan"), float("nan"))]
MASKS = [torch.tensor([True, True, False]), torch.tensor([True, False, False])]


@pytest.mark.parametrize(
    ("mode", "denominator", "expected"),
    [
        ("sum", 1.0, 6.0),
        ("token-mean", 3.0, 2.0),
        ("seq-mean-token-sum", 2.0, 3.0),
        ("seq-mean-token-mean", 2.0, (3.0 / (2 + 1e-8) + 3.0 / (1 + 1e-8)) / 2.0),
        ("seq-mean-token-sum-norm", 64.0, 6.0 / 64.0),
    ],
)
def test_aggregation_by_hand(mode, denominator, expected):
    """Terms 1 + 2 and 3; what stands off the mask, NaN included, is not looked at."""
    result = aggregate(TERMS, MASKS, mode=mode, denominator=denominator)

    assert float(result.loss) == pytest.approx(expected, rel=1e-15)
    assert result.loss_tokens == 3
    assert not result.empty


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sum", 1.0),
        ("token-mean", 3.0),
        ("seq-mean-token-sum", 2.0),
        ("seq-mean-token-mean", 2.0),
        ("seq-mean-token-sum-norm", 40.0),
    ],
)
def test_local_denominator_counts_this_batch(mode, expected):
    """Three tokens in two of four sequences; width 40."""
    masks = [*MASKS, torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)]

    assert local_denominator(mode, masks, width=40) == expected


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_empty_mask_is_zero_with_a_flag(mode):
    """No 0/0: loss 0, gradient 0, ``empty``."""
    terms = tensor(1.0, 2.0).requires_grad_()
    masks = [torch.zeros(2, dtype=torch.bool)]
    denominator = local_denominator(mode, masks, width=2)

    result = aggregate([terms], masks, mode=mode, denominator=denominator)
    result.loss.backward()

    assert float(result.loss.detach()) == 0.0
    assert result.empty
    assert terms.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_global_denominator_makes_the_split_irrelevant(mode):
    """Two halves with the batch's denominator add up to the whole."""
    whole = aggregate(TERMS, MASKS, mode=mode, denominator=7.0)
    halves = [
        aggregate([term], [mask], mode=mode, denominator=7.0)
        for term, mask in zip(TERMS, MASKS, strict=True)
    ]

    assert float(whole.loss) == pytest.approx(sum(float(half.loss) for half in halves), rel=1e-15)


def test_unknown_mode_names_the_allowed_ones():
    """The message lists them."""
    with pytest.raises(LossConfigError, match=r"mode: 'mean'; expected one of .*token-mean"):
        aggregate(TERMS, MASKS, mode="mean", denominator=1.0)


@pytest.mark.parametrize("denominator", [0.0, -2.0, float("nan"), float("inf")])
def test_denominator_must_be_finite_and_positive(denominator):
    """The value is in the message."""
    with pytest.raises(LossConfigError, match="denominator: "):
        aggregate(TERMS, MASKS, mode="token-mean", denominator=denominator)


def test_sum_does_not_divide():
    """A denominator beside ``sum`` would be ignored: refused."""
    with pytest.raises(LossConfigError, match='expected 1 for mode "sum"'):
        aggregate(TERMS, MASKS, mode="sum", denominator=2.0)


def test_mask_of_other_shape_is_refused():
    """A mask must not be broadcast over terms."""
    with pytest.raises(LossInputError, match="loss_mask_D"):
        aggregate([tensor(1.0, 2.0)], [torch.tensor([True])], mode="sum", denominator=1.0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"kind": "none"}, 1.0),
        ({"kind": "loss_tokens"}, 120.0),
        ({"kind": "sequences"}, 8.0),
        ({"kind": "constant", "value": 512}, 512.0),
    ],
)
def test_registered_denominator(config, expected):
    """The counts are the caller's."""
    assert denominator_value(config, loss_tokens=120, sequences=8) == expected


@pytest.mark.parametrize("kind", ["loss_tokens", "sequences"])
def test_registered_count_of_zero_divides_by_one(kind):
    """The sum is 0 then, and no 0/0 may come of it."""
    assert denominator_value({"kind": kind}, loss_tokens=0, sequences=0) == 1.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "denominator.kind: None"),
        ({"kind": "mean"}, "denominator.kind: 'mean'; expected one of"),
        ({"kind": "constant"}, "denominator.value: None"),
        ({"kind": "constant", "value": 0}, "denominator: 0"),
        ({"kind": "constant", "value": True}, "denominator.value: True"),
        ({"kind": "constant", "value": "5"}, "denominator.value: '5'"),
    ],
)
def test_registered_denominator_must_be_usable(config, message):
    """Field, value and expectation."""
    with pytest.raises(LossConfigError, match=message):
        denominator_value(config, loss_tokens=1, sequences=1)
