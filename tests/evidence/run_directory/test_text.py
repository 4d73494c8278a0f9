"""The escape is reversible for every text, and leaves ordinary text as it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evidence.errors import InputError
from evidence.text import escape_text, unescape_text

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()))


@given(ANY_TEXT)
def test_escape_comes_back(text):
    """Any text, surrogates and NUL included, survives UTF-8 and comes back."""
    stored = escape_text(text).encode("utf-8").decode("utf-8")

    assert unescape_text(stored) == text
    assert "\x00" not in stored


def test_escape_leaves_ordinary_text():
    """Text with accents, emoji, backslashes and line breaks is stored as it is."""
    text = "é 😀 \\frac{1}{2}\n\u2028\x1b[0m"

    assert escape_text(text) == text


def test_escape_of_a_lone_surrogate():
    """A lone surrogate becomes U+241B and its four digits; U+241B is escaped like it."""
    assert escape_text("a\ud83d\x00\u241b") == "a\u241bd83d\u241b0000\u241b241b"


def test_unescape_refuses_half_an_escape():
    with pytest.raises(InputError, match="four hex digits"):
        unescape_text("a\u241bd8")
