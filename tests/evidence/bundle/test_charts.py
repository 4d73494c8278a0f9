"""Pictures stay within their frame and say in words what they show."""

import re

import pytest

from evidence.charts import interval_svg, line_svg
from evidence.report_data import Chart, Series


def _chart(*series, x="rollout step"):
    return Chart(
        title="Reward", x=x, y="reward", series=series, source="f", notes=(), reading="Higher."
    )


def _numbers(svg, name):
    return [float(value) for value in re.findall(rf'\b{name}="(-?[\d.]+)"', svg)]


@pytest.mark.parametrize(
    ("effect", "lower", "upper", "margin"),
    [
        (0.75, 0.32, 1.18, 0.0),
        (-0.5, -0.9, -0.1, 0.03),
        (0.0, 0.0, 0.0, 0.0),
        (5.0, 4.0, 6.0, -5.0),
    ],
)
def test_interval_stays_within_its_frame(effect, lower, upper, margin):
    svg = interval_svg(
        "p", effect=effect, lower=lower, upper=upper, margin=margin, words="a minus b"
    )

    positions = [value for name in ("x", "x1", "x2", "cx") for value in _numbers(svg, name)]
    assert min(positions) >= 0
    assert max(positions) <= 640
    assert "a minus b: effect" in svg


def test_interval_lies_on_the_right_side_of_its_margin():
    """The bar of an interval above the margin starts to the right of the margin's line."""
    svg = interval_svg("p", effect=0.7, lower=0.3, upper=1.1, margin=0.0, words="w")

    margin = float(re.search(r'class="margin" x1="([\d.]+)"', svg)[1])
    start = float(re.search(r'class="interval" x1="([\d.]+)"', svg)[1])
    assert start > margin


def test_curve_leaves_a_gap_where_there_is_no_number():
    """Three points with the middle one missing are two separate strokes."""
    svg = line_svg(_chart(Series("a", ((0.0, 1.0), (1.0, None), (2.0, 3.0)))), index=0)

    path = re.search(r'class="curve" d="([^"]*)"', svg)[1]
    assert path.count("M") == 2
    assert "L" not in path
    assert "a: from 1 to 3" in svg


@pytest.mark.parametrize(
    "points",
    [((0.0, 1.0),), ((0.0, None),), ((3.0, 2.0), (3.0, 2.0)), ((0.0, 1e-12), (1.0, 1e12))],
)
def test_curve_of_odd_data_is_drawn(points):
    svg = line_svg(_chart(Series("a", points)), index=0)

    assert svg.endswith("</svg>")
    assert "nan" not in svg


def test_curves_have_different_markers():
    """Arms are told apart without colour: circle, square, triangle, diamond."""
    series = [Series(name, ((0.0, 1.0), (1.0, 2.0))) for name in "abcd"]
    svg = line_svg(_chart(*series), index=0)

    assert svg.count("<circle") == 2
    assert svg.count('<rect class="mark"') == 2
    assert [f"series s{i}" in svg for i in range(4)] == [True] * 4


def test_names_are_escaped():
    svg = line_svg(_chart(Series("<b>", ((0.0, 1.0),)), x='"><script>'), index=0)

    assert "<script>" not in svg
    assert "<b>" not in svg
