"""A built-in loss stands for a registered one only where it computes the same."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.builtin_loss import builtin_loss

CLIP = {
    "kind": "grpo_clip",
    "clip_low_threshold": 0.8,
    "clip_high_threshold": 1.2,
    "dual_clip": None,
}
PPO = ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})


@pytest.mark.parametrize("extra", [{}, {"anchor": "sampling"}, {"log_ratio_limit_nats": None}])
def test_plain_clip_is_the_services_ppo(extra: dict[str, Any]) -> None:
    assert builtin_loss({**CLIP, **extra}) == PPO


@pytest.mark.parametrize(
    "extra", [{"anchor": "recompute"}, {"dual_clip": 3.0}, {"log_ratio_limit_nats": 20.0}]
)
def test_clip_that_the_service_does_not_compute_has_none(extra: dict[str, Any]) -> None:
    assert builtin_loss({**CLIP, **extra}) is None


def test_mask_has_none() -> None:
    assert builtin_loss({"kind": "dppo"}) is None
    assert builtin_loss({"kind": "importance_sampling"}) == ("importance_sampling", {})
