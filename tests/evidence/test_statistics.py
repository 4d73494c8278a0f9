"""Closed forms, values computed elsewhere, and coverage that is counted out exactly."""

import hashlib
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evidence.errors import InputError
from evidence.statistics import (
    betting_interval,
    clopper_pearson_discordant,
    empirical_bernstein_interval,
    hoeffding_half_width,
    item_order,
    items_for_power,
    items_for_power_at_deviation,
    items_to_settle,
    mcnemar_exact,
)


@pytest.mark.parametrize(
    ("n", "k", "alpha", "expected"),
    [
        (60, 2, 0.05, 0.3821878523568343),
        (60, 1, 0.05, 0.35066030352816463),
        (1319, 1, 0.05, 0.07478936),
        (200, 1, 0.05, 0.192),
        (500, 1, 0.025, 0.132),
        (5000, 1, 0.01, 0.046),
    ],
)
def test_half_width_of_a_difference_has_the_published_values(n, k, alpha, expected):
    """R = 2 for a difference of two scores in [0, 1]; three-digit values are tables elsewhere."""
    width = hoeffding_half_width(2, n=n, k=k, alpha=alpha)
    digits = len(str(expected)) - 2
    assert width == pytest.approx(expected, rel=1e-14, abs=0.5 * 10.0 ** -min(digits, 14))


def test_half_width_at_two_over_e_is_the_bare_root():
    """alpha = 2/e makes ln(2k/alpha) = 1 for k = 1, so R sqrt(1 / (2n)) is left: 8 / 4 = 2."""
    assert hoeffding_half_width(8, n=8, k=1, alpha=2 / math.e) == pytest.approx(2.0, rel=1e-15)


@pytest.mark.parametrize(
    ("name", "value"),
    [("value_range", 0.0), ("n", 0), ("k", 0), ("alpha", 0.0), ("alpha", 1.0), ("alpha", math.nan)],
)
def test_half_width_refuses_meaningless_arguments_by_name(name, value):
    arguments = {"value_range": 2.0, "n": 60, "k": 1, "alpha": 0.05, name: value}
    with pytest.raises(InputError) as error:
        hoeffding_half_width(arguments.pop("value_range"), **arguments)
    assert error.value.field == name


def test_item_order_is_that_of_the_hashes_of_seed_and_item():
    """SHA-256 of [0,"i0"], [0,"i1"], [0,"i2"] begin ae1f, 8fcf, 72d9; with seed 2 they begin
    5315, 5262, b572."""
    assert hashlib.sha256(b'[0,"i0"]').hexdigest().startswith("ae1f")
    assert item_order(0, ["i0", "i1", "i2"]) == [2, 1, 0]
    assert item_order(2, ["i0", "i1", "i2"]) == [1, 0, 2]


def test_item_order_writes_other_text_as_json_does():
    """A lone surrogate, a quote and a non-ASCII letter are escaped, so every text has an order."""
    ids = ["\ud83d", 'a"b', "ß", "plain"]
    assert sorted(item_order(7, ids)) == [0, 1, 2, 3]


def pattern(n, *, gain_every, gain_at, loss_every, loss_at):
    index = np.arange(n)
    return np.where(
        index % gain_every == gain_at, 1.0, np.where(index % loss_every == loss_at, -1.0, 0.0)
    )


TIES = pattern(60, gain_every=10, gain_at=3, loss_every=20, loss_at=7)
GAINS = np.where(np.arange(60) % 20 == 5, 1.0, 0.0)
GRADED = (np.arange(60) * 37 % 60) / 60 * 0.3 - 0.1
LONG = pattern(400, gain_every=11, gain_at=3, loss_every=17, loss_at=7)

REFERENCE = [
    (TIES, "constant", -0.114, 0.218),
    (TIES, "mean", -0.104, 0.214),
    (GAINS, "constant", -0.088, 0.194),
    (GAINS, "mean", -0.036, 0.180),
    (GRADED, "constant", -0.082, 0.178),
    (GRADED, "mean", -0.026, 0.118),
    (LONG, "constant", -0.016, 0.090),
    (LONG, "mean", -0.016, 0.090),
    (np.ones(20), "constant", 0.594, 1.0),
    (np.ones(20), "mean", 0.632, 1.0),
    (np.zeros(30), "constant", -0.262, 0.262),
    (np.zeros(30), "mean", -0.132, 0.132),
]


