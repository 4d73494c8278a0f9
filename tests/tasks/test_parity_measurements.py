"""Parity measurements: what is compared, and that the worst comparison is the one reported."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.fixed_inputs import forced_inputs
from tasks.parity_measurements import (
    Comparison,
    GradientProbe,
    against_builtin_step,
    against_reference,
    packed_against_unpacked,
    served_sums,
    worst,
)
from tests.flows.tiny_spec import DPPO, GRPO

TOLERANCE = {"atol": 1e-5, "rtol": 1e-4}


def _probe(loss: dict[str, object]) -> GradientProbe:
    forced = forced_inputs()
    probe = GradientProbe(loss, forced.inputs_D)
    probe.run(forced.target_logprobs_D)
    return probe


@pytest.mark.parametrize("loss", [GRPO, DPPO], ids=["grpo", "dppo"])
def test_forced_inputs_agree_with_the_reference(loss: dict[str, object]) -> None:
    for comparison in against_reference(loss, _probe(loss), "forced"):
        error, largest = (
            comparison.errors[name] for name in ("max_abs_error", "reference_max_abs")
        )
        assert error is not None
        assert largest is not None
        assert largest > 1.0
        assert error <= 1e-6 * largest


@pytest.mark.parametrize("loss", [GRPO, DPPO], ids=["grpo", "dppo"])
def test_packing_changes_nothing(loss: dict[str, object]) -> None:
    for comparison in packed_against_unpacked(loss, _probe(loss), "forced"):
        assert comparison.errors["max_abs_error"] == 0.0


def test_forced_inputs_reach_both_sides_of_the_mask() -> None:
    """Of the kept and dropped tokens with an advantage there are some of either sign."""
    loss = DPPO | {"delta_low": 0.15, "delta_high": 0.15}
    probe = _probe(loss)
    moved = np.concatenate(probe.gradients_D) != 0
    signs = np.concatenate(
        [
            np.where(inputs.loss_mask_T.numpy(), np.sign(inputs.advantages_T.numpy()), 0)
            for inputs in probe.inputs_D
        ]
    )

    for sign in (1, -1):
        assert moved[signs == sign].any()
        assert (~moved[signs == sign]).any()
    assert not moved[signs == 0].any()


def test_surrogate_sum_tells_a_sum_from_a_mean() -> None:
    probe = _probe(GRPO)
    right = served_sums(probe, {"surrogate_loss:sum": probe.surrogate_sum})[0]
    mean = served_sums(probe, {"surrogate_loss:sum": probe.surrogate_sum / 200})[0]

    assert right.errors["max_abs_error"] == 0.0
    assert mean.errors["relative_l2_error"] == pytest.approx(0.995)


def test_silent_service_is_not_compared() -> None:
    assert served_sums(_probe(GRPO), {}) == []


def test_step_comparison_sees_direction() -> None:
    before = [np.zeros(3, dtype=np.float32)]
    ours, opposite = [np.array([1, 2, 3], np.float32)], [np.array([-1, -2, -3], np.float32)]

    comparison = against_builtin_step(before, ours, opposite)

    assert comparison.errors["cosine_similarity"] == pytest.approx(-1.0)


def test_worst_is_the_one_nearest_to_its_bound() -> None:
    """1e-5 of 1e-5 + 1e-4 * 1 is 9 %; 1e-4 of 1e-5 + 1e-4 * 100 is 1 %; not measured is worst."""

    def one(error: float | None, largest: float) -> Comparison:
        errors = {
            "max_abs_error": error,
            "reference_max_abs": largest,
            "relative_l2_error": 0.0,
            "cosine_similarity": 1.0,
        }
        return Comparison("loss", "x", errors)

    small, large, missing = one(1e-5, 1.0), one(1e-4, 100.0), one(None, 1.0)

    assert worst([large, small], "loss", TOLERANCE) is small.errors
    assert worst([large, missing, small], "loss", TOLERANCE) is missing.errors
