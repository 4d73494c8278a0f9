"""The four fixed rules: ends included, and a removed gradient for each sign that occurs."""

import pytest

from evidence.conclusion import Findings, conclude
from evidence.diagnostic_rules import judge

SOUND = {
    "masked_fraction": 0.001,
    "ppo_counterfactual_fraction": 0.0005,
    "drift_abs_q90": 0.005,
    "positive_advantage_tokens": 10,
    "negative_advantage_tokens": 10,
    "removed_positive": 1,
    "removed_negative": 1,
}


def test_lower_ends_are_inside():
    assert judge(SOUND).active


def test_upper_end_is_inside_and_beyond_is_not():
    assert judge({**SOUND, "masked_fraction": 0.3}).active
    assert not judge({**SOUND, "masked_fraction": 0.3000001}).active


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("masked_fraction", 0.00099),
        ("ppo_counterfactual_fraction", 0.00049),
        ("drift_abs_q90", 0.0049),
        ("removed_positive", 0),
        ("removed_negative", 0),
    ],
)
def test_each_rule_can_fail_alone(name, value):
    result = judge({**SOUND, name: value})

    assert result.status == "failed"
    assert sum(check.status == "failed" for check in result.checks) == 1


def test_sign_that_does_not_occur_needs_nothing_removed():
    assert judge({**SOUND, "negative_advantage_tokens": 0, "removed_negative": 0}).active


def test_no_sign_at_all_is_not_active():
    figures = {**SOUND, "positive_advantage_tokens": 0, "negative_advantage_tokens": 0}

    assert judge(figures).status == "failed"


@pytest.mark.parametrize("name", SOUND)
def test_figure_that_was_not_measured_leaves_it_open(name):
    assert judge({**SOUND, name: None}).status == "unverified"


def test_record_s_figures_pass():
    """0.00114, 0.0137, 0.0239, 50 and 46: the recorded diagnostic was active."""
    record = {
        "masked_fraction": 96 / 84496,
        "ppo_counterfactual_fraction": 1157 / 84496,
        "drift_abs_q90": 0.023858560402555296,
        "positive_advantage_tokens": 1,
        "negative_advantage_tokens": 1,
        "removed_positive": 50,
        "removed_negative": 46,
    }

    assert judge(record).active


def test_changed_files_come_before_every_other_cause():
    findings = Findings(broken=("one",), missing=("two",), learning_rate=0.0)

    assert conclude(findings).cause == "records_disagree"


def test_forced_case_that_fails_is_a_defect():
    found = conclude(Findings(forced={"cases": 72, "failed": 1}))

    assert (found.category, found.cause) == (
        "code_or_instrumentation_defect",
        "forced_case_failed",
    )
