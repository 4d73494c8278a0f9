"""Built-in losses of the training service: value and derivative per token, summed, never averaged.

Each loss is a function of every token's log-probability alone, so its derivative is given in closed
form; tokens are the entries of the target tensor, [T] or [T, K].

With lp the token's log-probability, A its advantage, r = exp(lp - sampling logprob) and w its
weight, the losses are:

* ``cross_entropy``: -sum w * lp
* ``importance_sampling``: -sum r * A
* ``ppo``: -sum min(r * A, clamp(r, low, high) * A)
* ``cispo``: -sum clamp(r, low, high) * lp * A, the clamped ratio taken as a constant
* ``dro``: -sum (lp * A - beta / 2 * (lp - sampling logprob)^2)

The thresholds bound the ratio itself. Sources: PPO, arXiv:1707.06347, eq. 7. CISPO,
arXiv:2506.13585, section 3. DRO, arXiv:2405.19107, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evidence.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class LossValue:
    """Loss of some tokens."""

    per_token: Tensor
    """Contribution of each token, whose sum is the loss."""
    derivative: Tensor
    """Of the loss by each token's log-probability."""


Config = Mapping[str, float]
LossFunction = Callable[[Tensor, Mapping[str, Tensor], Config], LossValue]
"""(logprobs, inputs of the same shape, thresholds) -> value and derivative."""


def _cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Config) -> LossValue:
    del config
    weights = inputs["weights"]
    return LossValue(-logprobs * weights, -weights)


def _importance_sampling(
    logprobs: Tensor, inputs: Mapping[str, Tensor], config: Config
) -> LossValue:
    del config
    value = -torch.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]
    return LossValue(value, value)


def _ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Config) -> LossValue:
    ratio = torch.exp(logprobs - inputs["logprobs"])
    plain = ratio * inputs["advantages"]
    clipped = _clamp(ratio, config) * inputs["advantages"]
    derivative = torch.where(plain <= clipped, -plain, torch.zeros(()))
    return LossValue(-torch.minimum(plain, clipped), derivative)


def _cispo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Config) -> LossValue:
    ratio = _clamp(torch.exp(logprobs - inputs["logprobs"]), config)
    factor = -ratio * inputs["advantages"]
    return LossValue(factor * logprobs, factor)


def _dro(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Config) -> LossValue:
    distance = logprobs - inputs["logprobs"]
    value = logprobs * inputs["advantages"] - config["beta"] / 2 * distance**2
    return LossValue(-value, config["beta"] * distance - inputs["advantages"])


def _clamp(ratio: Tensor, config: Config) -> Tensor:
    return ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


@dataclass(frozen=True, slots=True)
class BuiltinLoss:
    """A loss that the service computes itself."""

    function: LossFunction
    inputs: tuple[str, ...]
    """Needed beside ``target_tokens``, each of its shape."""
    defaults: Mapping[str, float]
    """Settings that ``loss_fn_config`` may change."""


_POLICY = ("logprobs", "advantages")
LOSSES: dict[str, BuiltinLoss] = {
    "cross_entropy": BuiltinLoss(_cross_entropy, ("weights",), {}),
    "importance_sampling": BuiltinLoss(_importance_sampling, _POLICY, {}),
    "ppo": BuiltinLoss(_ppo, _POLICY, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": BuiltinLoss(_cispo, _POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": BuiltinLoss(_dro, _POLICY, {"beta": 0.05}),
}
"""Every built-in loss by its name on the wire. ``weights`` are 1 where a datum has none."""


def find_loss(name: str) -> BuiltinLoss:
    """Return a built-in loss.

    Raises:
        InputError: if there is none of that name.
    """
    if name not in LOSSES:
        raise InputError("loss_fn", name, f"one of {', '.join(LOSSES)}")
    return LOSSES[name]


def settings(loss: BuiltinLoss, config: Mapping[str, float] | None) -> dict[str, float]:
    """Return the loss's settings with those that the request changes.

    Raises:
        InputError: for a setting the loss does not have, or that is no finite number.
    """
    merged = dict(loss.defaults)
    for name, value in (config or {}).items():
        if name not in merged:
            known = ", ".join(merged) or "no setting"
            raise InputError(f"loss_fn_config.{name}", value, f"one of: {known}")
        if isinstance(value, bool | str) or not abs(value) < float("inf"):
            raise InputError(f"loss_fn_config.{name}", value, "a finite number")
        merged[name] = float(value)
    return merged
