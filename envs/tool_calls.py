"""Read a tool call out of a model's turn, with one typed outcome for everything a model can write.

A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. The JSON is read by a JSON
parser from its opening brace on, so a tag or a brace inside a string ends nothing. Models that are
trained on an XML form inside the same tags write that instead (`envs.xml_calls`), where it is
allowed. What cannot be read is never guessed at: it becomes a `malformed` turn whose problem is
told to the model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from envs.strict_json import MAX_DEPTH, LoneSurrogateError, TooDeepError, read_prefix
from envs.xml_calls import ParameterTypes, parse_xml_call, starts_xml_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_TURN_CHARS = 100_000
"""Longer turns are malformed without being read."""

Problem = Literal[
    "empty",
    "too_long",
    "bad_json",
    "bad_xml",
    "bad_shape",
    "bad_text",
    "too_deep",
    "unclosed",
    "unknown_form",
]
"""Names of `envs.outcomes.OUTCOMES`."""

EXPLANATIONS: Mapping[Problem, str] = {
    "empty": "the reply was empty",
    "too_long": f"the reply has more than {MAX_TURN_CHARS} characters",
    "bad_json": "the text after <tool_call> is not valid JSON",
    "bad_xml": "the function block after <tool_call> is not complete",
    "bad_shape": 'a call needs exactly "name" (text) and "arguments" (object)',
    "bad_text": "a text holds half of a character pair",
    "too_deep": f"the arguments are nested deeper than {MAX_DEPTH} levels",
    "unclosed": "</tool_call> is missing",
    "unknown_form": "this form of call is not known here",
}
_OTHER_FORMS = re.compile(r"</tool_call>|<function=|<\|python_tag\|>|\[TOOL_CALLS\]")
_WHITESPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What a model's turn is.

    `message`: words for the user, in `text`. `call`: `name` and `arguments`, with any words before
    it in `text`; `extra_calls` more were written in the same turn and are not executed;
    `tag_in_text` says that a tag stands inside the call and was read as text there. `malformed`: neither, for the reason `problem`.
    """

    kind: Literal["message", "call", "malformed"]
    text: str = ""
    name: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    extra_calls: int = 0
    tag_in_text: bool = False
    problem: Problem | None = None

    @property
    def explanation(self) -> str:
        """The problem in words for the model; empty where there is none."""
        return "" if self.problem is None else EXPLANATIONS[self.problem]


def parse_turn(text: str, *, xml_types: ParameterTypes | None = None) -> ParsedTurn:
    """Read one turn. Takes time linear in the length of the text.

    Args:
        text: the turn as decoded, without its stop token.
        xml_types: types of every tool's parameters where the XML form is allowed; None where only
            JSON is.
    """
    if len(text) > MAX_TURN_CHARS:
        return ParsedTurn(kind="malformed", problem="too_long")
    if not text.strip():
        return ParsedTurn(kind="malformed", problem="empty")
    start = text.find(OPEN)
    if start >= 0:
        return _parse_call(text, start, xml_types)
    if _OTHER_FORMS.search(text):
        return ParsedTurn(kind="malformed", text=text.strip(), problem="unknown_form")
    return ParsedTurn(kind="message", text=text.strip())


def _parse_call(text: str, start: int, xml_types: ParameterTypes | None) -> ParsedTurn:
    """Read the call that opens at `start`."""
    before = text[:start].strip()
    inside = _skip_whitespace(text, start + len(OPEN))
    is_xml = starts_xml_call(text, inside)
    if is_xml and xml_types is None:
        return ParsedTurn(kind="malformed", text=before, problem="unknown_form")
    try:
        if is_xml and xml_types is not None:
            name, arguments, end = parse_xml_call(text, inside, types=xml_types)
            value: Any = {"name": name, "arguments": arguments}
        else:
            value, end = read_prefix(text, inside)
    except ValueError as error:
        return ParsedTurn(kind="malformed", text=before, problem=_problem(error, is_xml=is_xml))
    close = _skip_whitespace(text, end)
    if not text.startswith(CLOSE, close):
        # Something else behind the call is no call; nothing behind it is a forgotten tag.
        problem: Problem = "unclosed" if close == len(text) else "bad_json"
        return ParsedTurn(kind="malformed", text=before, problem=problem)
    if not _has_call_shape(value):
        return ParsedTurn(kind="malformed", text=before, problem="bad_shape")
    return ParsedTurn(
        kind="call",
        text=before,
        name=value["name"],
        arguments=value["arguments"],
        extra_calls=text.count(OPEN, close + len(CLOSE)),
        tag_in_text=any(text.find(tag, inside, end) >= 0 for tag in (OPEN, CLOSE)),
    )


def _problem(error: ValueError, *, is_xml: bool) -> Problem:
    if isinstance(error, TooDeepError):
        return "too_deep"
    if isinstance(error, LoneSurrogateError):
        return "bad_text"
    return "bad_xml" if is_xml else "bad_json"


def _has_call_shape(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"name", "arguments"}
        and isinstance(value["name"], str)
        and isinstance(value["arguments"], dict)
    )


def _skip_whitespace(text: str, position: int) -> int:
    found = _WHITESPACE.match(text, position)
    return position if found is None else found.end()
