"""Builders with keyword defaults for the loss tests."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from losses.inputs import LossInputs

GRPO = {
    "kind": "grpo_clip",
    "clip_low_threshold": 0.8,
    "clip_high_threshold": 1.2,
    "dual_clip": None,
}
DPPO = {
    "kind": "dppo",
    "divergence": "binary_tv",
    "anchor": "sampling",
    "delta_low": 0.15,
    "delta_high": 0.15,
    "ratio_cap": 10.0,
}
CISPO = {"kind": "cispo", "clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
IMPORTANCE = {"kind": "importance_sampling"}
POLICY_CONFIGS: dict[str, dict[str, Any]] = {
    "importance_sampling": IMPORTANCE,
    "grpo_clip": GRPO,
    "grpo_clip_dual": GRPO | {"dual_clip": 3.0, "clip_high_threshold": 1.28},
    "grpo_clip_limit": GRPO | {"dual_clip": 3.0, "log_ratio_limit_nats": 2.0},
    "grpo_clip_recompute": GRPO | {"anchor": "recompute"},
    "cispo": CISPO,
    "dppo_tv": DPPO,
    "dppo_tv_asymmetric": DPPO | {"delta_low": 0.05, "delta_high": 0.3, "ratio_cap": 1.5},
    "dppo_tv_recompute": DPPO | {"anchor": "recompute"},
    "dppo_tv_uncapped": DPPO | {"ratio_cap": None},
    "dppo_kl": DPPO | {"divergence": "binary_kl", "delta_low": 0.05, "delta_high": 0.05},
    "dppo_kl_recompute": DPPO
    | {"divergence": "binary_kl", "anchor": "recompute", "delta_low": 0.02, "delta_high": 0.1},
    "dppo_ratio": DPPO | {"divergence": "ratio", "delta_low": 0.2, "delta_high": 0.28},
    "dppo_ratio_recompute": DPPO
    | {"divergence": "ratio", "anchor": "recompute", "delta_low": 0.2, "delta_high": 0.2},
    "dppo_ablation_positive": DPPO
    | {"divergence": "ratio_ablation_positive", "delta_low": 0.2, "delta_high": 0.3},
    "dppo_ablation_negative": DPPO
    | {"divergence": "ratio_ablation_negative", "delta_low": 0.4, "delta_high": 0.2},
    "dppo_ablation_both": DPPO
    | {"divergence": "ratio_ablation_both", "delta_low": 0.3, "delta_high": 0.3},
    "dppo_none": DPPO | {"divergence": "none", "delta_low": None, "delta_high": None},
}


def tensor(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def logs(*probabilities: float) -> Tensor:
    """Log-probabilities of given probabilities, float64."""
    return torch.log(tensor(*probabilities))


def inputs(
    sampling: Tensor,
    advantages: Tensor,
    mask: list[bool] | Tensor | None = None,
    **over: Tensor | None,
) -> LossInputs:
    if mask is None:
        mask = [True] * len(sampling)
    return LossInputs(
        sampling_logprobs_T=sampling,
        advantages_T=advantages,
        loss_mask_T=torch.as_tensor(mask, dtype=torch.bool),
        **over,
    )


def random_batch(seed: int, *, tokens: int = 60) -> dict[str, np.ndarray]:
    """One batch with both advantage signs, zeros, padding, tails and large drift."""
    rng = np.random.default_rng(seed)
    sampling = -rng.exponential(1.0, tokens)
    sampling[rng.random(tokens) < 0.1] = -rng.uniform(10.0, 30.0)
    drift = rng.normal(0.0, rng.choice([0.05, 0.4, 1.5]), tokens)
    current = np.minimum(sampling + drift, 0.0)
    anchor = np.minimum(sampling + rng.normal(0.0, 0.02, tokens), 0.0)
    advantages = rng.normal(0.0, 1.0, tokens) * (rng.random(tokens) < 0.85)
    mask = rng.random(tokens) < 0.8
    return {
        "current": current.astype(np.float32).astype(np.float64),
        "sampling": sampling.astype(np.float32).astype(np.float64),
        "anchor": anchor.astype(np.float32).astype(np.float64),
        "advantages": advantages,
        "mask": mask,
    }
