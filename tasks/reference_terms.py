"""The independent float64 reference of a loss, chosen by the loss's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from losses.errors import LossConfigError
from losses.inputs import LossInputs
from losses.reference import policy
from losses.reference.arrays import TokenTerms

Floats = NDArray[np.float64]


def reference_terms(
    loss: Mapping[str, Any], target_logprobs: NDArray[Any], inputs: LossInputs
) -> TokenTerms:
    """Terms and slopes of one sequence, computed without the code that trains.

    Args:
        loss: settings of the loss.
        target_logprobs: [T] nats.
        inputs: what the loss is given for the same targets.

    Raises:
        LossConfigError: if there is no reference of this kind of loss.
    """
    current = np.asarray(target_logprobs, dtype=np.float64)
    sampling, advantages = inputs.sampling_logprobs_T.numpy(), inputs.advantages_T.numpy()
    mask = inputs.loss_mask_T.numpy()
    anchor = None if inputs.anchor_logprobs_T is None else inputs.anchor_logprobs_T.numpy()
    if loss["kind"] == "importance_sampling":
        return policy.importance_sampling(current, sampling, advantages, mask)
    if loss["kind"] == "grpo_clip":
        return policy.clipped_surrogate(
            current,
            sampling if anchor is None else anchor,
            advantages,
            mask,
            low=float(loss["clip_low_threshold"]),
            high=float(loss["clip_high_threshold"]),
            dual_clip=loss["dual_clip"],
        )
    if loss["kind"] == "dppo":
        form = policy.MaskForm(
            divergence=loss["divergence"],
            delta_low=loss["delta_low"],
            delta_high=loss["delta_high"],
            ratio_cap=loss["ratio_cap"],
        )
        return policy.dppo(current, sampling, advantages, mask, form=form, anchor=anchor)
    message = f"loss.kind: {loss['kind']!r}; expected one with an independent reference"
    raise LossConfigError(message)


def builtin_loss(loss: Mapping[str, Any]) -> tuple[str, dict[str, float]] | None:
    """The service's built-in loss that computes the same, with its settings; None if none does."""
    if loss["kind"] == "importance_sampling":
        return "importance_sampling", {}
    if loss["kind"] == "grpo_clip" and loss["dual_clip"] is None and "anchor" not in loss:
        return "ppo", {
            "clip_low_threshold": float(loss["clip_low_threshold"]),
            "clip_high_threshold": float(loss["clip_high_threshold"]),
        }
    return None
