"""Small questions about JSON values of unknown making, none of which can raise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any, TypeGuard

from evidence.errors import shorten

MAX_DEPTH = 200
_MAX_INT_BITS = 4096
_MAX_NAME = 400
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number. Booleans and text are none.

    Neither is an integer that is too large for a 64-bit float.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isfinite(value)
    except OverflowError:
        return False


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number written as one (``2``, not ``2.0`` and not ``true``)."""
    return isinstance(value, int) and is_number(value)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number of at least 0."""
    return is_integer(value) and value >= 0


def is_text(value: object) -> TypeGuard[str]:
    """Whether a value is text with something other than white space in it."""
    return isinstance(value, str) and bool(value.strip())


def is_sha256(value: object) -> TypeGuard[str]:
    """Whether a value is 64 hexadecimal digits."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return an object as it is, and anything else as an empty object."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: object) -> list[Any] | tuple[Any, ...]:
    """Return a list as it is, and anything else as an empty list."""
    return value if isinstance(value, list | tuple) else []


def show(value: object) -> str:
    """Return a name for a message: printable text as it is, everything else as one short line."""
    if isinstance(value, str):
        plain = value.isprintable() and len(value) <= _MAX_NAME
        return value if plain else shorten(value)[1:-1]
    return shorten(value)


def spec_mapping(source: object) -> Mapping[str, Any]:
    """Return the spec held by a spec, a triage document or a parsed spec; else an empty object.

    A triage document is an object with a ``spec`` object in it and none of a spec's own blocks.
    """
    source = getattr(source, "raw", source)
    outer = as_mapping(source)
    inner = outer.get("spec")
    if isinstance(inner, Mapping) and not ({"arms", "decision_rule"} & set(outer)):
        return inner
    return outer


def same(left: object, right: object) -> bool:
    """Whether two JSON values are equal: numbers by value, booleans never equal to numbers.

    NaN equals nothing, itself included. The order of keys does not count. Nesting is walked with
    a stack, so that depth cannot exhaust the interpreter's.
    """
    pending: list[tuple[object, object]] = [(left, right)]
    while pending:
        one, other = pending.pop()
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if one.keys() != other.keys():
                return False
            pending.extend((one[key], other[key]) for key in one)
        elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
            if len(one) != len(other):
                return False
            pending.extend(zip(one, other, strict=True))
        elif not _same_leaf(one, other):
            return False
    return True


def _same_leaf(one: object, other: object) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other
    return type(one) is type(other) and isinstance(one, str | None) and one == other


def jsonable(value: object, depth: int = 0) -> Any:
    """Return a copy of a value that any JSON writer accepts; a clean JSON value stays equal.

    What JSON cannot hold is replaced by text that says what was there: non-finite numbers,
    integers of thousands of digits, values nested too deep, and other types.
    """
    if depth > MAX_DEPTH:
        return f"(nested deeper than {MAX_DEPTH} levels)"
    if isinstance(value, Mapping):
        copied = {}
        for key, inner in value.items():
            copied[key if isinstance(key, str) else shorten(key)] = jsonable(inner, depth + 1)
        return copied
    if isinstance(value, list | tuple):
        items = []
        for inner in value:
            items.append(jsonable(inner, depth + 1))  # no comprehension: one frame a level
        return items
    return _jsonable_leaf(value)


def _jsonable_leaf(value: object) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= _MAX_INT_BITS else shorten(value)
    if isinstance(value, float):
        return value if isfinite(value) else f"({value})"
    return f"({type(value).__name__})"
