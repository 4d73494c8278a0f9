r"""One reversible escape for text that Unicode or a database cannot hold.

Models sample lone surrogates (half of a pair, as in ``"\ud83d"``) and NUL. Neither survives UTF-8
files, Parquet or PostgreSQL. At the boundary of a file such a character becomes U+241B (the
symbol for escape) and four hexadecimal digits; U+241B itself is escaped too, so that every text
comes back as it was. All other text is stored as it is.
"""

from __future__ import annotations

import re

from evidence.errors import InputError

_MARK = "\u241b"
_TO_ESCAPE = re.compile("[\x00\u241b\ud800-\udfff]")
_ESCAPED = re.compile("\u241b([0-9a-f]{4})?")


def escape_text(text: str) -> str:
    """Return the text in a form that any file can hold; `unescape_text` undoes it."""
    return _TO_ESCAPE.sub(lambda match: f"{_MARK}{ord(match[0]):04x}", text)


def unescape_text(text: str) -> str:
    """Return the text that `escape_text` was given.

    Raises:
        InputError: if an escape is not complete.
    """
    return _ESCAPED.sub(_unescaped, text) if _MARK in text else text


def _unescaped(match: re.Match[str]) -> str:
    if match[1] is None:
        raise InputError("text", match.string[match.start() :][:8], "four hex digits after U+241B")
    return chr(int(match[1], 16))
