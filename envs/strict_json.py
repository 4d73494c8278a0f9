"""Read JSON that a model wrote: what Python reads beyond the format is refused."""

import json
import math
from typing import Any

MAX_DEPTH = 24
"""Deepest nesting of objects and arrays; deeper values overflow the stack of whoever walks them."""


class TooDeepError(ValueError):
    """A value nested deeper than `MAX_DEPTH`."""


class LoneSurrogateError(ValueError):
    """A text with half of a character pair, which no file, hash or tokenizer takes."""


def read_prefix(text: str, position: int) -> tuple[Any, int]:
    """Read the JSON value that starts at a position.

    NaN, infinities (also as a number out of range) and repeated keys are refused.

    Returns:
        The value and where it ended.

    Raises:
        TooDeepError: if it is nested too deep.
        LoneSurrogateError: if a text in it, or a key, holds a lone surrogate.
        ValueError: if it is no JSON value.
    """
    try:
        value, end = _DECODER.raw_decode(text, position)
    except RecursionError as error:
        raise TooDeepError(f"more than {MAX_DEPTH} levels") from error
    _check(value)
    return value, end


def read_whole(text: str) -> Any:
    """Read a text that is one JSON value; errors as in `read_prefix`."""
    stripped = text.strip()
    value, end = read_prefix(stripped, 0)
    if end != len(stripped):
        raise ValueError("text behind the JSON value")
    return value


def _check(value: Any) -> None:
    """Refuse deep values and texts that cannot be encoded, without recursion."""
    level, depth = [value], 0
    while level:
        depth += 1
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += [*one.keys(), *one.values()]
            elif isinstance(one, list):
                below += one
            elif isinstance(one, str) and not _encodable(one):
                raise LoneSurrogateError("a lone surrogate")
        if depth > MAX_DEPTH and any(isinstance(one, dict | list) for one in level):
            raise TooDeepError(f"more than {MAX_DEPTH} levels")
        level = below


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is out of range")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique_keys
)
