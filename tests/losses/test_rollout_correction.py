"""Truncated importance weights against numbers worked out by hand and the reference."""

import numpy as np
import pytest
import torch

from losses.errors import LossConfigError, LossInputError
from losses.reference.advantages import correction_weights
from losses.rollout_correction import rollout_correction_weights
from tests.losses.builders import logs, tensor

NAN = float("nan")


def weights(trainer, sampling, masks, **over):
    settings = {"level": "token", "threshold": 2.0, "batch_normalize": False} | over
    return [
        row.tolist() for row in rollout_correction_weights(trainer, sampling, masks, **settings)
    ]


TRAINER = [logs(0.6, 0.9, 0.5), logs(0.25)]
SAMPLING = [logs(0.5, 0.3, 0.5), logs(0.5)]
MASKS = [torch.tensor([True, True, False]), torch.tensor([True])]


def test_token_weights_by_hand():
    """1.2, 3 truncated to 2, 0 off the mask; 0.5."""
    first, second = weights(TRAINER, SAMPLING, MASKS)

    assert first == pytest.approx([1.2, 2.0, 0.0], rel=1e-14)
    assert second == pytest.approx([0.5], rel=1e-14)


def test_sequence_weight_is_the_product_of_its_trained_tokens():
    """1.2 * 3 = 3.6, truncated to 3 on both trained tokens."""
    first, second = weights(TRAINER, SAMPLING, MASKS, level="sequence", threshold=3.0)

    assert first == pytest.approx([3.0, 3.0, 0.0], rel=1e-14)
    assert second == pytest.approx([0.5], rel=1e-14)


def test_normalised_weights_have_mean_one():
    """Token level over the three tokens; sequence level over the two sequences."""
    tokens = weights(TRAINER, SAMPLING, MASKS, batch_normalize=True)
    sequences = weights(
        TRAINER, SAMPLING, MASKS, level="sequence", threshold=3.0, batch_normalize=True
    )

    assert (sum(tokens[0]) + sum(tokens[1])) / 3 == pytest.approx(1.0, rel=1e-8)
    assert (sequences[0][0] + sequences[1][0]) / 2 == pytest.approx(1.0, rel=1e-7)


def test_exponent_is_held_within_20_nats():
    """30 nats apart, no truncation in the way."""
    (row,) = weights([tensor(-40.0)], [tensor(-10.0)], [torch.tensor([True])], threshold=1e12)

    assert row == pytest.approx([np.exp(-20.0)], rel=1e-14)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("batch_normalize", [False, True])
def test_garbage_under_the_mask_is_inert(level, batch_normalize):
    """NaN off the mask reaches neither a weight nor a mean."""
    dirty = [torch.cat([TRAINER[0][:2], tensor(NAN)]), TRAINER[1]]

    clean = weights(TRAINER, SAMPLING, MASKS, level=level, batch_normalize=batch_normalize)
    assert weights(dirty, SAMPLING, MASKS, level=level, batch_normalize=batch_normalize) == clean


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("batch_normalize", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_weights_equal_the_reference(level, batch_normalize, seed):
    """Random batches, an empty sequence among them."""
    rng = np.random.default_rng(seed)
    sampling = -rng.exponential(1.0, (5, 9))
    trainer = sampling + rng.normal(0.0, 0.5, (5, 9))
    mask = rng.random((5, 9)) < 0.7
    mask[2] = False
    settings = {"level": level, "threshold": 1.5, "batch_normalize": batch_normalize}

    actual = rollout_correction_weights(
        list(torch.tensor(trainer)), list(torch.tensor(sampling)), list(torch.tensor(mask)),
        **settings,
    )  # fmt: skip
    expected = correction_weights(trainer, sampling, mask, **settings)

    np.testing.assert_allclose(torch.stack(actual).numpy(), expected, rtol=1e-12)


def test_nothing_trained_gives_zeros():
    """Also when normalised: no 0/0."""
    masks = [torch.zeros(3, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)]

    assert weights(TRAINER, SAMPLING, masks, batch_normalize=True) == [[0.0] * 3, [0.0]]


def test_weights_carry_no_gradient():
    """They change the measure, not the objective."""
    trainer = [row.clone().requires_grad_() for row in TRAINER]

    rows = rollout_correction_weights(
        trainer, SAMPLING, MASKS, level="token", threshold=2.0, batch_normalize=False
    )

    assert not any(row.requires_grad for row in rows)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"level": "batch"}, r"level: 'batch'; expected one of \['token', 'sequence'\]"),
        ({"threshold": 0.0}, "threshold: 0.0"),
    ],
)
def test_bad_setting_is_named(over, message):
    """Field, value and expectation."""
    with pytest.raises(LossConfigError, match=message):
        weights(TRAINER, SAMPLING, MASKS, **over)


def test_bad_arrays_are_refused():
    """A missing row, another shape, NaN on a trained token."""
    with pytest.raises(LossInputError, match="sampling_logprobs_D"):
        weights(TRAINER, SAMPLING[:1], MASKS)
    with pytest.raises(LossInputError, match="sampling_logprobs: shape"):
        weights(TRAINER, [SAMPLING[0][:2], SAMPLING[1]], MASKS)
    with pytest.raises(LossInputError, match="trainer_logprobs: nan on trained token 0"):
        weights([tensor(NAN, 0.0, 0.0), TRAINER[1]], SAMPLING, MASKS)
