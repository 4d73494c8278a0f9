"""Every kind of mistake in a validator is caught by at least one of its tests."""

import pytest

from tests.mutants.operators import mutants
from tests.mutants.runner import EQUIVALENT, ROOT, TARGETS, chosen, try_mutant

PER_MODULE = 6


def test_at_least_a_hundred_mutants_are_tried():
    """Six of each module that has so many, over all validators."""
    assert sum(len(chosen(module, PER_MODULE)) for module in TARGETS) >= 100


def test_operators_make_the_mistakes_they_name():
    """`<` for `<=`, a swapped sign, a dropped check, a missing reason, a wrong number."""
    source = "def f(a, b, out):\n    if a <= b:\n        out.append('x')\n    return a - 1\n"

    made = {(each.kind, each.before, each.after) for each in mutants("m", source)}

    assert made == {
        ("comparison", "a <= b", "a < b"),
        ("dropped check", "if a <= b", "if False"),
        ("missing reason", "out.append('x')", "None"),
        ("swapped sign", "a - 1", "a + 1"),
        ("wrong number", "1", "2"),
    }


def test_known_equivalents_still_exist():
    """An entry for code that is gone would hide a later mutant of the same words."""
    keys = {
        each.key
        for module in {key.partition(":")[0] for key in EQUIVALENT}
        for each in mutants(module, _source(module))
    }

    assert set(EQUIVALENT) <= keys


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("module", sorted(TARGETS))
def test_mutants_are_caught(module):
    """No mutant of the module survives its tests."""
    survived = [
        mutant.key
        for mutant in chosen(module, PER_MODULE)
        if try_mutant(mutant, TARGETS[module]).killer is None
    ]

    assert survived == []


def _source(module):
    return (ROOT / (module.replace(".", "/") + ".py")).read_text()
