"""Top-K divergence and its support, by hand."""

import math

import pytest
import torch

from losses.errors import LossInputError
from losses.topk_divergence import gather_logprobs, topk_divergence, with_sampled_token
from tests.losses.builders import logs, tensor


def test_divergence_by_hand():
    """Sampler (0.5, 0.25 | 0.25), current (0.25, 0.25 | 0.5).

    TV: (0.25 + 0 + 0.25) / 2. KL(sampler || current): 0.5 ln 2 + 0 + 0.25 ln 0.5.
    """
    kl, tv = topk_divergence(logs(0.25, 0.25).unsqueeze(0), logs(0.5, 0.25).unsqueeze(0))

    assert kl.tolist() == pytest.approx([0.5 * math.log(2) + 0.25 * math.log(0.5)], rel=1e-14)
    assert tv.tolist() == pytest.approx([0.25], rel=1e-14)


def test_one_token_is_the_binary_form():
    """K = 1: TV is |p - q| of the token."""
    _, tv = topk_divergence(logs(0.75).unsqueeze(0), logs(0.5).unsqueeze(0))

    assert tv.tolist() == pytest.approx([0.25], rel=1e-14)


def test_full_support_leaves_a_floored_rest():
    """Nothing outside the K tokens: 1e-12 on both sides, so no log of 0."""
    kl, tv = topk_divergence(logs(0.75, 0.25).unsqueeze(0), logs(0.5, 0.5).unsqueeze(0))

    assert bool(torch.isfinite(kl).all())
    assert tv.tolist() == pytest.approx([0.25], rel=1e-11)


def test_divergence_carries_no_gradient():
    """It decides a mask, it is not a term."""
    current = logs(0.25, 0.25).unsqueeze(0).requires_grad_()

    assert not any(d.requires_grad for d in topk_divergence(current, logs(0.5, 0.25).unsqueeze(0)))


def test_divergence_needs_the_same_tokens_on_both_sides():
    """Shapes are named."""
    with pytest.raises(LossInputError, match="sampling_logprobs_TK: shape"):
        topk_divergence(logs(0.5).unsqueeze(0), logs(0.5, 0.25).unsqueeze(0))


def test_logits_are_normalised_before_they_are_picked():
    """Logits ln 1, ln 2, ln 5: probability of id 2 is 5/8."""
    logits = torch.log(tensor(1.0, 2.0, 5.0)).unsqueeze(0)

    picked = gather_logprobs(logits, torch.tensor([[2, 0]]))

    assert torch.exp(picked)[0].tolist() == pytest.approx([5 / 8, 1 / 8], rel=1e-14)


def test_sampled_token_replaces_the_last_slot_where_it_is_absent():
    """Row 0 lacks 9; row 1 has 4 already. The inputs stay."""
    ids, values = torch.tensor([[1, 2], [4, 5]]), torch.stack([logs(0.5, 0.3), logs(0.6, 0.2)])
    before = ids.clone(), values.clone()

    new_ids, new_values = with_sampled_token(
        ids, values, sampled_T=torch.tensor([9, 4]), sampled_logprobs_T=logs(0.01, 0.6)
    )

    assert new_ids.tolist() == [[1, 9], [4, 5]]
    assert torch.exp(new_values).tolist() == [
        pytest.approx([0.5, 0.01]),
        pytest.approx([0.6, 0.2]),
    ]
    assert torch.equal(ids, before[0])
    assert torch.equal(values, before[1])


@pytest.mark.parametrize(
    ("ids", "values", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 1), "logprobs_TK: shape"),
        (torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0), "token_ids_TK: shape"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2), "token_ids_TK: shape"),
    ],
)
def test_support_must_be_a_table_with_a_slot(ids, values, message):
    """Shapes are named."""
    with pytest.raises(LossInputError, match=message):
        with_sampled_token(ids, values, sampled_T=torch.zeros(2), sampled_logprobs_T=torch.zeros(2))
