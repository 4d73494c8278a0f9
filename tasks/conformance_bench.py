"""The conformance kit's bench: fixed examples, new models, and how far a step moved one.

The protocol returns no gradients. What a step did is therefore seen in the log-probabilities of
fixed tokens before and after it, the *movement*. With an epsilon far above every gradient Adam's
step is plain gradient descent, so that small movements are linear in the gradient: those of two
examples, each trained alone, are the unit in which every other movement is measured.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
import torch
from numpy.typing import NDArray

from evidence.conformance_probes import FIRST_TOKENS, SECOND_TOKENS
from tasks.service import LoraSettings, Service
from tasks.trainer import Trainer

Vector = NDArray[np.float64]
Work = Callable[[Trainer], Awaitable[None]]

EPSILON = 1e6
"""Far above any gradient: Adam's step is then the learning rate over this, times the gradient."""
TARGET_NATS = 0.01
"""Movement that is small enough to be linear and large enough to be seen, root mean square."""
_ENOUGH = (0.3, 3.0)
_TRIES = 6
_FIRST_STEP = 1e-4


@dataclass(frozen=True, slots=True)
class Example:
    """One fixed example: L tokens, and weights of its L - 1 targets."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    def datum(self, factor: float = 1.0) -> tinker.Datum:
        """What is sent to train on it."""
        return self._datum({"weights": [factor * weight for weight in self.weights]})

    def plain(self) -> tinker.Datum:
        """What is sent to score it."""
        return self._datum({})

    def builtin(self, logprobs: Vector, factor: float) -> tinker.Datum:
        """What a built-in policy loss is sent: advantages in the place of weights."""
        advantages = [factor * weight for weight in self.weights]
        return self._datum({"advantages": advantages, "logprobs": logprobs.tolist()})

    def _datum(self, inputs: dict[str, list[float]]) -> tinker.Datum:
        sent: dict[str, Any] = {"target_tokens": torch.tensor(self.tokens[1:])}
        sent |= {name: torch.tensor(values) for name, values in inputs.items()}
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(list(self.tokens[:-1])), loss_fn_inputs=sent
        )


FIRST = Example((60, 71, 82, 93, 104, 115), (0.9, 0.3, 0.6, 0.6, 0.6))
SECOND = Example(
    (61, 130, 73, 88, 142, 99, 67, 121, 154, 76, 109), (0.0, 0.0, *([0.5] * SECOND_TOKENS))
)
EXAMPLES = (FIRST, SECOND)


@dataclass(frozen=True, slots=True)
class Units:
    """Movements by which all others are measured.

    Attributes:
        before: log-probabilities of the fixed tokens before any step.
        step: learning rate over epsilon.
        first: movement by one step on the first example alone.
        second: likewise the second.
        noise: by how much the first movement differed when it was made again, as a share of it.
    """

    before: Vector
    step: float
    first: Vector
    second: Vector
    noise: float


class Bench:
    """New models of one base model on one service.

    Args:
        service: the service.
        base_model: what adapters are put on.
        rank: of the adapters.
    """

    def __init__(self, service: Service, *, base_model: str, rank: int) -> None:
        self.service = service
        self.lora = LoraSettings(base_model=base_model, rank=rank, seed=0)
        self._start: str | None = None
        self.units: Units | None = None

    def through(self, service: Service) -> Bench:
        """The same bench, with units and start, that reaches the service another way."""
        other = Bench(service, base_model=self.lora.base_model, rank=self.lora.rank)
        other._start, other.units = self._start, self.units
        return other

    @asynccontextmanager
    async def model(self) -> AsyncIterator[Trainer]:
        """A new model in the state that all probes begin from; it is released afterwards."""
        trainer = (
            await self.service.create_trainer(self.lora, label="conformance")
            if self._start is None
            else await self.service.load_trainer(self._start, label="conformance")
        )
        try:
            yield trainer
        finally:
            await trainer.close()

    def adam(
        self, step: float, *, clip: float = 0.0, decay: float = 0.0, beta1: float = 0.9
    ) -> tinker.AdamParams:
        """Settings of a step of gradient descent of this length."""
        return tinker.AdamParams(
            learning_rate=step * EPSILON,
            beta1=beta1,
            beta2=0.95,
            eps=EPSILON,
            weight_decay=decay,
            grad_clip_norm=clip,
        )

    async def score(self, trainer: Trainer) -> Vector:
        """Log-probabilities of the fixed tokens, nats, each example asked for alone."""
        return np.concatenate([await score(trainer, example) for example in EXAMPLES])

    async def moved(self, work: Work, *, adam: tinker.AdamParams | None = None) -> Vector:
        """How far a new model is moved by some work and one step."""
        units = self.known
        async with self.model() as trainer:
            await work(trainer)
            await trainer.optim_step(adam or self.adam(units.step))
            return await self.score(trainer) - units.before

    @property
    def known(self) -> Units:
        """The units.

        Raises:
            RuntimeError: before they are measured.
        """
        if self.units is None:
            raise RuntimeError("movements are measured before their units")
        return self.units

    async def measure_units(self) -> Units:
        """Find a step of the right length, and the movements of both examples alone.

        A service that draws a new adapter in spite of the seed does not repeat a movement. All
        models are then loaded from one saved state instead.
        """
        units = await self._units()
        if units.noise > STARTS_APART:
            async with self.model() as trainer:
                self._start = await trainer.save("conformance-start")
            units = await self._units()
        self.units = units
        return units

    async def _units(self) -> Units:
        async with self.model() as trainer:
            before = await self.score(trainer)
        self.units = Units(before, _FIRST_STEP, before, before, 0.0)
        step, first = await self._right_step()
        self.units = Units(before, step, before, before, 0.0)
        again = await self.moved(trained(FIRST))
        second = await self.moved(trained(SECOND))
        return Units(before, step, first, second, apart(first, again))

    async def _right_step(self) -> tuple[float, Vector]:
        """The length of a step that moves the first example as far as wanted, and that movement."""
        step = _FIRST_STEP
        for _ in range(_TRIES):
            moved = await self.moved(trained(FIRST), adam=self.adam(step))
            share = _rms(moved[:FIRST_TOKENS]) / TARGET_NATS
            if _ENOUGH[0] <= share <= _ENOUGH[1]:
                return step, moved
            step /= min(max(share, 1e-3), 1e3) if np.isfinite(share) else 1e3
        raise ValueError(
            f"no learning rate moves the model by about {TARGET_NATS:g} nats; the last one, "
            f"{step * EPSILON:g} with epsilon {EPSILON:g}, was meant to"
        )


STARTS_APART = 0.02
"""Movements of equal steps that differ more did not begin from one adapter."""


def trained(*parts: Example, factors: Sequence[float] | None = None) -> Work:
    """Train on examples in one request, with their weights times these factors."""
    scale = factors or [1.0] * len(parts)

    async def work(trainer: Trainer) -> None:
        data = [part.datum(factor) for part, factor in zip(parts, scale, strict=True)]
        await trainer.forward_backward(data, "cross_entropy")

    return work


async def score(trainer: Trainer, example: Example) -> Vector:
    """Log-probability of every target of one example, nats.

    Raises:
        ValueError: if there is another number of them.
    """
    found = (await trainer.forward([example.plain()]))[0].astype(np.float64)
    targets = len(example.tokens) - 1
    if found.shape != (targets,):
        raise ValueError(f"{found.shape} log-probabilities for {targets} target tokens")
    return found


def shares(moved: Vector, units: Units) -> dict[str, float]:
    """A movement as multiples of those of both examples alone, and what that leaves unexplained."""
    basis = np.stack([units.first, units.second], axis=1)
    (first, second), *_ = np.linalg.lstsq(basis, moved, rcond=None)
    left = moved - basis @ np.array([first, second])
    return {
        "first": float(first),
        "second": float(second),
        "unexplained": _rms(left) / max(_rms(moved), 1e-30),
        "noise": units.noise,
    }


def multiple(moved: Vector, unit: Vector) -> dict[str, float]:
    """A movement as a multiple of another one, and what that leaves unexplained."""
    ratio = float(moved @ unit / max(float(unit @ unit), 1e-30))
    return {"ratio": ratio, "unexplained": _rms(moved - ratio * unit) / max(_rms(moved), 1e-30)}


def apart(one: Vector, other: Vector) -> float:
    """Difference of two movements as a share of the second."""
    return _rms(one - other) / max(_rms(other), 1e-30)


def _rms(values: Vector) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
