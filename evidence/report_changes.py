"""What would change a criterion's answer, in words that its interval allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from evidence.criteria import SEED_UNIT
from evidence.report_text import finite, number
from evidence.values import as_mapping

NOT_COMPUTED = "The effect could not be computed."
_NO_FORMULA = "has no closed form for this interval"


def change_words(criterion: Mapping[str, Any], *, rule: object) -> str:
    """Say what would settle a criterion, or by how much it is settled.

    Args:
        criterion: a recomputed criterion: effect, interval, margin, status.
        rule: the spec's ``decision_rule``, for its unit and its method.
    """
    settings = as_mapping(rule)
    units = "training seeds" if settings.get("unit") == SEED_UNIT else "items"
    if settings.get("method") == "paired_hoeffding":
        return _by_half_width(criterion, units)
    return _by_ends(criterion, units)


def _by_half_width(criterion: Mapping[str, Any], units: str) -> str:
    """Words for a symmetric interval, whose half width falls with the root of the number of units.

    It just clears the margin at ``n * (half_width / |effect - margin|) ** 2`` units.
    """
    effect, margin = finite(criterion.get("effect")), finite(criterion.get("margin"))
    half, n = finite(criterion.get("half_width")), criterion.get("n_items")
    if effect is None or margin is None or half is None or not isinstance(n, int):
        return NOT_COMPUTED
    gap = abs(effect - margin)
    if gap == 0.0:
        return f"The effect equals the margin: no number of {units} would settle it."
    needed = math.ceil(n * (half / gap) ** 2)
    if criterion.get("status") in ("passed", "failed"):
        return (
            f"It would have been settled with {number(max(needed, 1))} of these {number(n)} "
            f"{units} already, had the effect been the same."
        )
    side = "support" if effect > margin else "refute"
    return (
        f"If the effect stayed {number(effect, signed=True)}, about {number(needed)} {units} would "
        f"{side} it ({number(n)} were used); with {number(n)} {units} the effect would have to "
        f"be above {number(margin + half, signed=True)} to support it, or below "
        f"{number(margin - half, signed=True)} to refute it."
    )


def _by_ends(criterion: Mapping[str, Any], units: str) -> str:
    """Words for an interval of any shape: how far its nearer end is from the margin."""
    lower, upper = finite(criterion.get("lower")), finite(criterion.get("upper"))
    margin, n = finite(criterion.get("margin")), criterion.get("n_items")
    if lower is None or upper is None or margin is None or not isinstance(n, int):
        return NOT_COMPUTED
    formula = f"how many {units} that takes ({number(n)} were used) {_NO_FORMULA}."
    if criterion.get("status") == "passed":
        return f"It is settled: the lower end is {number(lower - margin)} above the margin."
    if criterion.get("status") == "failed":
        return f"It is settled: the upper end is {number(margin - upper)} below the margin."
    if margin - lower <= upper - margin:
        return (
            f"The lower end is nearer to the margin: it would have to rise by more than "
            f"{number(margin - lower)} to support it; {formula}"
        )
    return (
        f"The upper end is nearer to the margin: it would have to fall by more than "
        f"{number(upper - margin)} to refute it; {formula}"
    )
