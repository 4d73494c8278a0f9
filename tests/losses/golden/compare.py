"""Compares computed outputs with golden ones, key by key; a key nobody computed is a failure."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.losses.golden.loading import Block, numbers

RELATIVE = {"float64": 1e-10, "float32": 1e-5}


@dataclass
class Computed:
    """What an implementation computed for a block, and how it may be compared."""

    values: dict[str, Any]
    mask: np.ndarray | None = None
    """Trained tokens: elsewhere the golden per-token terms mean nothing."""
    loss_scale: float = 0.0
    """Sum of the absolute terms behind a loss, which bounds what cancellation may cost."""
    relative: dict[str, float] = field(default_factory=dict)
    """Own tolerance of a key, relative."""
    absolute: dict[str, float] = field(default_factory=dict)
    """Own tolerance of a key, absolute."""
    not_to_copy: frozenset[str] = frozenset()
    """Golden values that the implementation deliberately does not reproduce."""


def check(block: Block, computed: Computed) -> None:
    """Compare every golden output of a block.

    Raises:
        AssertionError: at the first difference, or if an output was not computed.
    """
    for key, expected in block.expected.items():
        if key in computed.not_to_copy:
            continue
        assert key in computed.values, f"{block.id}: output {key!r} is not computed"
        actual = computed.values[key]
        where = f"{block.id}: {key}"
        if isinstance(expected, dict):
            assert set(expected) == set(actual), f"{where}: {sorted(actual)}"
            for name, value in expected.items():
                check_value(block, computed, f"{where}.{name}", key, value, actual[name])
        else:
            check_value(block, computed, where, key, expected, actual)


def check_value(
    block: Block, computed: Computed, where: str, key: str, expected: Any, actual: Any
) -> None:
    if expected is None or (isinstance(expected, bool | str) and not is_nonfinite(expected)):
        assert actual == expected, f"{where}: {actual!r}; expected {expected!r}"
        return
    if holds_objects(expected):
        assert actual == expected, f"{where}: {actual!r}; expected {expected!r}"
        return
    if isinstance(expected, int) or key in ("keep_mask", "kept_group_index"):
        assert np.array_equal(np.asarray(actual), np.asarray(expected)), (
            f"{where}: {actual}; expected {expected}"
        )
        return
    check_numbers(block, computed, where, key, flat(expected), flat(actual))


def is_nonfinite(value: Any) -> bool:
    return value in ("nan", "inf", "-inf")


def holds_objects(value: Any) -> bool:
    """Whether a list holds texts, nulls or mappings rather than numbers."""
    if isinstance(value, list):
        return any(holds_objects(entry) for entry in value)
    return value is None or (isinstance(value, dict | str) and not is_nonfinite(value))


def check_numbers(
    block: Block,
    computed: Computed,
    where: str,
    key: str,
    expected: np.ndarray,
    actual: np.ndarray,
) -> None:
    if key == "per_token" and computed.mask is not None:
        chosen = computed.mask.reshape(computed.mask.shape)
        expected, actual = expected[chosen], actual[chosen]
    assert actual.shape == expected.shape, f"{where}: shape {actual.shape} is not {expected.shape}"
    relative = computed.relative.get(key, RELATIVE[block.dtype])
    nonzero = np.abs(expected[np.isfinite(expected) & (expected != 0)])
    # Elementwise: one huge entry must not hide errors in the others. The median sets the scale
    # below which an entry is rounding noise of its neighbours.
    floor = float(np.median(nonzero)) if nonzero.size and expected.ndim else 0.0
    absolute = max(computed.absolute.get(key, 0.0), relative * floor)
    if key == "loss":
        absolute = max(absolute, relative * computed.loss_scale)
    same = np.isclose(actual, expected, rtol=relative, atol=absolute, equal_nan=True)
    assert bool(same.all()), (
        f"{where}: {int((~same).sum())} of {same.size} differ, first "
        f"{actual[~same].ravel()[0]!r}; expected {expected[~same].ravel()[0]!r}"
    )


def require_known(block: Block, *names: str) -> None:
    """Fail on a parameter that the runner would otherwise ignore."""
    unknown = sorted(set(block.params) - set(names))
    assert not unknown, f"{block.id}: parameters {unknown} are not known"


def flat(value: Any) -> np.ndarray:
    """Return numbers as an array; rows of different lengths are put end to end."""
    if (
        isinstance(value, list)
        and len({len(row) if isinstance(row, list) else 0 for row in value}) > 1
    ):
        return np.concatenate([numbers(row).ravel() for row in value])
    return numbers(value) if isinstance(value, list | str) else np.asarray(value, np.float64)
