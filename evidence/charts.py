"""Inline SVG pictures: an interval against its margin, and curves over steps.

They carry classes instead of colours, so that the page's style decides for light and dark, and a
title and description for readers who do not see them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from evidence.report_data import Chart, Series
from evidence.report_text import html_text, number

_WIDTH = 640
"""Of an interval's picture; curves are narrower, since two of them stand side by side."""
_CURVE_WIDTH = 440
_ZONE_WORDS_WIDTH = 118
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 44
_TICKS = 5
_Scale = Callable[[float], float]
_MARKERS = ("circle", "square", "triangle", "diamond")


def interval_svg(
    name: str, *, effect: float, lower: float, upper: float, margin: float, words: str
) -> str:
    """Draw one interval, its effect, and the margin it must clear.

    Args:
        name: the criterion.
        effect: the estimate.
        lower: lower end of the interval.
        upper: upper end.
        margin: the spec's margin.
        words: what the effect is a difference of.
    """
    low, high = _padded(min(lower, margin, 0.0), max(upper, margin, 0.0))
    height, middle = 128, 58

    def at(value: float) -> float:
        return _LEFT / 2 + (value - low) / (high - low) * (_WIDTH - _LEFT)

    description = (
        f"{words}: effect {number(effect, signed=True)}, interval from "
        f"{number(lower, signed=True)} to {number(upper, signed=True)}, margin {number(margin)}"
    )
    cut = at(margin)
    parts = [
        f'<rect class="refutes" x="{at(low):.1f}" y="22" width="{cut - at(low):.1f}" height="66"/>',
        f'<rect class="supports" x="{cut:.1f}" y="22" width="{at(high) - cut:.1f}" height="66"/>',
        *_zone_words(at(low), cut, at(high)),
        f'<line class="margin" x1="{cut:.1f}" x2="{cut:.1f}" y1="16" y2="92"/>',
        f'<text class="label" x="{cut:.1f}" y="11" text-anchor="middle">'
        f"margin {html_text(number(margin))}</text>",
        f'<line class="interval" x1="{at(lower):.1f}" x2="{at(upper):.1f}" '
        f'y1="{middle}" y2="{middle}"/>',
        *(
            f'<line class="cap" x1="{at(end):.1f}" x2="{at(end):.1f}" '
            f'y1="{middle - 9}" y2="{middle + 9}"/>'
            for end in (lower, upper)
        ),
        f'<circle class="effect" cx="{at(effect):.1f}" cy="{middle}" r="6"/>',
        _effect_label(at(effect), cut, number(effect, signed=True), y=middle + 26),
        _x_axis(low, high, at, y=92),
    ]
    return _svg(f"Criterion {name}", description, height, parts)


def _effect_label(x: float, margin_x: float, words: str, *, y: int) -> str:
    """Write the effect below its dot, or beside the margin's line where that would cross it."""
    is_close = abs(x - margin_x) < 26
    place = f'x="{max(x, margin_x) + 7:.1f}"' if is_close else f'x="{x:.1f}" text-anchor="middle"'
    return f'<text class="label" {place} y="{y}">{html_text(words)}</text>'


def _zone_words(low: float, cut: float, high: float) -> list[str]:
    """Name the two sides of the margin where there is room for it."""
    words = []
    if cut - low > _ZONE_WORDS_WIDTH:
        words.append(f'<text class="zone" x="{low + 6:.1f}" y="36">below: refutes</text>')
    if high - cut > _ZONE_WORDS_WIDTH:
        words.append(
            f'<text class="zone" x="{high - 6:.1f}" y="36" text-anchor="end">above: supports</text>'
        )
    return words


def line_svg(chart: Chart, *, index: int) -> str:
    """Draw the curves of all arms; points that are not finite leave a gap.

    Args:
        chart: what to draw.
        index: number of the chart on its page, for its ids.
    """
    height = 240
    xs = [x for series in chart.series for x, _ in series.points]
    ys = [y for series in chart.series for _, y in series.points if y is not None]
    x_low, x_high = (min(xs), max(xs)) if min(xs) < max(xs) else (min(xs) - 0.5, max(xs) + 0.5)
    y_low, y_high = _value_range(ys)

    def at_x(value: float) -> float:
        return _LEFT + (value - x_low) / (x_high - x_low) * (_CURVE_WIDTH - _LEFT - _RIGHT)

    def at_y(value: float) -> float:
        return height - _BOTTOM - (value - y_low) / (y_high - y_low) * (height - _BOTTOM - _TOP)

    parts = [_y_axis(y_low, y_high, at_y)]
    parts.append(_step_axis(x_low, x_high, at_x, y=height - _BOTTOM))
    parts.append(
        f'<text class="axis" x="{(_LEFT + _CURVE_WIDTH) / 2:.0f}" y="{height - 6}" '
        f'text-anchor="middle">{html_text(chart.x)}</text>'
    )
    for number_, series in enumerate(chart.series):
        located = [(at_x(x), None if y is None else at_y(y)) for x, y in series.points]
        parts.append(_curve(located, number_))
    last = "; ".join(f"{series.name}: {_ends(series)}" for series in chart.series)
    return _svg(
        chart.title,
        f"{chart.y} over {chart.x}. {last}",
        height,
        parts,
        width=_CURVE_WIDTH,
        index=index,
    )


