"""Which of a service's built-in losses computes the same as a registered one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def builtin_loss(loss: Mapping[str, Any]) -> tuple[str, dict[str, float]] | None:
    """The service's built-in loss that computes the same, with its settings; None if none does."""
    if loss["kind"] == "importance_sampling":
        return "importance_sampling", {}
    plain = loss.get("anchor", "sampling") == "sampling" and loss.get("dual_clip") is None
    if loss["kind"] == "grpo_clip" and plain and loss.get("log_ratio_limit_nats") is None:
        return "ppo", {
            "clip_low_threshold": float(loss["clip_low_threshold"]),
            "clip_high_threshold": float(loss["clip_high_threshold"]),
        }
    return None
