"""Typed models over JSON documents, and their errors as one readable line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evidence.canonical import loads_strict
from evidence.errors import InputError, shorten

Item = TypeVar("Item")
Model = TypeVar("Model", bound=BaseModel)

Many = Annotated[tuple[Item, ...], Field(strict=False)]
"""A JSON list, held as a tuple; its items are as strict as the model that holds it."""

MAX_SEED = 2**63 - 1
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
"""A seed that every service and every table column can hold."""

Name = Annotated[str, Field(min_length=1)]


class OpenRecord(BaseModel):
    """A document of someone else's making: typed where needed, unknown fields kept, frozen.

    Numbers are never read from text, booleans are never numbers, and no number is NaN or infinite.
    """

    model_config = ConfigDict(
        frozen=True, extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class ClosedRecord(BaseModel):
    """A document that this program defines: as strict as `OpenRecord`, unknown fields refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


def read_object(data: Mapping[str, Any] | bytes | str, *, where: str | None) -> dict[str, Any]:
    """Return a JSON object from its text, or from a mapping that was read already.

    Raises:
        InputError: if the text is not strict JSON or is not an object. A number that is not finite
            is reported with the path of the field that holds it.
    """
    value = _read_text(data, where=where) if isinstance(data, bytes | str) else data
    if not isinstance(value, Mapping):
        raise InputError("document", value, "a JSON object", where=where)
    return dict(value)


def build(model: type[Model], value: Mapping[str, Any], *, where: str | None) -> Model:
    """Validate a mapping against a model.

    Raises:
        InputError: naming the first field that is wrong, its value and what was expected.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _input_error(error, model, value, where=where) from None


def _input_error(
    error: ValidationError,
    model: type[BaseModel],
    document: Mapping[str, Any],
    *,
    where: str | None,
) -> InputError:
    """Turn a validation error into an `InputError` about its first problem.

    How many more there are is said in the expectation, so that nobody thinks one repair is enough.
    The description of the field, where it has one, is added: it says what to do.
    """
    problems = _leaves(error.errors(include_url=False))
    first = problems[0]
    place = _place(first, document)
    cause = first.get("ctx", {}).get("error")
    others = len(problems) - 1
    more = f" (and {others} more {'problem' if others == 1 else 'problems'})" if others else ""
    if isinstance(cause, InputError):
        field = ".".join(part for part in (json_path(place), cause.field) if part)
        return InputError(field, cause.value, cause.expected + more, where=where)
    value = None if first["type"] == "missing" else first["input"]
    if first["type"].startswith("union_tag"):
        value = value.get("kind") if isinstance(value, Mapping) else value
    remedy = _description(model, place, document)
    expected = _expectation(first) + (f"; {remedy}" if remedy else "") + more
    return InputError(json_path(place) or "document", value, expected, where=where)


def _place(problem: Any, document: Any) -> tuple[int | str, ...]:
    """Return a problem's location in the document, without the labels of union members in it."""
    node, place = document, []
    for part in problem["loc"]:
        if isinstance(node, Mapping):
            if part not in node and node.get("kind") == part:
                continue
            node = node.get(part)
        elif isinstance(node, list | tuple) and isinstance(part, int) and part < len(node):
            node = node[part]
        else:
            continue
        place.append(part)
    return (*place, "kind") if problem["type"].startswith("union_tag") else tuple(place)


def _description(model: type[BaseModel], place: tuple[int | str, ...], document: Any) -> str | None:
    """Return the description of the field at a place, if every step to it is a typed record."""
    models, node, found = [model], document, None
    for part in place:
        named = [m for m in models if part in m.model_fields]
        if named:
            kind = node.get("kind") if isinstance(node, Mapping) else None
            chosen = [m for m in named if _kind_of(m) in (None, kind)] or named
            field = chosen[0].model_fields[str(part)]
            found, models = field.description, list(record_types(field.annotation))
        else:
            found = None
        try:
            node = node[part] if node is not None else None
        except (KeyError, IndexError, TypeError):
            node = None
    return found


def _kind_of(model: type[BaseModel]) -> str | None:
    """Return the tag of a record that is a member of a tagged union."""
    field = model.model_fields.get("kind")
    return str(get_args(field.annotation)[0]) if field else None


def record_types(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the record types that an annotation mentions, inside lists and mappings too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from record_types(part)


def json_path(parts: tuple[int | str, ...]) -> str:
    """Write a location the way a reader types it: ``decision_rule.criteria[0].margin``."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            key = part if part.isprintable() and part.isascii() else shorten(part)[1:-1]
            text += f".{key}" if text else key
    return text


def walk(
    value: Any, path: tuple[int | str, ...] = ()
) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    """Yield every leaf of a JSON value with its location, in document order."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from walk(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from walk(inner, (*path, index))
    else:
        yield path, value


def _read_text(data: bytes | str, *, where: str | None) -> Any:
    try:
        return loads_strict(data, where=where)
    except InputError as error:
        if error.field != "number":
            raise
        raise _locate_number(data, error, where=where) from None


def _locate_number(data: bytes | str, error: InputError, *, where: str | None) -> InputError:
    """Name the field of a number that strict reading refused; its nesting was bounded already."""
    try:
        loose = json.loads(data)
    except ValueError:
        return error
    for path, leaf in walk(loose):
        if isinstance(leaf, float) and not isfinite(leaf):
            return InputError(json_path(path), leaf, "a finite number", where=where)
    return error


def _leaves(problems: list[Any]) -> list[Any]:
    """Drop what only follows from a problem further in (a list whose only item is wrong)."""
    places = [problem["loc"] for problem in problems]
    return [
        problem
        for problem in problems
        if not any(
            len(place) > len(problem["loc"]) and place[: len(problem["loc"])] == problem["loc"]
            for place in places
        )
    ]


_KINDS = {
    "missing": "a value (this field is required)",
    "extra_forbidden": "no such field here",
    "float_type": "a number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "finite_number": "a finite number",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def _expectation(problem: Any) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    bounds = {
        "greater_than": ("gt", "a number above {}"),
        "greater_than_equal": ("ge", "a number of at least {}"),
        "less_than": ("lt", "a number below {}"),
        "less_than_equal": ("le", "a number of at most {}"),
        "string_too_short": ("min_length", "text of at least {} character"),
        "too_short": ("min_length", "at least {} entry"),
        "literal_error": ("expected", "{}"),
        "union_tag_invalid": ("expected_tags", "one of {}"),
    }
    if kind in _KINDS:
        return _KINDS[kind]
    if kind in bounds:
        key, text = bounds[kind]
        return text.format(context[key])
    if kind == "union_tag_not_found":
        return "an object that names its kind"
    return str(problem["msg"]).removeprefix("Value error, ")
