"""Progress: bars on a terminal, sparse plain lines elsewhere."""

import io

from deploy.progress import ProgressBars, ProgressLines, listener
from tasks.progress import ProgressEvent


class Terminal(io.StringIO):
    def isatty(self):
        return True


def clock(*moments):
    ticking = iter(moments)
    return lambda: next(ticking)


def test_lines_report_a_count_at_most_every_ten_seconds():
    """Events at 1, 5 and 12 s: the first and the one after ten seconds are written."""
    out = io.StringIO()
    lines = ProgressLines(out, clock=clock(0.0, 1.0, 5.0, 12.0))
    for done in (1, 2, 3):
        lines(ProgressEvent("train", "grpo", done, 10))

    assert out.getvalue().splitlines() == [
        "[   1.0 s] train (grpo) 1/10",
        "[  12.0 s] train (grpo) 3/10, about 38 s left",
    ]


def test_lines_always_report_a_message_and_the_end():
    """Messages and finished counts are never swallowed."""
    out = io.StringIO()
    lines = ProgressLines(out, clock=clock(0.0, 1.0, 1.1, 1.2))
    lines(ProgressEvent("eval", "dppo", 1, 2))
    lines(ProgressEvent("waiting", None, 0, 0, "no capacity, next try in 60 s"))
    lines(ProgressEvent("eval", "dppo", 2, 2))

    assert out.getvalue().splitlines()[1:] == [
        "[   1.1 s] waiting: no capacity, next try in 60 s",
        "[   1.2 s] eval (dppo) 2/2",
    ]


def test_listener_is_chosen_by_the_stream():
    """A terminal gets bars; a file gets lines."""
    assert isinstance(listener(Terminal()), ProgressBars)
    assert isinstance(listener(io.StringIO()), ProgressLines)


def test_bars_show_label_and_count():
    """The bar of a phase and arm shows both, and how many of how many are done."""
    out = Terminal()
    with ProgressBars(out) as bars:
        bars(ProgressEvent("base_evaluation", None, 3, 40))
        bars(ProgressEvent("base_evaluation", None, 40, 40, "accuracy [0.25]"))

    assert "base evaluation" in out.getvalue()
    assert "40/40" in out.getvalue()
    assert "accuracy [0.25]" in out.getvalue()


def test_lines_estimate_the_time_left_of_the_current_step_alone():
    """A bar that starts again at 100 s is not slowed down by the 100 s before it."""
    out = io.StringIO()
    lines = ProgressLines(out, clock=clock(0.0, 1.0, 100.0, 111.0))
    for done in (3, 1, 2):
        lines(ProgressEvent("sampling", "dppo", done, 4))

    assert out.getvalue().splitlines()[1:] == [
        "[ 100.0 s] sampling (dppo) 1/4",
        "[ 111.0 s] sampling (dppo) 2/4, about 22 s left",
    ]
