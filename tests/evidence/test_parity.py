import math

import pytest

from evidence.errors import InputError
from evidence.parity import lr_scaling_error, parity_errors


def test_parity_errors_by_hand():
    """Difference (0, 0, -1), reference norm sqrt(14), dot 11, actual norm 3."""
    found = parity_errors([1.0, 2.0, 2.0], [1.0, 2.0, 3.0])
    assert found == {
        "max_abs_error": 1.0,
        "reference_max_abs": 3.0,
        "relative_l2_error": pytest.approx(1 / math.sqrt(14)),
        "cosine_similarity": pytest.approx(11 / (3 * math.sqrt(14))),
    }
    assert list(found) == [
        "max_abs_error",
        "reference_max_abs",
        "relative_l2_error",
        "cosine_similarity",
    ]


def test_parity_errors_of_equal_results():
    found = parity_errors([[3.0, -4.0], [0.0]], [3.0, -4.0, 0.0])
    assert list(found.values()) == [0.0, 4.0, 0.0, 1.0]


def test_parity_errors_of_opposite_results():
    """Each element off by twice its size: relative error 2, cosine -1."""
    assert list(parity_errors([-3.0, 4.0], [3.0, -4.0]).values()) == [8.0, 4.0, 2.0, -1.0]


def test_a_zero_reference_has_no_relative_error():
    assert list(parity_errors([0.5], [0.0]).values()) == [0.5, 0.0, None, None]


def test_a_zero_result_has_no_cosine():
    assert list(parity_errors([0.0], [2.0]).values()) == [2.0, 2.0, 1.0, None]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_measure_nothing(bad):
    """NaN against NaN is no agreement, inf against inf neither."""
    assert set(parity_errors([1.0, bad], [1.0, bad]).values()) == {None}
    assert set(parity_errors([1.0, bad], [1.0, 2.0]).values()) == {None}
    assert set(parity_errors([1.0, 2.0], [bad, 2.0]).values()) == {None}
    assert set(parity_errors([1.0, 2.0], [2.0, bad]).values()) == {None}


def test_nothing_measures_nothing():
    assert set(parity_errors([], []).values()) == {None}


def test_parity_errors_of_very_large_and_very_small_numbers():
    """Squares would overflow or vanish: 1e200 and 1e-200."""
    for scale in (1e200, 1e-200):
        found = parity_errors([2 * scale, 0.0], [scale, 0.0])
        assert found["relative_l2_error"] == pytest.approx(1.0)
        assert found["cosine_similarity"] == pytest.approx(1.0)


def test_a_difference_beyond_floats_is_not_measured():
    assert parity_errors([1.5e308], [-1.5e308])["max_abs_error"] is None


@pytest.mark.parametrize("values", [["1"], [True], [None], [b"1"], ["ab"], [{"a": 1}], [10**400]])
def test_parity_errors_takes_only_numbers(values):
    with pytest.raises(InputError, match="actual: expected numbers"):
        parity_errors(values, [1.0])


def test_parity_errors_needs_equal_lengths():
    with pytest.raises(InputError, match="actual: expected 2 numbers"):
        parity_errors([1.0], [1.0, 2.0])


def _probes(*pairs):
    return [{"learning_rate": rate, "update_norm": norm} for rate, norm in pairs]


def test_lr_scaling_error_by_hand():
    """Ratios 4, 4 and 5: the last is a quarter above the first."""
    assert lr_scaling_error(_probes((0.25, 1.0), (0.5, 2.0), (1.0, 5.0))) == 0.25
    assert lr_scaling_error(_probes((0.25, 1.0), (0.5, 2.0))) == 0.0


def test_lr_scaling_error_counts_shrinking_updates_too():
    """Ratios 4 and 1: three quarters below."""
    assert lr_scaling_error(_probes((0.25, 1.0), (1.0, 1.0))) == 0.75
    assert lr_scaling_error(_probes((0.25, 1.0), (1.0, 0.0))) == 1.0


@pytest.mark.parametrize(
    "probes",
    [
        [],
        None,
        "x",
        _probes((0.25, 1.0)),
        _probes((0.25, 0.0), (0.5, 0.0)),
        _probes((0.25, 0.0), (0.5, 1.0)),
        _probes((0.0, 1.0), (0.5, 1.0)),
        _probes((-0.5, 1.0), (0.5, 1.0)),
        _probes((0.25, 1.0), (0.5, -1.0)),
        _probes((0.25, 1.0), (0.5, math.nan)),
        _probes((0.25, 1.0), (math.inf, 1.0)),
        _probes((0.25, True), (0.5, 1.0)),
        _probes((0.25, "1"), (0.5, 1.0)),
        _probes((1e-300, 1e300), (0.5, 1.0)),
        [*_probes((0.25, 1.0), (0.5, 2.0)), {}],
        [*_probes((0.25, 1.0), (0.5, 2.0)), 3],
    ],
)
def test_lr_scaling_that_was_not_measured(probes):
    assert lr_scaling_error(probes) is None


@pytest.mark.parametrize("scale", [1.0, 1e200, 1e-200])
def test_norms_are_scaled_where_squares_would_not_fit(scale):
    """Difference (1, 1), reference (1, 0): relative error sqrt(2), cosine 2 / sqrt(5)."""
    found = parity_errors([2 * scale, scale], [scale, 0.0])
    assert found["relative_l2_error"] == pytest.approx(math.sqrt(2))
    assert found["cosine_similarity"] == pytest.approx(2 / math.sqrt(5))
