"""Every form of turn has one outcome."""

import json
import time

import pytest

from envs.tool_calls import MAX_TURN_CHARS, parse_turn

CALL = '<tool_call>{"name": "find", "arguments": {"q": "a"}}</tool_call>'


def nested(levels):
    """JSON of so many objects inside each other."""
    return '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        ("Hello, what is your email?", "message", None),
        ("", "malformed", "empty"),
        (" \n\t", "malformed", "empty"),
        ("x" * (MAX_TURN_CHARS + 1), "malformed", "too_long"),
        (CALL, "call", None),
        (f"Let me look.\n{CALL}\n", "call", None),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "call", None),
        ('<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', "malformed", "bad_json"),
        ("<tool_call>find(q)</tool_call>", "malformed", "bad_json"),
        ("<tool_call></tool_call>", "malformed", "bad_json"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "malformed", "bad_json"),
        (
            '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
            "malformed",
            "bad_json",
        ),
        ('<tool_call>{"name": "f", "arguments": {}} or so</tool_call>', "malformed", "bad_json"),
        ('<tool_call>{"a":' * 50_000, "malformed", "too_long"),
        ("<tool_call>" + "[" * 90_000, "malformed", "too_deep"),
        (f'<tool_call>{{"name": "f", "arguments": {nested(23)}}}</tool_call>', "call", None),
        (
            f'<tool_call>{{"name": "f", "arguments": {nested(24)}}}</tool_call>',
            "malformed",
            "too_deep",
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
            "malformed",
            "bad_json",
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"\\ud83d": 1}}</tool_call>',
            "malformed",
            "bad_text",
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
            "malformed",
            "bad_json",
        ),
        ('<tool_call>{"name": "f"}</tool_call>', "malformed", "bad_shape"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "malformed", "bad_shape"),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "malformed", "bad_shape"),
        (
            '<tool_call>{"name": "f", "arguments": {}, "id": 1}</tool_call>',
            "malformed",
            "bad_shape",
        ),
        ("<tool_call>[]</tool_call>", "malformed", "bad_shape"),
        ('<tool_call>{"name": "f", "arguments": {}}', "malformed", "unclosed"),
        ('<tool_call>{"name": "f", "argum', "malformed", "bad_json"),
        ("<function=f><parameter=x>1", "malformed", "unknown_form"),
        ('{"name": "f"}</tool_call>', "malformed", "unknown_form"),
        ("###STOP###", "message", None),
    ],
)
def test_turn_has_one_outcome(text, kind, problem):
    found = parse_turn(text)

    assert (found.kind, found.problem) == (kind, problem)
    assert bool(found.explanation) == (problem is not None)


@pytest.mark.parametrize(
    "value",
    [
        "the </tool_call> token",
        "<tool_call>{}</tool_call>",
        'quoted " and } brace',
        "{[(",
        "back\\slash",
        "\u2028 line",
        "é 漢 🙂",
    ],
)
def test_tags_and_braces_inside_strings_end_nothing(value):
    text = f'<tool_call>{{"name": "f", "arguments": {{"q": {json.dumps(value)}}}}}</tool_call>'

    found = parse_turn(text)

    assert (found.kind, found.arguments, found.extra_calls) == ("call", {"q": value}, 0)


def test_only_the_first_of_several_calls_is_taken_and_the_others_are_counted():
    found = parse_turn(CALL + '\n<tool_call>{"name": "write", "arguments": {}}</tool_call>' + CALL)

    assert (found.name, found.extra_calls) == ("find", 2)


def test_words_before_a_call_are_kept():
    assert parse_turn(f"  One moment. {CALL}").text == "One moment."


def test_lone_surrogate_in_a_string_makes_no_call():
    found = parse_turn('<tool_call>{"name": "f", "arguments": {"q": "\\ud83d"}}</tool_call>')
    pair = parse_turn('<tool_call>{"name": "f", "arguments": {"q": "\\ud83d\\ude00"}}</tool_call>')

    assert (found.kind, found.problem, dict(found.arguments)) == ("malformed", "bad_text", {})
    assert pair.arguments == {"q": "\U0001f600"}


def test_tags_read_as_text_are_noted():
    plain = '<tool_call>{"name": "f", "arguments": {"q": "a </tool_call> b"}}</tool_call>'

    assert parse_turn(plain).tag_in_text
    assert parse_turn(xml(("zip", "a </tool_call> b")), xml_types=XML_TYPES).tag_in_text
    assert not parse_turn(CALL + CALL).tag_in_text


def test_ten_megabytes_take_no_time():
    started = time.perf_counter()

    found = parse_turn("<tool_call>{" * 900_000)

    assert found.problem == "too_long"
    assert time.perf_counter() - started < 0.5


XML_TYPES = {"find": {"zip": "string", "n": "integer", "items": "array"}}


def xml(*parameters, name="find"):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ([], {}),
        ([("zip", "19122"), ("n", "3")], {"zip": "19122", "n": 3}),
        ([("items", '["1", "2"]')], {"items": ["1", "2"]}),
        ([("n", "three")], {"n": "three"}),
        ([("zip", "")], {"zip": ""}),
        ([("zip", "a </parameter> b")], {"zip": "a </parameter> b"}),
        ([("zip", "</tool_call> and </function>")], {"zip": "</tool_call> and </function>"}),
        ([("zip", "two\nlines")], {"zip": "two\nlines"}),
        ([("other", "7")], {"other": "7"}),
        ([("n", "NaN")], {"n": "NaN"}),
        ([("items", "[" * 5000)], {"items": "[" * 5000}),
        ([("items", '["\\ud83d"]')], {"items": '["\\ud83d"]'}),
    ],
)
def test_xml_form_is_read_with_the_types_of_the_schema(parameters, arguments):
    found = parse_turn(f"Let me see.\n{xml(*parameters)}", xml_types=XML_TYPES)

    assert (found.kind, found.name, dict(found.arguments)) == ("call", "find", arguments)
    assert found.text == "Let me see."


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>\n<function=find>\n</tool_call>", "bad_xml"),
        ("<tool_call>\n<function=find>\n<parameter=n>\n3\n</function>\n</tool_call>", "bad_xml"),
        ("<tool_call>\n<function=\n</function></tool_call>", "bad_xml"),
        (xml(("n", "1"), ("n", "2")), "bad_xml"),
        (xml(("n", "1")).removesuffix("</tool_call>"), "unclosed"),
        ("<function=find>\n</function>", "unknown_form"),
    ],
)
def test_incomplete_xml_is_malformed(text, problem):
    assert parse_turn(text, xml_types=XML_TYPES).problem == problem


def test_xml_form_is_unknown_where_only_json_is_used():
    assert parse_turn(xml(("n", "1"))).problem == "unknown_form"


def test_json_form_is_read_beside_the_xml_form():
    assert parse_turn(CALL, xml_types=XML_TYPES).arguments == {"q": "a"}
