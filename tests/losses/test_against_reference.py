"""Random sweeps: torch and the float64 reference agree in value, gradient and decisions."""

import numpy as np
import pytest
import torch

from losses.inputs import LossInputs
from losses.parity import reference_terms
from losses.reference import policy as reference_policy
from losses.reference import sdpo as reference_sdpo
from losses.reference.arrays import central_difference
from losses.registry import make_loss
from losses.sdpo_logit import SUPPORTS, SdpoLogit
from losses.sdpo_token_level import SdpoTokenLevel
from losses.topk_divergence import gather_logprobs, topk_divergence
from tests.losses.builders import POLICY_CONFIGS, random_batch

SEEDS = range(25)


def torch_inputs(batch, dtype=torch.float64):
    return LossInputs(
        sampling_logprobs_T=torch.tensor(batch["sampling"], dtype=dtype),
        advantages_T=torch.tensor(batch["advantages"], dtype=dtype),
        loss_mask_T=torch.tensor(batch["mask"]),
        anchor_logprobs_T=torch.tensor(batch["anchor"], dtype=dtype),
    )


def torch_outcome(config, batch, dtype=torch.float64):
    target = torch.tensor(batch["current"], dtype=dtype, requires_grad=True)
    output = make_loss(config)(target, torch_inputs(batch, dtype))
    output.loss.backward()
    return output, target.grad.numpy()


def reference_outcome(config, batch):
    return reference_terms(
        config,
        current=batch["current"],
        sampling=batch["sampling"],
        advantages=batch["advantages"],
        mask=batch["mask"],
        anchor=batch["anchor"],
    )


@pytest.mark.parametrize("name", POLICY_CONFIGS)
def test_policy_loss_equals_the_reference_in_float64(name):
    """Terms and gradients to 1e-12 elementwise, decisions exactly, on 25 random batches."""
    dropped = 0
    for seed in SEEDS:
        batch = random_batch(seed)
        output, gradient = torch_outcome(POLICY_CONFIGS[name], batch)
        terms = reference_outcome(POLICY_CONFIGS[name], batch)

        np.testing.assert_allclose(
            output.per_token_T.detach().numpy(), terms.term, rtol=1e-12, atol=1e-300
        )
        np.testing.assert_allclose(gradient, terms.slope, rtol=1e-12, atol=1e-300)
        assert output.keep_T.tolist() == terms.keep.tolist()
        assert float(output.loss.detach()) == pytest.approx(float(terms.term.sum()), rel=1e-11)
        dropped += int((~terms.keep & batch["mask"]).sum())
    keeps_all = name in ("importance_sampling", "cispo", "dppo_none")
    assert (dropped == 0) == keeps_all


@pytest.mark.parametrize("name", POLICY_CONFIGS)
def test_policy_loss_in_float32_decides_as_the_reference(name):
    """Gradients to 1e-5 and not one decision flipped."""
    for seed in SEEDS:
        batch = random_batch(seed)
        output, gradient = torch_outcome(POLICY_CONFIGS[name], batch, torch.float32)
        terms = reference_outcome(POLICY_CONFIGS[name], batch)

        scale = np.abs(terms.slope).max()
        np.testing.assert_allclose(gradient, terms.slope, rtol=1e-5, atol=1e-7 * scale)
        assert output.keep_T.tolist() == terms.keep.tolist()


