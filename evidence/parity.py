"""How far two numeric results are apart, in the four numbers a correctness report gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import fsum, isfinite, sqrt
from typing import Any

from evidence.errors import InputError
from evidence.values import as_list, as_mapping, is_number

_SAFE_SQUARE = 1e150
"""Magnitudes up to this one (and down to its inverse) can be squared in 64-bit floats."""


def parity_errors(actual: Sequence[Any], reference: Sequence[Any]) -> dict[str, float | None]:
    """Compare a result with its reference, element by element.

    Args:
        actual: numbers, or nested sequences of numbers that are read in order.
        reference: as many numbers.

    Returns:
        ``max_abs_error`` = max |actual - reference|; ``reference_max_abs`` = max |reference|;
        ``relative_l2_error`` = norm(actual - reference) / norm(reference), None for a zero
        reference; ``cosine_similarity``, None where either vector is zero. Every entry that cannot
        be computed, because a number is not finite or because there is none, is None: nothing was
        measured then, and no check may pass on it.

    Raises:
        InputError: if the two differ in length or hold something that is not a number.
    """
    ours, theirs = _flat(actual, "actual"), _flat(reference, "reference")
    if len(ours) != len(theirs):
        raise InputError("actual", len(ours), f"{len(theirs)} numbers, as many as the reference")
    names = ("max_abs_error", "reference_max_abs", "relative_l2_error", "cosine_similarity")
    if not ours or not all(map(isfinite, ours)) or not all(map(isfinite, theirs)):
        return dict.fromkeys(names)
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    values = (
        max(map(abs, differences)),
        max(map(abs, theirs)),
        _ratio(differences, theirs),
        _cosine(ours, theirs),
    )
    return {
        name: value if value is not None and isfinite(value) else None
        for name, value in zip(names, values, strict=True)
    }


def lr_scaling_error(probes: Sequence[Mapping[str, Any]]) -> float | None:
    """Say how far the size of an update is from being proportional to the learning rate.

    Args:
        probes: ``{"learning_rate": lr, "update_norm": norm}`` each, from the same reset state.

    Returns:
        max over probes i of |(norm_i / lr_i) / (norm_0 / lr_0) - 1|: every probe is compared with
        the first. None where that was not measured: fewer than two probes, a learning rate that is
        not positive, a first update of size 0, or anything that is not a finite number.
    """
    ratios = []
    for probe in as_list(probes):
        rate = as_mapping(probe).get("learning_rate")
        norm = as_mapping(probe).get("update_norm")
        if not is_number(rate) or not is_number(norm) or rate <= 0 or norm < 0:
            return None
        ratios.append(float(norm) / float(rate))
    if len(ratios) < 2 or ratios[0] == 0 or not all(map(isfinite, ratios)):
        return None
    error = max(abs(ratio / ratios[0] - 1.0) for ratio in ratios[1:])
    return error if isfinite(error) else None


def _flat(values: Iterable[Any], name: str) -> list[float]:
    found: list[float] = []
    pending = [iter(values)]
    while pending:
        for value in pending[-1]:
            if isinstance(value, list | tuple) or hasattr(value, "__iter__"):
                if isinstance(value, str | bytes | Mapping):
                    raise InputError(name, value, "numbers")
                pending.append(iter(value))
                break
            found.append(_as_float(value, name))
        else:
            pending.pop()
    return found


def _as_float(value: Any, name: str) -> float:
    if isinstance(value, bool | str | bytes) or value is None:
        raise InputError(name, value, "numbers")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(name, value, "numbers that fit a 64-bit float") from error


def _norm(values: list[float]) -> float:
    largest = max(map(abs, values))
    if largest == 0.0 or not isfinite(largest):
        return largest
    if 1 / _SAFE_SQUARE < largest < _SAFE_SQUARE:
        return sqrt(fsum(value * value for value in values))
    return largest * sqrt(fsum((value / largest) ** 2 for value in values))


def _ratio(differences: list[float], reference: list[float]) -> float | None:
    size = _norm(reference)
    return None if size == 0.0 else _norm(differences) / size


def _cosine(one: list[float], other: list[float]) -> float | None:
    sizes = _norm(one), _norm(other)
    if 0.0 in sizes or not all(map(isfinite, sizes)):
        return None
    scales = max(map(abs, one)), max(map(abs, other))
    dot = fsum((a / scales[0]) * (b / scales[1]) for a, b in zip(one, other, strict=True))
    cosine = dot / (sizes[0] / scales[0]) / (sizes[1] / scales[1])
    return max(-1.0, min(1.0, cosine))