def marker(index: int) -> str:
    """Return a small picture of a series' marker, for a legend."""
    return (
        f'<svg class="key" viewBox="0 0 24 12" width="24" height="12" aria-hidden="true">'
        f'<g class="series s{index % 4}"><path class="curve" d="M0 6H24"/>'
        f"{_marker(12.0, 6.0, index)}</g></svg>"
    )


def _svg(
    title: str,
    description: str,
    height: int,
    parts: Sequence[str],
    *,
    width: int = _WIDTH,
    index: int | None = None,
) -> str:
    suffix = f"-{index}" if index is not None else f"-{abs(_stable(title + description))}"
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-labelledby="title{suffix} desc{suffix}">'
        f'<title id="title{suffix}">{html_text(title)}</title>'
        f'<desc id="desc{suffix}">{html_text(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def _stable(text: str) -> int:
    return sum(ord(character) * (place + 1) for place, character in enumerate(text))


def _padded(low: float, high: float) -> tuple[float, float]:
    if low == high:
        gap = abs(low) or 1.0
        return low - gap / 2, high + gap / 2
    gap = (high - low) * 0.08
    return low - gap, high + gap


def _value_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of a vertical axis: nothing below 0 for values that are never below."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high == 0.0:
        return 0.0, 1.0
    padded_low, padded_high = _padded(low, high)
    return (max(padded_low, 0.0) if low >= 0.0 else padded_low), padded_high


def _nice_ticks(low: float, high: float, count: int = _TICKS) -> list[float]:
    """Return round numbers within a range, about ``count`` of them."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = math.ceil(low / step)
    ticks = [(first + i) * step for i in range(int((high - first * step) / step + 1e-9) + 1)]
    return [0.0 if abs(tick) < step / 1e6 else tick for tick in ticks]


def _x_axis(low: float, high: float, at: _Scale, *, y: int) -> str:
    parts = [f'<line class="rule" x1="{at(low):.1f}" x2="{at(high):.1f}" y1="{y}" y2="{y}"/>']
    for tick in _nice_ticks(low, high, 8):
        x = at(tick)
        parts.append(f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 5}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{y + 19}" text-anchor="middle">'
            f"{html_text(number(tick, digits=3))}</text>"
        )
    return "".join(parts)


def _step_axis(low: float, high: float, at: _Scale, *, y: int) -> str:
    whole = [tick for tick in _nice_ticks(low, high, 8) if tick == int(tick)]
    parts = [f'<line class="rule" x1="{_LEFT}" x2="{_CURVE_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>']
    parts += [
        f'<text class="tick" x="{at(tick):.1f}" y="{y + 17}" text-anchor="middle">{tick:.0f}</text>'
        for tick in whole
    ]
    return "".join(parts)


def _y_axis(low: float, high: float, at: _Scale) -> str:
    parts = []
    for tick in _nice_ticks(low, high):
        y = at(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_CURVE_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{html_text(number(tick, digits=3))}</text>"
        )
    return "".join(parts)


def _curve(points: Sequence[tuple[float, float | None]], index: int) -> str:
    path, pen_down = [], False
    for x, y in points:
        if y is None:
            pen_down = False
            continue
        path.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
        pen_down = True
    markers = [_marker(x, y, index) for x, y in points if y is not None]
    shown = "".join(markers) if len(markers) <= 60 else ""
    return f'<g class="series s{index % 4}"><path class="curve" d="{" ".join(path)}"/>{shown}</g>'


def _marker(x: float, y: float, index: int) -> str:
    kind = _MARKERS[index % len(_MARKERS)]
    if kind == "circle":
        return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    if kind == "square":
        return f'<rect class="mark" x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4"/>'
    if kind == "triangle":
        return f'<path class="mark" d="M{x:.1f} {y - 4.5:.1f}l4.2 7.5h-8.4z"/>'
    return f'<path class="mark" d="M{x:.1f} {y - 4.5:.1f}l4.5 4.5l-4.5 4.5l-4.5 -4.5z"/>'


def _ends(series: Series) -> str:
    values = [y for _, y in series.points if y is not None]
    if not values:
        return "no finite value"
    return f"from {number(values[0])} to {number(values[-1])}"
