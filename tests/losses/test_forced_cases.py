"""Forced cases hold, cover what they promise, and see a wrong loss."""

import dataclasses

import pytest
import torch

from losses.forced_cases import FORCED_SETS, run_forced_cases
from losses.registry import make_loss

TOKENS = [(case, token) for case in FORCED_SETS for token in case.tokens]


@pytest.mark.parametrize(
    "result", run_forced_cases(), ids=lambda r: f"{r.token}-{r.implementation}"
)
def test_forced_case_holds(result):
    """Keep, removal and gradient are as worked out by hand, by torch and by the reference."""
    assert result.passed, f"{result.case}: {result.actual}; expected {result.expected}"


def test_forced_cases_cover_both_outcomes_and_both_signs():
    """Must and must not activate, A > 0, A < 0 and A = 0, padding, tails and the cap."""
    removed = {token.advantage > 0 for _, token in TOKENS if token.removed}
    kept = {token.advantage > 0 for _, token in TOKENS if token.keep and token.advantage}

    assert removed == {True, False}
    assert kept == {True, False}
    assert any(token.advantage == 0 for _, token in TOKENS)
    assert sum(not token.trained for _, token in TOKENS) >= 3
    assert {case.name for case, _ in TOKENS} >= {
        "dppo_tv_directions",
        "dppo_tv_tails",
        "dppo_tv_cap",
        "dppo_tv_at_delta",
        "dppo_tv_beyond_delta",
    }


def failing(build):
    return {(r.case, r.token) for r in run_forced_cases(build=build) if not r.passed}


def test_symmetric_mask_is_seen():
    """A mask that drops either direction fails on both recoveries."""

    def build(config):
        loss = make_loss(config)

        def symmetric(target, inputs):
            there = loss(target, inputs)
            back = loss(target, dataclasses.replace(inputs, advantages_T=-inputs.advantages_T))
            keep = there.keep_T & back.keep_T
            terms = torch.where(keep, there.per_token_T, torch.zeros_like(there.per_token_T))
            return dataclasses.replace(there, loss=terms.sum(), keep_T=keep)

        return symmetric

    assert failing(build) >= {
        ("dppo_tv_directions", "down_positive_recovers"),
        ("dppo_tv_directions", "up_negative_recovers"),
    }


@pytest.mark.parametrize(
    ("over", "seen"),
    [
        ({"delta_high": 0.3}, ("dppo_tv_directions", "up_positive")),
        ({"delta_low": 0.3}, ("dppo_tv_directions", "down_negative")),
        ({"ratio_cap": 20.0}, ("dppo_tv_cap", "cap_hit")),
        ({"divergence": "ratio"}, ("dppo_tv_tails", "tail_rises_within_tail")),
        (
            {"divergence": "none", "delta_low": None, "delta_high": None},
            ("dppo_tv_directions", "up_positive"),
        ),
    ],
)
def test_other_variant_is_seen(over, seen):
    """A wrong threshold, cap or form fails on the case made for it."""

    def build(config):
        return make_loss(config | over if config["kind"] == "dppo" else config)

    assert seen in failing(build)