@pytest.mark.parametrize("name", POLICY_CONFIGS)
def test_gradient_is_that_of_the_detached_objective(name):
    """gradcheck where the loss is differentiable as written; elsewhere the slope is a constant.

    The clipped surrogate and importance sampling differentiate through the ratio; CISPO and DPPO
    hold it constant, so their loss is linear: value difference equals slope times step.
    """
    batch = random_batch(3, tokens=12)
    loss, given = make_loss(POLICY_CONFIGS[name]), torch_inputs(batch)
    target = torch.tensor(batch["current"], dtype=torch.float64, requires_grad=True)
    if name.startswith(("importance", "grpo")):
        assert torch.autograd.gradcheck(lambda x: loss(x, given).loss, (target,), eps=1e-7)
        return
    output, gradient = torch_outcome(POLICY_CONFIGS[name], batch)
    terms = output.per_token_T.detach().numpy()
    np.testing.assert_allclose(terms, gradient * batch["current"], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("seed", range(10))
def test_reference_slope_of_the_clip_equals_central_differences(seed):
    """The reference's own slopes are checked numerically, away from its kinks."""
    batch = random_batch(seed, tokens=30)

    def value(current):
        return float(
            reference_policy.clipped_surrogate(
                current, batch["sampling"], batch["advantages"], batch["mask"],
                low=0.8, high=1.2, dual_clip=3.0, log_ratio_limit=20.0,
            ).term.sum()
        )  # fmt: skip

    slope = reference_policy.clipped_surrogate(
        batch["current"], batch["sampling"], batch["advantages"], batch["mask"],
        low=0.8, high=1.2, dual_clip=3.0, log_ratio_limit=20.0,
    ).slope  # fmt: skip
    numeric = central_difference(value, batch["current"])

    np.testing.assert_allclose(slope, numeric, rtol=1e-5, atol=1e-6)


def logit_case(seed, *, k, vocabulary=12):
    rng = np.random.default_rng(seed)
    student = torch.log_softmax(torch.tensor(rng.normal(0, 2, (8, vocabulary))), dim=-1)
    teacher = torch.log_softmax(torch.tensor(rng.normal(0, 2, (8, vocabulary))), dim=-1)
    ids = student.topk(k, dim=-1).indices
    mask = rng.random(8) < 0.75
    weights = rng.uniform(0.5, 2.0, 8)
    picked = torch.gather(student, -1, ids), torch.gather(teacher, -1, ids)
    return (*(p.numpy() for p in picked), mask, weights)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_logit_level_equals_the_reference(support, alpha):
    """Divergences and their slopes in the K inputs, ten random cases each."""
    for seed in range(10):
        student, teacher, mask, weights = logit_case(seed, k=12 if support == "full" else 5)
        target = torch.tensor(student, requires_grad=True)
        given = LossInputs(
            sampling_logprobs_T=torch.zeros(8, dtype=torch.float64),
            advantages_T=torch.zeros(8, dtype=torch.float64),
            loss_mask_T=torch.tensor(mask),
            weights_T=torch.tensor(weights),
            teacher_logprobs_TK=torch.tensor(teacher),
        )
        output = SdpoLogit(alpha=alpha, support=support)(target, given)
        output.loss.backward()
        terms, slopes = reference_sdpo.logit_level(
            student, teacher, mask, alpha=alpha, support=support, weights=weights
        )

        np.testing.assert_allclose(
            output.per_token_T.detach().numpy(), terms, rtol=1e-9, atol=1e-13
        )
        np.testing.assert_allclose(target.grad.numpy(), slopes, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_reference_slope_of_logit_level_equals_central_differences(support, alpha):
    """The pulled-back slopes are checked numerically."""
    student, teacher, mask, weights = logit_case(7, k=12 if support == "full" else 4)

    def value(point):
        terms, _ = reference_sdpo.logit_level(
            point, teacher, mask, alpha=alpha, support=support, weights=weights
        )
        return float(terms.sum())

    _, slopes = reference_sdpo.logit_level(
        student, teacher, mask, alpha=alpha, support=support, weights=weights
    )

    np.testing.assert_allclose(slopes, central_difference(value, student), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("support", SUPPORTS)
def test_logit_level_passes_gradcheck(support, alpha):
    """torch's own numerical check, with a position under the mask."""
    student, teacher, _, _ = logit_case(5, k=12 if support == "full" else 4)
    given = LossInputs(
        sampling_logprobs_T=torch.zeros(8, dtype=torch.float64),
        advantages_T=torch.zeros(8, dtype=torch.float64),
        loss_mask_T=torch.tensor([True] * 7 + [False]),
        teacher_logprobs_TK=torch.tensor(teacher),
    )
    loss = SdpoLogit(alpha=alpha, support=support)

    assert torch.autograd.gradcheck(
        lambda x: loss(x, given).loss, (torch.tensor(student, requires_grad=True),)
    )


@pytest.mark.parametrize("is_clip", [None, 1.1, 2.0])
def test_token_level_equals_the_reference(is_clip):
    """Terms and slopes of token-level self-distillation on random batches."""
    for seed in SEEDS:
        batch = random_batch(seed)
        teacher = batch["anchor"] - 0.3
        target = torch.tensor(batch["current"], requires_grad=True)
        given = LossInputs(
            sampling_logprobs_T=torch.tensor(batch["sampling"]),
            advantages_T=torch.zeros(60, dtype=torch.float64),
            loss_mask_T=torch.tensor(batch["mask"]),
            teacher_logprobs_T=torch.tensor(teacher),
        )
        output = SdpoTokenLevel(is_clip=is_clip)(target, given)
        output.loss.backward()
        weights = reference_sdpo.importance_weight(
            batch["current"], batch["sampling"], is_clip=is_clip
        )
        terms = reference_sdpo.token_level(
            batch["current"], teacher, batch["mask"], weights=weights
        )

        np.testing.assert_allclose(
            output.per_token_T.detach().numpy(), terms.term, rtol=1e-12, atol=1e-300
        )
        np.testing.assert_allclose(target.grad.numpy(), terms.slope, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("k", [1, 3, 9, 10])
def test_topk_divergence_equals_the_reference(k):
    """KL and TV over the buckets, also when K is the vocabulary and nothing is left."""
    rng = np.random.default_rng(k)
    logits, other = rng.normal(0, 2, (2, 6, 10))
    ids = torch.tensor(other).topk(k, dim=-1).indices
    sampling = gather_logprobs(torch.tensor(other), ids)

    kl, tv = topk_divergence(gather_logprobs(torch.tensor(logits), ids), sampling)
    expected_kl, expected_tv = reference_policy.topk_divergences(logits, ids, sampling)

    np.testing.assert_allclose(kl.numpy(), expected_kl, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(tv.numpy(), expected_tv, rtol=1e-9, atol=1e-11)