@pytest.mark.parametrize(("contrasts", "truncation", "lower", "upper"), REFERENCE)
def test_betting_interval_agrees_with_the_published_implementation(
    contrasts, truncation, lower, upper
):
    """The values are those of confseq (70b1ef3), whose ends lie one to two steps of its grid of
    0.001 outside on the scale [0, 1], that is up to 0.004 on [-1, 1]."""
    found = betting_interval(contrasts, alpha=0.05, low=-1, high=1, truncation=truncation)
    assert lower - 1e-9 <= found.lower <= lower + 0.004
    assert upper - 0.004 <= found.upper <= upper + 1e-9


def test_empirical_bernstein_agrees_with_the_published_implementation():
    """Values of the same program, which has a closed form here and no grid."""
    found = empirical_bernstein_interval(TIES, alpha=0.05, low=-1, high=1)
    assert found.lower == pytest.approx(-0.22982318783099742, abs=1e-12)
    assert found.upper == pytest.approx(0.3298231878309976, abs=1e-12)
    graded = empirical_bernstein_interval(GRADED, alpha=0.05, low=-1, high=1)
    assert graded.lower == pytest.approx(-0.20262381717391542, abs=1e-12)


@pytest.mark.parametrize("truncation", ["mean", "constant"])
@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_betting_interval_misses_no_more_often_than_alpha_counted_exactly(p, truncation):
    """All 256 sequences of eight 0/1 outcomes, each weighed with its probability."""
    missed = 0.0
    for outcomes in itertools.product((0.0, 1.0), repeat=8):
        found = betting_interval(outcomes, alpha=0.2, low=0, high=1, truncation=truncation)
        if not found.lower <= p <= found.upper:
            ones = sum(outcomes)
            missed += p**ones * (1 - p) ** (8 - ones)
    assert missed <= 0.2


def test_intervals_cover_in_simulation_and_betting_is_the_narrower():
    """300 runs of 60 items, 15 % discordant, true difference 0.05: at most 5 % misses (here fewer
    than 1 in 20 plus three standard deviations, 27), and mean half widths .137 against .351."""
    random = np.random.default_rng(11)
    missed, widths = 0, []
    for _ in range(300):
        draw = random.random(60)
        contrasts = np.where(draw < 0.10, 1.0, np.where(draw < 0.15, -1.0, 0.0))
        found = betting_interval(contrasts, alpha=0.05, low=-1, high=1)
        missed += not found.lower <= 0.05 <= found.upper
        widths.append(found.half_width)
        half = hoeffding_half_width(2, n=60, k=1, alpha=0.05)
        assert abs(contrasts.mean() - 0.05) <= half
    assert missed <= 27
    assert np.mean(widths) == pytest.approx(0.137, abs=0.004)
    assert half == pytest.approx(0.351, abs=0.001)


@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=30),
    st.floats(0.01, 0.5),
)
@settings(max_examples=40, deadline=None)
def test_betting_interval_stays_within_the_bounds_and_mirrors(contrasts, alpha):
    """Swapping the arms negates every contrast and must negate the interval."""
    found = betting_interval(contrasts, alpha=alpha, low=-1, high=1)
    mirrored = betting_interval([-x for x in contrasts], alpha=alpha, low=-1, high=1)
    assert -1 <= found.lower <= found.upper <= 1
    assert mirrored.lower == pytest.approx(-found.upper, abs=1e-6)
    assert mirrored.upper == pytest.approx(-found.lower, abs=1e-6)


def test_betting_interval_scales_with_the_unit():
    """The same data on a scale of 0 to 100 give the same interval times 100."""
    unit = betting_interval([0.2, 0.9, 0.4], alpha=0.1, low=0, high=1)
    percent = betting_interval([20, 90, 40], alpha=0.1, low=0, high=100)
    assert percent.lower == pytest.approx(100 * unit.lower)
    assert percent.upper == pytest.approx(100 * unit.upper)


@pytest.mark.parametrize("contrasts", [[], [0.5, 2.0], [0.5, math.nan], [[0.5]]])
def test_betting_interval_refuses_what_cannot_be_a_contrast(contrasts):
    with pytest.raises(InputError):
        betting_interval(contrasts, alpha=0.05, low=0, high=1)


