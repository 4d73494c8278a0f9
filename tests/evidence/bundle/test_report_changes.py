"""What would change a verdict is said as the interval's own rule allows, never more."""

import pytest

from evidence.report_changes import change_words

HOEFFDING = {"method": "paired_hoeffding", "unit": "fixed_checkpoint_items"}
BETTING = {"method": "paired_betting", "unit": "fixed_checkpoint_items"}
SEEDS = {"method": "paired_hoeffding", "unit": "training_seeds"}


def _criterion(**over):
    """An effect of 0.1 whose symmetric interval of half width 0.2 holds the margin 0."""
    return {
        **{"effect": 0.1, "lower": -0.1, "upper": 0.3, "half_width": 0.2},
        **{"margin": 0.0, "n_items": 60, "status": "uncertain"},
        **over,
    }


def test_symmetric_interval_shrinks_with_the_root_of_the_items():
    """60 * (0.2 / 0.1) ** 2 = 240."""
    text = change_words(_criterion(), rule=HOEFFDING)

    assert "about 240 items would support it (60 were used)" in text
    assert "above +0.2 to support it, or below -0.2" in text


def test_settled_symmetric_criterion_says_how_few_would_have_done():
    """60 * (0.2 / 0.4) ** 2 = 15."""
    found = _criterion(effect=0.4, lower=0.2, upper=0.6, status="passed")

    assert change_words(found, rule=HOEFFDING) == (
        "It would have been settled with 15 of these 60 items already, had the effect been the "
        "same."
    )


def test_seeds_are_not_called_items():
    for found in (_criterion(n_items=5), _criterion(effect=0.0), _criterion(status="passed")):
        text = change_words(found, rule=SEEDS)
        assert "training seeds" in text
        assert "items" not in text
    assert "training seeds" in change_words(_criterion(), rule=SEEDS | {"method": "paired_betting"})


def test_uncertain_betting_criterion_is_never_called_settled():
    """The half width is below the effect, yet the interval, which is not symmetric, holds 0."""
    found = _criterion(effect=0.25, lower=-0.02, upper=0.36, half_width=0.19)

    assert change_words(found, rule=BETTING) == (
        "The lower end is nearer to the margin: it would have to rise by more than 0.02 to support "
        "it; how many items that takes (60 were used) has no closed form for this interval."
    )


@pytest.mark.parametrize(
    ("over", "text"),
    [
        ({"lower": 0.05, "status": "passed"}, "settled: the lower end is 0.05 above the margin."),
        (
            {"lower": -0.5, "upper": -0.25, "status": "failed"},
            "settled: the upper end is 0.25 below the margin.",
        ),
        ({"lower": -0.5, "upper": 0.25}, "it would have to fall by more than 0.25 to refute it"),
    ],
)
def test_betting_criterion_is_told_by_its_ends(over, text):
    assert text in change_words(_criterion(**over), rule=BETTING)


@pytest.mark.parametrize("rule", [HOEFFDING, BETTING, None])
@pytest.mark.parametrize("field", ["margin", "n_items"])
def test_criterion_without_numbers_was_not_computed(rule, field):
    found = _criterion(**{field: None})

    assert change_words(found, rule=rule) == "The effect could not be computed."
