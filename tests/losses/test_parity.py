"""The correctness preflight's measured errors."""

import math

import numpy as np
import pytest
import torch

from losses.errors import LossConfigError, LossInputError
from losses.parity import (
    CHECKS,
    FixedBatch,
    fixed_batch,
    parity_errors,
    path_errors,
    reference_result,
    stale,
    torch_result,
    worst_of,
)
from tests.losses.builders import DPPO, GRPO, IMPORTANCE


def batch(seed=0, lengths=(7, 1, 12)) -> FixedBatch:
    rng = np.random.default_rng(seed)
    sampling = [-rng.exponential(1.0, n).astype(np.float32) for n in lengths]
    return fixed_batch(
        description="test batch",
        target_logprobs=[torch.tensor(row) for row in sampling],
        sampling_logprobs=sampling,
        advantages=[np.where(rng.random(n) < 0.5, 1.0, -1.0) for n in lengths],
        loss_mask=[rng.random(n) < 0.8 for n in lengths],
    )


def test_errors_by_hand():
    """(1, 2, 2) against (1, 2, 3): 1, 3, 1/sqrt(14), 11/(3 sqrt(14))."""
    assert parity_errors([1.0, 2.0, 2.0], [1.0, 2.0, 3.0]) == {
        "max_abs_error": 1.0,
        "reference_max_abs": 3.0,
        "relative_l2_error": pytest.approx(1 / math.sqrt(14), rel=1e-15),
        "cosine_similarity": pytest.approx(11 / (3 * math.sqrt(14)), rel=1e-15),
    }


@pytest.mark.parametrize(
    ("actual", "reference", "expected"),
    [
        ([0.0], [0.0], (0.0, 0.0, None, None)),
        ([0.25], [0.0], (0.25, 0.0, None, None)),
        ([0.0], [2.0], (2.0, 2.0, 1.0, None)),
        ([], [], (None, None, None, None)),
        ([math.nan], [1.0], (None, None, None, None)),
        ([1.0], [math.inf], (None, None, None, None)),
        ([1e-200, 0.0], [1e-200, 0.0], (0.0, 1e-200, 0.0, 1.0)),
    ],
)
def test_errors_are_null_where_nothing_was_measured(actual, reference, expected):
    """Zero reference: no relative error. Zero vector: no cosine. Not finite or empty: nothing."""
    assert tuple(parity_errors(actual, reference).values()) == expected


def test_errors_of_different_lengths_are_refused():
    """A prefix is not a comparison."""
    with pytest.raises(LossInputError, match="actual: 1 numbers; expected 2"):
        parity_errors([1.0], [1.0, 2.0])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("config", [IMPORTANCE, GRPO, DPPO])
def test_torch_path_equals_the_reference(config, packed):
    """Stale float32 inputs: loss to 1e-12, gradient to float32 rounding, same order of targets."""
    inputs = stale(batch(), nats=0.5, seed=1)

    actual = torch_result(config, inputs, denominator=3.0, packed=packed)
    expected = reference_result(config, inputs, denominator=3.0)

    assert actual.loss == pytest.approx(expected.loss, rel=1e-12)
    np.testing.assert_allclose(actual.gradient_N, expected.gradient_N, rtol=1e-6, atol=1e-9)


def test_path_errors_cover_four_variants_and_four_checks():
    """Fresh and stale, packed and unpacked; within the strictest tolerances of the real specs."""
    fresh = batch()
    moved = stale(fresh, nats=0.5, seed=1)

    result = path_errors(baseline=GRPO, treatment=DPPO, fresh=fresh, stale=moved, denominator=1.0)

    assert set(result.variants) == {
        "fresh_packed",
        "fresh_unpacked",
        "stale_packed",
        "stale_unpacked",
    }
    assert tuple(result.errors) == CHECKS
    for check, summary in result.errors.items():
        bound = 1e-6 + 1e-5 * summary["reference_max_abs"]
        assert summary["max_abs_error"] <= bound, check
        assert summary["cosine_similarity"] >= 0.9999
    assert len(result.fixed_input_sha256) == 64


def test_path_errors_see_a_wrong_treatment():
    """The treatment's reference is given other advantages: all four gradients and losses move."""
    fresh = batch()
    moved = stale(fresh, nats=0.5, seed=1)
    flipped = [[-a for a in row] for row in fresh.advantages_D]
    wrong = FixedBatch(
        description="wrong",
        target_logprobs_D=moved.target_logprobs_D,
        sampling_logprobs_D=moved.sampling_logprobs_D,
        advantages_D=tuple(tuple(row) for row in flipped),
        loss_mask_D=moved.loss_mask_D,
    )

    result = path_errors(
        baseline=GRPO,
        treatment=DPPO,
        fresh=fresh,
        stale=moved,
        denominator=1.0,
        reference_stale=wrong,
    )

    assert result.errors["reference_gradient"]["cosine_similarity"] < 0.9
    assert result.errors["baseline_gradient"]["cosine_similarity"] > 0.9999


def test_worst_is_the_least_favourable_field_by_field():
    """Largest errors, smallest reference and cosine; null survives only if nobody has a number."""
    one = {
        "max_abs_error": 0.5, "reference_max_abs": 2.0,
        "relative_l2_error": 0.1, "cosine_similarity": 0.9,
    }  # fmt: skip
    zero = {
        "max_abs_error": 0.1, "reference_max_abs": 0.0,
        "relative_l2_error": None, "cosine_similarity": None,
    }  # fmt: skip

    assert worst_of([one, zero]) == {
        "max_abs_error": 0.5,
        "reference_max_abs": 0.0,
        "relative_l2_error": 0.1,
        "cosine_similarity": 0.9,
    }
    assert worst_of([zero, zero])["relative_l2_error"] is None


