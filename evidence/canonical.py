"""Canonical JSON, digests, and a JSON reader that accepts no surprises."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import isfinite
from typing import Any

from evidence.errors import InputError
from evidence.values import as_mapping

MAX_BYTES = 64 * 1024 * 1024
MAX_DEPTH = 200
MAX_NUMBER_CHARS = 400
_SEED_RANGE = 2**31

# The closing quote is optional, so that an open string is passed over once: otherwise the search
# would start again at each quote in it, and take time that grows with the square of the length.
_JSON_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NO_BRACKET = re.compile(r"[^\[\]{}]+")
_STEP = {"[": 1, "{": 1, "]": -1, "}": -1}


def canonical_bytes(value: Any) -> bytes:
    """Return the one JSON text of a value: sorted keys, no spaces, ASCII, no NaN.

    Args:
        value: nested dicts with text keys, lists, tuples, strings, numbers, booleans and None.
            Lone surrogates are written as escapes.

    Returns:
        ASCII bytes, equal for equal values whatever the key order.

    Raises:
        InputError: if the value holds a non-finite number, a type JSON has no form for, keys that
            cannot be sorted, or is nested too deep to be written.
    """
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
        )
    except (TypeError, ValueError, RecursionError) as error:
        expected = "a JSON value (finite numbers, text keys, moderate nesting)"
        raise InputError("value", value, expected) from error
    return text.encode("ascii")


def sha256_hex(data: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 of bytes as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def canonical_lines(values: Iterable[Any]) -> bytes:
    """Return JSON Lines: the canonical text of each value, and a line break after each."""
    return b"".join(canonical_bytes(value) + b"\n" for value in values)


def digest(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of a value.

    Raises:
        InputError: as `canonical_bytes`.
    """
    return sha256_hex(canonical_bytes(value))


def derive_seed(*parts: Any) -> int:
    """Derive a seed in [0, 2**31) from the canonical JSON of the parts.

    The same parts give the same seed in every process and on every machine; different parts give
    unrelated seeds.

    Raises:
        InputError: as `canonical_bytes`.
    """
    raw = hashlib.sha256(canonical_bytes(list(parts))).digest()
    return int.from_bytes(raw[:8], "big") % _SEED_RANGE


def loads_strict(
    data: bytes | bytearray | str,
    *,
    where: str | None = None,
    max_bytes: int = MAX_BYTES,
    max_depth: int = MAX_DEPTH,
) -> Any:
    """Read one JSON document, refusing everything that another reader may read differently.

    Refused: bytes that are not UTF-8, a byte order mark, duplicate keys in an object, NaN,
    Infinity and numbers too large for a float, number literals of more than 400 characters,
    nesting deeper than ``max_depth``, truncated text and text after the end. Time and memory are
    linear in the size of the data, which is bounded before anything else is looked at.

    Args:
        data: UTF-8 bytes, or text.
        where: name of the document, for the error.
        max_bytes: largest accepted size (characters, for text).
        max_depth: deepest accepted nesting of objects and lists.

    Returns:
        The value: dict, list, str, int, float, bool or None.

    Raises:
        InputError: naming what was wrong and where.
    """
    if len(data) > max_bytes:
        raise InputError("size", len(data), f"at most {max_bytes} bytes", where=where)
    text = _as_text(data, where=where)
    _check_depth(text, max_depth=max_depth, where=where)
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_pairs,
            parse_int=_bounded_int,
            parse_float=_finite_float,
            parse_constant=_refuse_constant,
        )
    except InputError as error:
        raise InputError(error.field, error.value, error.expected, where=where) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        found = text[error.pos : error.pos + 20]
        raise InputError(place, found, f"valid JSON ({error.msg})", where=where) from None
    except RecursionError:
        raise InputError("nesting", "deeper", "fewer nested levels", where=where) from None


def stored_facts(text: str | None, *, where: str) -> Mapping[str, Any]:
    """Read a JSON object from a table's column; empty where there is none, or none can be read."""
    if not text:
        return {}
    try:
        return as_mapping(loads_strict(text, where=where))
    except InputError:
        return {}


def _as_text(data: bytes | bytearray | str, *, where: str | None) -> str:
    if isinstance(data, str):
        text = data
    else:
        try:
            text = bytes(data).decode("utf-8")
        except UnicodeDecodeError as error:
            found = bytes(data[error.start : error.start + 8])
            raise InputError(f"byte {error.start}", found, "UTF-8 text", where=where) from None
    if text.startswith("\ufeff"):
        raise InputError("byte 0", "byte order mark", "JSON without one", where=where)
    return text


def _check_depth(text: str, *, max_depth: int, where: str | None) -> None:
    """Refuse deep nesting before the recursive parser sees it.

    Brackets inside strings do not count. Where the text is not JSON this may look at brackets the
    parser would never reach; it is then refused all the same, for one reason or the other.
    """
    if text.count("[") + text.count("{") <= max_depth:
        return
    brackets = _NO_BRACKET.sub("", _JSON_STRING.sub("", text))
    for depth in accumulate(map(_STEP.__getitem__, brackets)):
        if depth > max_depth:
            raise InputError("nesting", depth, f"at most {max_depth} levels", where=where)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InputError("object key", key, "no key twice in one object")
            seen.add(key)
    return found


def _bounded_int(literal: str) -> int:
    if len(literal) > MAX_NUMBER_CHARS:
        raise _too_long(literal)
    return int(literal)


def _finite_float(literal: str) -> float:
    if len(literal) > MAX_NUMBER_CHARS:
        raise _too_long(literal)
    number = float(literal)
    if not isfinite(number):
        raise InputError("number", literal, "a number that fits a 64-bit float")
    return number


def _too_long(literal: str) -> InputError:
    expected = f"a number literal of at most {MAX_NUMBER_CHARS} characters"
    return InputError("number", f"{literal[:20]}... ({len(literal)} characters)", expected)


def _refuse_constant(literal: str) -> Any:
    raise InputError("number", literal, "a finite number")