def test_clopper_pearson_with_no_discordant_item_is_symmetric_around_zero():
    """0 of 10 at alpha/4 a side: upper bound 1 - (alpha/4)^(1/10) = 1 - 0.0125^0.1 = 0.35481."""
    found = clopper_pearson_discordant(0, 0, n=10, alpha=0.05)
    assert found.upper == pytest.approx(1 - 0.0125**0.1, abs=1e-12)
    assert found.lower == pytest.approx(-found.upper, abs=1e-12)


def test_clopper_pearson_with_every_item_gained_reaches_one():
    """10 of 10 gained: lower bound of the gains 0.0125^(1/10), no loss seen: minus 1 - that."""
    found = clopper_pearson_discordant(10, 0, n=10, alpha=0.05)
    assert found.upper == 1.0
    assert found.lower == pytest.approx(0.0125**0.1 - (1 - 0.0125**0.1), abs=1e-12)


def test_clopper_pearson_misses_no_more_often_than_alpha_counted_exactly():
    """All counts of gains and losses among six items, for three pairs of rates."""
    for gain, loss in ((0.1, 0.1), (0.5, 0.2), (0.05, 0.0)):
        missed = 0.0
        for gains in range(7):
            for losses in range(7 - gains):
                found = clopper_pearson_discordant(gains, losses, n=6, alpha=0.2)
                if not found.lower <= gain - loss <= found.upper:
                    ways = math.comb(6, gains) * math.comb(6 - gains, losses)
                    rest = 6 - gains - losses
                    missed += ways * gain**gains * loss**losses * (1 - gain - loss) ** rest
        assert missed <= 0.2


def test_clopper_pearson_refuses_more_discordant_items_than_items():
    with pytest.raises(InputError, match="gains"):
        clopper_pearson_discordant(4, 3, n=6, alpha=0.05)


@pytest.mark.parametrize(
    ("gains", "losses", "expected"),
    [(0, 0, 1.0), (5, 0, 2 / 32), (1, 4, 12 / 32), (3, 3, 1.0), (2, 8, 2 * 56 / 1024)],
)
def test_mcnemar_is_the_two_sided_coin_test(gains, losses, expected):
    """5 heads of 5: 2 / 32. At most 1 of 5: 2 (1 + 5) / 32. At most 2 of 10: 2 (1+10+45) / 1024."""
    assert mcnemar_exact(gains, losses) == pytest.approx(expected, rel=1e-12)


PLANNING = [
    (0.01, 1, 73778, 203431, 92548),
    (0.03, 1, 8198, 22604, 10284),
    (0.05, 1, 2952, 8138, 3702),
    (0.10, 1, 738, 2035, 926),
    (0.20, 1, 185, 509, 232),
    (0.01, 2, 87641, 226057, 108003),
    (0.03, 2, 9738, 25118, 12001),
    (0.05, 2, 3506, 9043, 4321),
    (0.10, 2, 877, 2261, 1081),
    (0.20, 2, 220, 566, 271),
]


@pytest.mark.parametrize(("distance", "k", "just", "guaranteed", "realistic"), PLANNING)
def test_items_needed_are_those_of_the_table(distance, k, just, guaranteed, realistic):
    """R = 2, alpha = 0.05; the deviation .387 is the root of 0.15."""
    rule = {"value_range": 2.0, "k": k, "alpha": 0.05}
    assert items_to_settle(distance, **rule) == just
    assert items_for_power(distance, **rule) == guaranteed
    assert items_for_power_at_deviation(distance, deviation=math.sqrt(0.15), **rule) == realistic


def test_eight_units_are_needed_before_a_difference_of_one_settles():
    """So three training seeds never settle anything under this rule."""
    assert items_to_settle(1.0, value_range=2.0, k=1, alpha=0.05) == 8
    assert (
        hoeffding_half_width(2, n=7, k=1, alpha=0.05)
        > 1
        > hoeffding_half_width(2, n=8, k=1, alpha=0.05)
    )


def test_betting_interval_is_everything_when_no_mean_survives():
    """200 ones and then 200 zeros: each candidate mean made one side rich at some time."""
    found = betting_interval([1.0] * 200 + [0.0] * 200, alpha=0.05, low=0, high=1)
    assert (found.lower, found.upper) == (0.0, 1.0)