def test_worst_of_something_unmeasured_is_unmeasured():
    """One variant without numbers: no check may pass on the rest."""
    unmeasured = dict.fromkeys(
        ("max_abs_error", "reference_max_abs", "relative_l2_error", "cosine_similarity")
    )
    measured = parity_errors([1.0], [1.0])

    assert worst_of([measured, unmeasured]) == unmeasured
    assert worst_of([]) == unmeasured


def test_hash_is_of_the_retained_bytes_and_moves_with_every_field():
    """Same numbers, same hash, whatever they came as; any change changes it."""
    first = batch()
    again = batch()
    other = fixed_batch(
        description="test batch",
        target_logprobs=first.target_logprobs_D,
        sampling_logprobs=first.sampling_logprobs_D,
        advantages=first.advantages_D,
        loss_mask=[[not m for m in row] for row in first.loss_mask_D],
    )

    assert first.sha256 == again.sha256
    assert first.canonical_bytes() == again.canonical_bytes()
    assert len({first.sha256, other.sha256, stale(first, nats=0.1, seed=0).sha256}) == 3


def test_hash_is_frozen():
    """The bytes of a small batch, written out: another form would orphan retained hashes."""
    small = fixed_batch(
        description="d",
        target_logprobs=[[-1.0, math.nan]],
        sampling_logprobs=[[-0.5, -math.inf]],
        advantages=[[1.0, 0.0]],
        loss_mask=[[True, False]],
    )

    assert small.canonical_bytes() == (
        b'{"advantages_D":[[1.0,0.0]],"description":"d","loss_mask_D":[[true,false]],'
        b'"sampling_logprobs_D":[[-0.5,"-inf"]],"target_logprobs_D":[[-1.0,"nan"]]}'
    )


def test_stale_moves_the_current_policy_alone():
    """Seeded, at most 0, in float32 values; the sampling log-probabilities stay."""
    fresh = batch()

    moved = stale(fresh, nats=0.5, seed=3)

    assert moved.sampling_logprobs_D == fresh.sampling_logprobs_D
    assert moved.target_logprobs_D != fresh.target_logprobs_D
    assert moved == stale(fresh, nats=0.5, seed=3)
    values = [value for row in moved.target_logprobs_D for value in row]
    assert max(values) <= 0.0
    assert all(float(np.float32(value)) == value for value in values)


def test_stale_moves_by_the_stated_distance():
    """4,000 tokens at -50 nats, where the ceiling of 0 plays no part: mean 0, deviation 0.5."""
    far = fixed_batch(
        description="d",
        target_logprobs=[[-50.0] * 4000],
        sampling_logprobs=[[-50.0] * 4000],
        advantages=[[1.0] * 4000],
        loss_mask=[[True] * 4000],
    )

    moved = np.asarray(stale(far, nats=0.5, seed=0).target_logprobs_D[0]) + 50.0

    assert moved.std() == pytest.approx(0.5, rel=0.05)
    assert abs(moved.mean()) < 0.03


def test_stale_needs_a_distance():
    """0 nats would be the fresh batch under another name."""
    with pytest.raises(LossConfigError, match=r"nats: 0.0; expected a number > 0"):
        stale(batch(), nats=0.0, seed=0)


def test_batch_with_misfitting_fields_is_refused():
    """Lengths are named."""
    with pytest.raises(LossInputError, match=r"advantages_D: lengths \[1\]; expected \[2\]"):
        fixed_batch(
            description="d",
            target_logprobs=[[-1.0, -1.0]],
            sampling_logprobs=[[-1.0, -1.0]],
            advantages=[[1.0]],
            loss_mask=[[True, True]],
        )


def test_reference_refuses_what_it_does_not_know():
    """A top-K mask needs more than log-probabilities of the sampled tokens."""
    config = DPPO | {"divergence": "topk_tv", "top_k": 4}

    with pytest.raises(LossConfigError, match="dppo without top_k"):
        reference_result(config, batch(), denominator=1.0)
    with pytest.raises(LossConfigError, match='anchor "recompute"'):
        reference_result(DPPO | {"anchor": "recompute"}, batch(), denominator=1.0)


@pytest.mark.parametrize("kind", ["grpo_clip", "dppo"])
def test_reference_follows_the_anchor_that_the_configuration_names(kind):
    """An anchor that was recorded but is not named changes nothing; named, it does.

    0.75 against the sampler's 0.5 is removed, against the recomputed 0.74 it is kept.
    """
    inputs = fixed_batch(
        description="d",
        target_logprobs=[[math.log(0.75)]],
        sampling_logprobs=[[math.log(0.5)]],
        advantages=[[1.0]],
        loss_mask=[[True]],
        anchor_logprobs=[[math.log(0.74)]],
    )
    config = GRPO if kind == "grpo_clip" else DPPO

    for anchor, removed in (("sampling", True), ("recompute", False)):
        named = config | {"anchor": anchor}
        expected = reference_result(named, inputs, denominator=1.0)
        actual = torch_result(named, inputs, denominator=1.0, packed=True)
        assert (expected.gradient_N[0] == 0.0) == removed
        assert actual.gradient_N == pytest.approx(expected.gradient_N, rel=1e-6)
