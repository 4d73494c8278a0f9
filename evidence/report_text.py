"""How values are shown in a report: numbers as words where they are none, texts without surprises."""

from __future__ import annotations

import html
import math
import re
from typing import Any

from evidence.text import escape_text

NOT_MEASURED = "not measured"
_WORDS = {"NaN": "not a number", "Infinity": "infinite", "-Infinity": "minus infinite"}
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~])")


def number(value: Any, *, digits: int = 4, signed: bool = False) -> str:
    """Return a number for people: at most ``digits`` significant places, words for the rest.

    Args:
        value: a number, None, or one of the texts that stand for numbers that are not finite.
        digits: significant digits.
        signed: whether positive numbers get a plus sign.
    """
    if value is None:
        return NOT_MEASURED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return _WORDS.get(value, printable(value))
    if isinstance(value, float) and not math.isfinite(value):
        return _WORDS["NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"]
    if value == 0:
        return "0"
    if isinstance(value, int):
        return f"{value:+,}" if signed else f"{value:,}"
    text = f"{value:{'+' if signed else ''}.{digits}g}"
    return text.replace("e-0", "e-").replace("e+0", "e+")


def printable(text: str) -> str:
    """Return a text in which nothing is invisible: control and direction marks become escapes."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", escape_text(text))


def html_text(value: Any) -> str:
    """Return a value as HTML text, safe inside elements and quoted attributes."""
    return html.escape(printable(str(value)), quote=True)


def markdown_text(value: Any) -> str:
    """Return a value as one line of Markdown text, also inside a table cell."""
    one_line = " ".join(printable(str(value)).split())
    return _MARKDOWN.sub(r"\\\1", one_line)


def finite(value: Any) -> float | None:
    """Return a value as a finite float, None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def size(count: int) -> str:
    """Return a number of bytes for people."""
    if count < 1024:
        return f"{count} B"
    if count < 1024**2:
        return f"{count / 1024:.1f} KiB"
    return f"{count / 1024**2:.1f} MiB"


def duration(seconds: float | None) -> str:
    """Return a time span for people."""
    if seconds is None:
        return NOT_MEASURED
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{minutes // 60} h {minutes % 60} min"
