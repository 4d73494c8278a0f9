"""AdamW on an adapter's flat parameter vector."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from evidence.canonical import canonical_bytes
from evidence.errors import InputError


@dataclass(frozen=True, slots=True)
class AdamWConfig:
    """Settings of one step; the defaults are those of the wire protocol."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Longest gradient, longer ones are shortened to it; 0 for no limit."""

    def __post_init__(self) -> None:
        """Refuse what no step can be taken with."""
        bounds = {
            "learning_rate": (self.learning_rate, 0.0, math.inf),
            "beta1": (self.beta1, 0.0, 1.0),
            "beta2": (self.beta2, 0.0, 1.0),
            "eps": (self.eps, 0.0, math.inf),
            "weight_decay": (self.weight_decay, 0.0, math.inf),
            "grad_clip_norm": (self.grad_clip_norm, 0.0, math.inf),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value < high:
                raise InputError(f"adam_params.{name}", value, f"a number in [{low:g}, {high:g})")


class AdamW:
    """Moments and step count; the parameters and the gradient are given at each step."""

    def __init__(self, size: int) -> None:
        self.first = torch.zeros(size)
        self.second = torch.zeros(size)
        self.steps = 0
        self.last_config: AdamWConfig | None = None

    def step(self, parameters: Tensor, gradient: Tensor, config: AdamWConfig) -> dict[str, float]:
        """Take one step in place.

        With g the gradient (shortened to ``grad_clip_norm`` if longer), t the step number:
        ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``, ``p = (1 - lr wd) p - lr
        (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``. A zero gradient takes a step too.

        Args:
            parameters: [size] float32, changed.
            gradient: [size] float32, left as it is.
            config: settings of this step.

        Returns:
            ``grad_norm`` before and ``clip_scale`` of the shortening.

        Raises:
            InputError: if the gradient is not finite; nothing has changed then.

        Sources:
            Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
        """
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        if not math.isfinite(norm):
            raise InputError("gradient", norm, "a finite norm (the step was not taken)")
        scale = config.grad_clip_norm / norm if 0.0 < config.grad_clip_norm < norm else 1.0
        if scale != 1.0:
            gradient = gradient * scale
        self.steps += 1
        self.last_config = config
        if config.weight_decay:
            parameters.mul_(1 - config.learning_rate * config.weight_decay)
        self.first.mul_(config.beta1).add_(gradient, alpha=1 - config.beta1)
        self.second.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
        bias1, bias2 = (1 - beta**self.steps for beta in (config.beta1, config.beta2))
        spread = self.second.sqrt().div_(math.sqrt(bias2)).add_(config.eps)
        if config.eps == 0.0:
            spread[spread == 0] = 1.0  # the moment is 0 there too, and 0 / 0 would be NaN
        parameters.addcdiv_(self.first, spread, value=-config.learning_rate / bias1)
        return {"grad_norm": norm, "clip_scale": scale}

    def sha256(self) -> str:
        """Return the digest of step count, moments and size."""
        found = hashlib.sha256(canonical_bytes({"steps": self.steps, "size": len(self.first)}))
        for moment in (self.first, self.second):
            found.update(moment.numpy().tobytes())
        return found.hexdigest()
