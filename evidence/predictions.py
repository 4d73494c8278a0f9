"""Raw predictions of an evaluation: the means that follow from them, and the value of every item.

A mean alone does not tie a score to its items: two answers that change places leave it as it is,
and an interval over pairs of items does not stay as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from evidence.decision import MEAN_TOLERANCE
from evidence.errors import InputError, shorten
from evidence.values import as_mapping, is_number

Totals = Mapping[tuple[Any, ...], tuple[float, int]]
"""Sum and count of values by arm, metric, evaluator and seed."""

_GROUP = ("arm", "metric", "evaluator_id", "seed")
_PLACE = ("item_id", *_GROUP)
_PLACE_OF, _VALUE_OF = itemgetter(*_PLACE), itemgetter("value")


def totals_of(rows: Iterable[Mapping[str, Any]], *, where: str) -> Totals:
    """Sum values by arm, metric, evaluator and seed; what is no number makes its sum NaN.

    Raises:
        InputError: if one of these four is a list or an object.
    """
    groups: dict[tuple[Any, ...], list[float]] = {}
    for number, row in enumerate(rows, start=1):
        value = row.get("value")
        key = (row.get("arm"), row.get("metric"), row.get("evaluator_id"), row.get("seed"))
        try:
            found = groups.setdefault(key, [])
        except TypeError:
            field = next(name for name in _GROUP if isinstance(row.get(name), list | dict))
            expected = "text or a number"
            raise InputError(f"line {number}.{field}", row[field], expected, where=where) from None
        found.append(float(value) if is_number(value) else float("nan"))
    return {key: (sum(values), len(values)) for key, values in groups.items()}


def mean_of(totals: Totals, score: Mapping[str, Any]) -> float | None:
    """Return the mean that a score states, over all seeds if it names none; None without rows."""
    wanted = (score.get("arm"), score.get("metric"), score.get("evaluator_id"))
    found = [
        total
        for key, total in totals.items()
        if key[:3] == wanted and ("seed" not in score or key[3] == score["seed"])
    ]
    if not found:
        return None
    return sum(total for total, _ in found) / sum(count for _, count in found)


def is_close(posted: object, found: object) -> bool:
    """Whether two values are equal but for rounding."""
    if not is_number(posted) or not is_number(found):
        return False
    return abs(posted - found) <= MEAN_TOLERANCE * max(1.0, abs(found))


def pairing_issue(
    observations: Sequence[Any], predictions: Iterable[Sequence[Mapping[str, Any]]]
) -> str | None:
    """Say how observations differ from the predictions they were scored from; None if not at all.

    Args:
        observations: rows that the decision rule reads.
        predictions: rows of every predictions file. Only arms that have rows there are compared.

    Raises:
        InputError: if a prediction's item is a list or an object.
    """
    listed = [row for rows in predictions for row in rows]
    if _are_the_same(observations, listed):
        return None
    values: dict[tuple[Any, ...], Any] = {}
    twice: set[tuple[Any, ...]] = set()
    for row in listed:
        place = tuple(map(row.get, _PLACE))
        try:
            known = values.setdefault(place, row.get("value"))
        except TypeError:
            raise InputError("prediction's item_id", row["item_id"], "text") from None
        if known is not row.get("value") and not is_close(known, row.get("value")):
            twice.add(place)
    arms = {place[1] for place in values}
    wrong = [row for row in map(as_mapping, observations) if _differs(row, arms, values, twice)]
    if not wrong:
        return None
    first = ", ".join(f"{name} {shorten(wrong[0].get(name))}" for name in _PLACE[:3])
    return f"{len(wrong)} values are not those of the predictions (first: {first})"


def _are_the_same(observations: Sequence[Any], predictions: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every observation is a prediction, each of which is there once; the fast way to see.

    False also where that takes a closer look.
    """
    try:
        values = dict(zip(map(_PLACE_OF, predictions), map(_VALUE_OF, predictions), strict=True))
        observed = dict(
            zip(map(_PLACE_OF, observations), map(_VALUE_OF, observations), strict=True)
        )
    except (KeyError, TypeError, IndexError):
        return False
    unique = (len(values), len(observed)) == (len(predictions), len(observations))
    return unique and observed.items() <= values.items()


def _differs(
    row: Mapping[str, Any],
    arms: set[Any],
    values: Mapping[tuple[Any, ...], Any],
    twice: set[tuple[Any, ...]],
) -> bool:
    place = tuple(map(row.get, _PLACE))
    try:
        if place[1] not in arms:
            return False
        return place in twice or place not in values or not is_close(values[place], row["value"])
    except (TypeError, KeyError):
        return True
