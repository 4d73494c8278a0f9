"""Read the XML form of a tool call, as Qwen3.5's chat template asks for it.

::

    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>

A value runs to the next line that starts with ``</parameter>``, so tags inside a line are text.
Values carry no type; the tool's schema says which of them are texts, and a postal code stays one.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from envs.strict_json import read_whole

_FUNCTION = re.compile(r"<function=([^>\n]{1,200})>[ \t]*\n")
_PARAMETER = re.compile(r"[ \t]*<parameter=([^>\n]{1,200})>[ \t]*\n")
_PARAMETER_END = "\n</parameter>"
_FUNCTION_END = re.compile(r"\s*</function>")
_BLANK = re.compile(r"\s*")

ParameterTypes = Mapping[str, Mapping[str, str]]
"""Tool name to parameter name to JSON schema type."""


class XmlCall(NamedTuple):
    """A call that was read, and where in the text it ended."""

    name: str
    arguments: dict[str, Any]
    end: int


def starts_xml_call(text: str, position: int) -> bool:
    """Whether a call in XML form opens at a position of the text."""
    return text.startswith("<function=", position)


def parse_xml_call(text: str, position: int, *, types: ParameterTypes) -> XmlCall:
    """Read the call that opens at a position.

    Args:
        text: the turn.
        position: where ``<function=`` stands.
        types: parameter types by tool; a parameter that is not listed counts as a text.

    Raises:
        ValueError: if it is not a complete call, or names a parameter twice.
    """
    opening = _FUNCTION.match(text, position)
    if opening is None:
        raise ValueError("no function name")
    name, here = opening.group(1).strip(), opening.end()
    arguments: dict[str, Any] = {}
    while (parameter := _PARAMETER.match(text, _skip_lines(text, here))) is not None:
        key = parameter.group(1).strip()
        # The newline before the end tag belongs to the tag; an empty value has only that one.
        end = text.find(_PARAMETER_END, parameter.end() - 1)
        if end < 0 or key in arguments:
            raise ValueError("a parameter is not closed or is there twice")
        value = text[parameter.end() : max(end, parameter.end())]
        arguments[key] = _typed(value, types.get(name, {}).get(key, "string"))
        here = end + len(_PARAMETER_END)
    closing = _FUNCTION_END.match(text, here)
    if closing is None:
        raise ValueError("</function> is missing")
    return XmlCall(name, arguments, closing.end())


def _skip_lines(text: str, position: int) -> int:
    found = _BLANK.match(text, position)
    return position if found is None else found.end()


def _typed(value: str, kind: str) -> Any:
    """A value as its schema type says; what cannot be read as such stays text."""
    if kind == "string":
        return value
    try:
        return read_whole(value)
    except ValueError:
        return value
