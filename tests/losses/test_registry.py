"""Building losses from configurations: nothing is guessed, every refusal names what is allowed."""

import pytest

from losses.cispo import Cispo
from losses.dppo import Dppo
from losses.dppo_rule import DIVERGENCES, DppoRule
from losses.errors import LossConfigError
from losses.grpo_clip import GrpoClip
from losses.importance_sampling import ImportanceSampling
from losses.registry import KINDS, make_loss
from losses.sdpo_logit import SdpoLogit
from losses.sdpo_token_level import SdpoTokenLevel
from tests.losses.builders import CISPO, DPPO, GRPO, IMPORTANCE

LOGIT = {"kind": "sdpo_logit", "alpha": 0.5, "top_k": 20, "add_tail": True, "is_clip": 2.0}


def test_every_kind_is_built_with_its_settings():
    """The values arrive as written."""
    assert make_loss(IMPORTANCE) == ImportanceSampling()
    assert make_loss(GRPO | {"dual_clip": 3}) == GrpoClip(
        clip_low_threshold=0.8, clip_high_threshold=1.2, dual_clip=3.0
    )
    assert make_loss(CISPO) == Cispo(clip_low_threshold=0.5, clip_high_threshold=2.0)
    assert make_loss(DPPO | {"delta_low": 0.1}) == Dppo(
        rule=DppoRule(divergence="binary_tv", anchor="sampling", delta_low=0.1, delta_high=0.15),
        ratio_cap=10.0,
    )
    assert make_loss({"kind": "sdpo_token", "is_clip": None}) == SdpoTokenLevel(is_clip=None)
    assert make_loss(LOGIT) == SdpoLogit(alpha=0.5, support="topk_tail", is_clip=2.0)
    assert make_loss(LOGIT | {"add_tail": False}).support == "topk_renormalised"
    assert make_loss(LOGIT | {"top_k": None}).support == "full"


@pytest.mark.parametrize("kind", ["grpo", None, "", 3, ["dppo"]])
def test_unknown_kind_names_the_allowed_ones(kind):
    """All of them are in the message."""
    with pytest.raises(LossConfigError, match="expected one of") as caught:
        make_loss({"kind": kind})

    assert all(name in str(caught.value) for name in KINDS)


@pytest.mark.parametrize("config", [GRPO, DPPO, CISPO, LOGIT, {"kind": "sdpo_token", "is_clip": 1}])
def test_no_required_setting_has_a_default(config):
    """Each one left out is named."""
    for name in set(config) - {"kind"}:
        short = {key: value for key, value in config.items() if key != name}
        with pytest.raises(LossConfigError, match=f"missing {name}"):
            make_loss(short)


@pytest.mark.parametrize("config", [IMPORTANCE, GRPO, DPPO, CISPO, LOGIT])
def test_unknown_setting_is_refused(config):
    """A misspelt setting is never ignored."""
    with pytest.raises(LossConfigError, match="unknown clip_ratio_c"):
        make_loss(config | {"clip_ratio_c": 3.0})


def test_unknown_divergence_names_the_allowed_ones():
    """All of them are in the message."""
    with pytest.raises(LossConfigError, match="divergence: 'tv'") as caught:
        make_loss(DPPO | {"divergence": "tv"})

    assert all(name in str(caught.value) for name in DIVERGENCES)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DPPO | {"anchor": "old"}, r"anchor: 'old'; expected one of \['sampling', 'recompute'\]"),
        (DPPO | {"delta_low": -0.1}, "delta_low: -0.1; expected a number >= 0"),
        (DPPO | {"delta_high": None}, "delta_high: None; expected a number >= 0"),
        (DPPO | {"delta_high": "0.15"}, "delta_high: '0.15'; expected a number"),
        (DPPO | {"delta_high": True}, "delta_high: True; expected a number"),
        (DPPO | {"delta_high": float("nan")}, "delta_high: nan; expected a finite number"),
        (DPPO | {"ratio_cap": 0}, "ratio_cap: 0.0; expected a number > 0 or null"),
        (DPPO | {"ratio_cap": float("inf")}, "ratio_cap: inf; expected a finite number"),
        (DPPO | {"divergence": "none"}, "delta_low: 0.15; expected null"),
        (DPPO | {"divergence": "topk_tv"}, "top_k: None with divergence 'topk_tv'"),
        (DPPO | {"top_k": 20}, "top_k: 20 with divergence 'binary_tv'"),
        (
            DPPO | {"divergence": "topk_tv", "top_k": 20, "anchor": "recompute"},
            r"anchor: 'recompute' with divergence 'topk_tv'; expected one of \['sampling'\]",
        ),
        (DPPO | {"divergence": 5}, "divergence: 5; expected text"),
        (GRPO | {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}, "not epsilons"),
        (GRPO | {"clip_low_threshold": 0.0}, "expected 0 < low <= 1 <= high"),
        (GRPO | {"dual_clip": 1.0}, "dual_clip: 1.0; expected a number > 1 or null"),
        (GRPO | {"log_ratio_limit_nats": 0}, "log_ratio_limit_nats: 0.0"),
        (CISPO | {"clip_low_threshold": 1.5}, "expected 0 <= low <= 1 <= high"),
        (LOGIT | {"alpha": 1.5}, "alpha: 1.5"),
        (LOGIT | {"add_tail": None}, "add_tail: None; expected true or false"),
        (LOGIT | {"is_clip": 0}, "is_clip: 0.0"),
        ({"kind": "sdpo_token", "is_clip": -1}, "is_clip: -1.0"),
    ],
)
def test_bad_value_is_named(config, message):
    """Field, value and expectation are in the message."""
    with pytest.raises(LossConfigError, match=message):
        make_loss(config)
