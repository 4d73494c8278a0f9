import hashlib
import pickle
import time

import pytest

from evidence.canonical import canonical_bytes, derive_seed, digest, loads_strict, sha256_hex
from evidence.errors import ConflictError, InputError, shorten


def test_canonical_bytes_sorts_keys_and_escapes_all_but_ascii():
    assert canonical_bytes({"b": 1, "a": ["ß", 1.0, None]}) == b'{"a":["\\u00df",1.0,null],"b":1}'


def test_canonical_bytes_writes_lone_surrogates_as_escapes():
    assert canonical_bytes("\ud83d") == b'"\\ud83d"'


def _nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: 2, "a": 3}, {1, 2}, b"x"])
def test_canonical_bytes_refuses_what_json_cannot_hold(value):
    with pytest.raises(InputError, match="expected a JSON value"):
        canonical_bytes(value)


def test_canonical_bytes_refuses_what_is_nested_too_deep():
    with pytest.raises(InputError, match="moderate nesting"):
        canonical_bytes(_nested(100_000))


def test_digest_is_the_sha256_of_the_canonical_text():
    assert digest({"b": 1, "a": 2}) == hashlib.sha256(b'{"a":2,"b":1}').hexdigest()
    assert sha256_hex(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_derive_seed_is_fixed_by_its_parts_and_fits_31_bits():
    """First 8 bytes of SHA-256 of '["spec","grpo",0]', big endian, modulo 2**31."""
    raw = hashlib.sha256(b'["spec","grpo",0]').digest()
    assert derive_seed("spec", "grpo", 0) == int.from_bytes(raw[:8], "big") % 2**31
    assert derive_seed("spec", "grpo", 0) != derive_seed("spec", "grpo", "0")
    assert all(0 <= derive_seed(i) < 2**31 for i in range(200))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, 2.5, true, null, "x"]}', {"a": [1, 2.5, True, None, "x"]}),
        ('"[[[["', "[[[["),
        (b'"\xc3\x9f"', "ß"),
        ('"\\ud800"', "\ud800"),
        ('"\\u0000"', "\x00"),
        (str(2**63), 2**63),
        ("[" * 200 + "]" * 200, None),
        ("-" + "1" * 399, int("-" + "1" * 399)),
    ],
)
def test_loads_strict_reads_json(text, value):
    found = loads_strict(text)
    assert value is None or found == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 1}', "object key: expected no key twice in one object, found 'a'"),
        ('[{"x": {"b": 1, "b": 2}}]', "object key"),
        ("NaN", "a finite number, found 'NaN'"),
        ("[Infinity]", "a finite number"),
        ("[-Infinity]", "a finite number"),
        ("1e999", "a number that fits a 64-bit float"),
        ('{"a": [1', "line 1 column 9: expected valid JSON"),
        ("", "expected valid JSON"),
        ("{} {}", "Extra data"),
        ('"a\nb"', "Invalid control character"),
        (b"\xff", "byte 0: expected UTF-8 text"),
        (b'"\xed\xa0\x80"', "UTF-8 text"),
        ("\ufeff{}", "byte order mark"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
        ("[" * 201 + "]" * 201, "at most 200 levels, found 201"),
        ('{"a":' * 201 + "1" + "}" * 201, "at most 200 levels"),
        ("1" * 401, "at most 400 characters"),
        ("0." + "1" * 400, "at most 400 characters"),
        ('["' + '[" , "' * 300, "Unterminated string"),
    ],
)
def test_loads_strict_refuses_what_others_may_read_otherwise(text, message):
    with pytest.raises(InputError) as caught:
        loads_strict(text, where="record.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("record.json: ")
    assert "\n" not in str(caught.value)


def test_loads_strict_counts_only_brackets_outside_strings():
    """300 brackets in one string are no nesting; an escaped quote does not end it."""
    assert loads_strict('["\\"' + "[" * 300 + '"]') == ['"' + "[" * 300]
    assert len(loads_strict("[" + "[]," * 500 + "[]]")) == 501


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 10**7,
        b"[" * 10**7 + b"]" * 10**7,
        b'{"a":' * 10**6,
        b"1" * 10**7,
        b"1." + b"1" * 10**7,
        b'"' + b'\\"[' * 10**6,
        b'["' + b"\\[" * 10**6,
        b"]" * 10**6,
        b'"\\' * 10**6,
    ],
    ids=[
        "lists",
        "closed lists",
        "objects",
        "integer",
        "decimal",
        "string",
        "open string",
        "ends",
        "slashes",
    ],
)
def test_loads_strict_ends_soon_on_hostile_input(data):
    """Linear time, no recursion: a couple of seconds even on a busy machine."""
    start = time.process_time()
    with pytest.raises(InputError):
        loads_strict(data)
    assert time.process_time() - start < 10


def test_loads_strict_looks_at_the_size_first():
    with pytest.raises(InputError, match="size: expected at most 3 bytes, found 4"):
        loads_strict(b"1234", max_bytes=3)
    assert loads_strict(b"123", max_bytes=3) == 123


def test_shorten_gives_one_printable_line_for_any_value():
    assert shorten("a\nb\ud800\x00") == "'a\\nb\\ud800\\x00'"
    assert shorten("x" * 500) == "'" + "x" * 116 + "..."
    assert shorten(_nested(100_000)) == "list of 1"
    assert shorten(10**5000) == "integer of 16610 bits"
    assert shorten(2.5) == "2.5"
    assert shorten(object()) == "object"


def test_input_error_survives_a_trip_between_processes():
    error = ConflictError("steps", 3, "4", where="spec.json")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ConflictError
    assert str(again) == str(error) == "spec.json: steps: expected 4, found 3"
