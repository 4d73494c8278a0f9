"""Scored observations: read from a record or from a retained file, and held as columns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from evidence.canonical import loads_strict, sha256_hex
from evidence.errors import InputError
from evidence.values import is_number, is_sha256

MAX_ROWS = 100_000
MAX_FILE_BYTES = 10 * 1024 * 1024
FIELDS = ("item_id", "arm", "seed", "metric", "value", "evaluator_id")
_SPACED_COLON = re.compile(rb'"[ \t\r\n]+:')
_TEXTS = ("item_id", "arm", "metric", "evaluator_id")


@dataclass(frozen=True, slots=True)
class Observations:
    """Measured outcomes, one position per observation in every column.

    Attributes:
        item_ids: the item that was scored.
        arms: the arm whose checkpoint was scored.
        seeds: the training seed of that arm.
        metrics: what was measured.
        values: [n] float64, finite, in the metric's own unit.
        evaluator_ids: identity of the evaluator that measured it.
    """

    item_ids: Sequence[str]
    arms: Sequence[str]
    seeds: Sequence[int]
    metrics: Sequence[str]
    values: NDArray[np.float64]
    evaluator_ids: Sequence[str]

    def __len__(self) -> int:
        return len(self.values)

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> Self:
        """Read rows with the contract's six fields; further fields are ignored.

        Raises:
            InputError: naming the first row and field that is missing or of another kind. Text is
                never a number, a boolean is never a number or a seed, and no value is NaN.
        """
        listed = rows if isinstance(rows, list | tuple) else list(rows)
        return cls.from_columns({name: _column(listed, name) for name in FIELDS})

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Self:
        """Read columns of equal length, by the contract's field names.

        Raises:
            InputError: as `from_rows`.
        """
        found = {name: _plain(columns, name) for name in FIELDS}
        lengths = {name: len(column) for name, column in found.items()}
        if len(set(lengths.values())) > 1:
            raise InputError("observations", lengths, "columns of one length")
        for name in _TEXTS:
            _check_types(name, found[name], {str}, "text")
            _check_filled(name, found[name])
        _check_types("seed", found["seed"], {int}, "a whole number")
        return cls(
            item_ids=found["item_id"],
            arms=found["arm"],
            seeds=found["seed"],
            metrics=found["metric"],
            values=_finite(found["value"]),
            evaluator_ids=found["evaluator_id"],
        )


class NotRetainedError(InputError):
    """An observation file cannot be read as it stands, so that nothing in it counts."""


def read_file(reference: object, files: Mapping[str, bytes]) -> list[Any]:
    """Return the rows of the observation file that a decision names.

    The file is JSON Lines, a JSON list, or an object with a list under ``observations``.

    Args:
        reference: ``{"name": ..., "sha256": ...}`` as reported.
        files: retained evidence files by name.

    Raises:
        NotRetainedError: if no file with that name and those bytes is retained, or it is larger
            than 10 MiB, has more than 100,000 rows, or is no UTF-8 JSON.
    """
    name = reference.get("name") if isinstance(reference, Mapping) else None
    expected = reference.get("sha256") if isinstance(reference, Mapping) else None
    data = files.get(name) if isinstance(name, str) else None
    if not isinstance(data, bytes | bytearray | memoryview) or not is_sha256(expected):
        raise NotRetainedError("observations_file", name, "a retained file")
    data = bytes(data)
    if sha256_hex(data) != expected.lower():
        raise NotRetainedError("observations_file", name, "a retained file")
    if len(data) > MAX_FILE_BYTES:
        raise NotRetainedError("size", len(data), f"at most {MAX_FILE_BYTES} bytes")
    try:
        return parse_rows(data, where=name)
    except InputError as error:
        raise NotRetainedError(error.field, error.value, error.expected, where=name) from None


def parse_rows(data: bytes, *, where: str | None = None) -> list[Any]:
    """Read the rows of JSON Lines, a JSON list, or an object with ``observations``.

    Raises:
        InputError: if the bytes are none of these, or hold more than 100,000 rows.
    """
    try:
        text = data.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise InputError(
            f"byte {error.start}", data[error.start : error.start + 8], "UTF-8"
        ) from None
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise InputError("observations", "", "at least one row", where=where)
    if text.startswith("["):
        found = loads_strict(text, where=where)
    elif len(lines) == 1 or not lines[0].rstrip().endswith("}"):
        whole = loads_strict(text, where=where)
        found = whole.get("observations", [whole]) if isinstance(whole, dict) else [whole]
    else:
        found = _json_lines(lines, where=where)
    if not isinstance(found, list):
        raise InputError("observations", found, "a list of rows", where=where)
    if len(found) > MAX_ROWS:
        raise InputError("observations", len(found), f"at most {MAX_ROWS} rows", where=where)
    return found


def _json_lines(lines: list[str], *, where: str | None) -> list[Any]:
    joined = "[" + ",\n".join(lines) + "]"
    if not _one_flat_object_each(lines):
        return [loads_strict(line, where=f"{where} line {n}") for n, line in enumerate(lines, 1)]
    return flat_rows(joined) or list(loads_strict(joined, where=where))


def _one_flat_object_each(lines: list[str]) -> bool:
    """Whether every line is one object without anything nested, so that all can be read at once.

    Lines are then joined by a comma and a line break; a string cannot run over a line break, so
    the joined text is valid JSON only if each line is.
    """
    return all(
        line.strip()[:1] == "{"
        and line.strip()[-1:] == "}"
        and line.count("{") == 1
        and line.count("}") == 1
        for line in lines
    )


def flat_rows(joined: str | bytes) -> list[Any] | None:
    """Read a list of flat objects with the plain parser, None where that could hide something.

    The plain parser keeps the last of two equal keys. Every key is followed by a colon at once
    (nothing stands before a colon but the closing quote), so as many such places as there are keys
    in the result means that no key was lost, and that no object lies within another.
    """
    data = joined.encode() if isinstance(joined, str) else joined
    spaced = any(space + b":" in data for space in (b" ", b"\t", b"\r", b"\n"))
    if spaced and _SPACED_COLON.search(data):
        return None
    try:
        found: list[Any] = json.loads(data, parse_constant=_refuse)
        keys = sum(map(len, found))
    except (ValueError, TypeError, RecursionError):
        return None
    return found if data.count(b'":') == keys else None


def _refuse(literal: str) -> Any:
    raise ValueError(literal)


def _column(rows: Sequence[Any], name: str) -> list[Any]:
    try:
        return list(map(itemgetter(name), rows))
    except (KeyError, TypeError, IndexError):
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise InputError(f"observations[{index}]", row, "an object") from None
            if name not in row:
                raise InputError(f"observations[{index}].{name}", None, "a value") from None
        raise


def _plain(columns: Mapping[str, Any], name: str) -> Sequence[Any]:
    column = columns.get(name)
    if column is None:
        raise InputError(f"observations.{name}", None, "a column")
    listed = column.tolist() if hasattr(column, "tolist") else column
    return listed if isinstance(listed, list | tuple) else list(listed)


def _check_types(name: str, column: Sequence[Any], allowed: set[type], expected: str) -> None:
    if set(map(type, column)) <= allowed:
        return
    index = next(i for i, value in enumerate(column) if type(value) not in allowed)
    raise InputError(f"observations[{index}].{name}", column[index], expected)


def _check_filled(name: str, column: Sequence[str]) -> None:
    if "" in column:
        index = column.index("")
        raise InputError(f"observations[{index}].{name}", "", "text that is not empty")


def _finite(column: Sequence[Any]) -> NDArray[np.float64]:
    _check_types("value", column, {int, float}, "a number")
    try:
        values = np.array(column, dtype=np.float64)
    except OverflowError:
        values = np.array([np.nan if not is_number(value) else value for value in column])
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InputError(f"observations[{index}].value", column[index], "a finite number")
    return values
