import json

import pytest

from evidence import values
from evidence.values import jsonable, same


def _nested(depth):
    value = {"a": 1}
    for _ in range(depth):
        value = {"a": [value]}
    return value


def test_is_number_accepts_only_finite_numbers(no_number):
    assert not values.is_number(no_number)
    assert values.is_number(0)
    assert values.is_number(-2.5)
    assert values.is_number(2**63)


def test_counts_are_whole_and_not_negative():
    assert values.is_count(0)
    assert values.is_count(2**63)
    assert not any(map(values.is_count, (-1, 1.0, True, "1", None)))
    assert values.is_integer(-1)
    assert not values.is_integer(1.0)


def test_is_text_and_is_sha256(no_text):
    assert not values.is_text(no_text)
    assert not values.is_sha256(no_text)
    assert values.is_text(" a ")
    assert values.is_sha256("0aF" + "0" * 61)
    assert not values.is_sha256("0" * 63)
    assert not values.is_sha256("0" * 65)
    assert not values.is_sha256("g" * 64)
    assert not values.is_sha256("0" * 64 + "\n")


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (1, 1.0, True),
        (True, 1, False),
        (0, False, False),
        (None, False, False),
        ("1", 1, False),
        (float("nan"), float("nan"), False),
        ([1, [2]], (1, (2,)), True),
        ([1, 2], [2, 1], False),
        ([1], [1, 1], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": None}, False),
        ({}, [], False),
        (2**63, float(2**63), True),
        (b"", b"", False),
    ],
)
def test_same_compares_json_values(left, right, equal):
    assert same(left, right) is equal
    assert same(right, left) is equal


def test_same_walks_any_depth():
    assert same(_nested(20_000), _nested(20_000))
    assert not same(_nested(20_000), _nested(19_999))


def test_jsonable_keeps_a_json_value_as_it_is():
    value = {"b": [1, 2.5, None, True, "\ud800"], "a": {"x": -1}}
    assert json.dumps(jsonable(value)) == json.dumps(value)


def test_jsonable_replaces_what_json_cannot_hold():
    assert jsonable([float("nan"), float("-inf"), 10**5000, {1: b""}]) == [
        "(nan)",
        "(-inf)",
        "integer of 16610 bits",
        {"1": "(bytes)"},
    ]
    assert "nested deeper than 200 levels" in json.dumps(jsonable(_nested(5000)))


def test_show_keeps_printable_names_and_escapes_others():
    assert values.show("pfad_ü") == "pfad_ü"
    assert values.show("a\nb") == "a\\nb"
    assert values.show(None) == "None"


def test_spec_mapping_finds_the_spec_in_a_triage_document():
    spec = {"arms": [], "title": "t"}
    assert values.spec_mapping({"summary": "s", "spec": spec}) == spec
    assert values.spec_mapping(spec) == spec
    assert values.spec_mapping({"arms": [], "spec": {"x": 1}}) == {"arms": [], "spec": {"x": 1}}
    assert values.spec_mapping(None) == {}
    assert values.spec_mapping([1]) == {}
