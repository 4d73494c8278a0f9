"""The conformance kit's bench: fixed examples, one model, and how far a step moves it.

The protocol returns no gradients. What a step did is therefore seen in the log-probabilities of
fixed tokens before and after it, the *movement*. With an epsilon far above every gradient Adam's
step is plain gradient descent, so that small movements are linear in the gradient: those of two
examples, each trained alone, are the unit in which every other movement is measured. All of it is
done on one model, because a model is what a service has few of.
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
from tasks.sampling import ServiceSampler
from tasks.service import LoraSettings, Service
from tasks.trainer import Trainer

Vector = NDArray[np.float64]
Work = Callable[[Trainer], Awaitable[None]]

EPSILON = 1e6
"""Far above any gradient: Adam's step is then the learning rate over this, times the gradient."""
BETA1 = 0.9
_ENOUGH = (0.3, 3.0)
_TRIES = 8
_FIRST_STEP = 1e-4
_SPOILED = 30.0
"""A movement so many times the wanted one leaves a model that is good for nothing more."""
_SMALLEST, _LARGEST = 0.003, 0.3
_QUIET, _LOUDER = 0.03, 4.0
_ABOVE_ROUNDING = 30.0


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


FIRST = Example((60, 71, 82, 93, 104, 115), (0.6,) * FIRST_TOKENS)
SECOND = Example(
    (61, 130, 73, 88, 142, 99, 67, 121, 154, 76, 109), (0.0, 0.0, *([0.5] * SECOND_TOKENS))
)
EXAMPLES = (FIRST, SECOND)


@dataclass(frozen=True, slots=True)
class Units:
    """Movements by which all others are measured.

    Attributes:
        step: learning rate over epsilon.
        first: movement by one step on the first example alone.
        second: likewise the second.
        noise: by how much half a step moved the model by other than half as much, as a share.
    """

    step: float
    first: Vector
    second: Vector
    noise: float


class Bench:
    """One model on one service, which is replaced when a step has spoiled it.

    Args:
        service: the service.
        base_model: what adapters are put on.
        rank: of the adapters.
        seed: of the adapters and of samples.
    """

    def __init__(self, service: Service, *, base_model: str, rank: int, seed: int = 0) -> None:
        self.service, self.seed = service, seed
        self.lora = LoraSettings(base_model=base_model, rank=rank, seed=seed)
        self.target = _SMALLEST
        """How far a step is meant to move the first example, root mean square, nats."""
        self.units: Units | None = None
        self.steps = 0
        """Optimizer steps of the present model."""
        self.ordered = False
        """Whether results of one request were seen to come back in order."""
        self.forwards_count = False
        """Whether a forward alone was seen to move the model: no movement can be told then."""
        self._trainer: Trainer | None = None
        self._at: Vector | None = None
        self._sampler: ServiceSampler | None = None

    @property
    def known(self) -> Units:
        """The units.

        Raises:
            RuntimeError: before they are measured.
        """
        if self.units is None:
            raise RuntimeError("movements are measured before their units")
        return self.units

    def through(self, service: Service) -> Bench:
        """A bench of the same units that reaches the service another way."""
        other = Bench(service, base_model=self.lora.base_model, rank=self.lora.rank, seed=self.seed)
        other.target, other.units, other.ordered = self.target, self.units, self.ordered
        return other

    @asynccontextmanager
    async def model(self) -> AsyncIterator[Trainer]:
        """Another new model, which is released afterwards."""
        trainer = await self.service.create_trainer(self.lora, label="conformance")
        try:
            yield trainer
        finally:
            await trainer.close()

    async def trainer(self) -> Trainer:
        """The present model."""
        if self._trainer is None:
            self._trainer = await self.service.create_trainer(self.lora, label="conformance")
            self._at, self.steps = None, 0
        return self._trainer

    async def untrained(self) -> Trainer:
        """The present model if no step was taken on it, else a new one in its place."""
        if self.steps:
            await self.leave()
        return await self.trainer()

    async def sampler(self) -> ServiceSampler:
        """A sampler of the base model."""
        if self._sampler is None:
            self._sampler = await self.service.open_sampler(
                base_model=self.lora.base_model, label="conformance"
            )
        return self._sampler

    async def close(self) -> None:
        """Release model and sampler."""
        await self.leave()
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            await sampler.close()

    async def leave(self) -> None:
        """Release the present model; the next use makes a new one."""
        trainer, self._trainer, self._at = self._trainer, None, None
        if trainer is not None:
            await trainer.close()

    def adam(
        self, step: float | None = None, *, clip: float = 0.0, beta1: float = 0.0
    ) -> tinker.AdamParams:
        """Settings of a step of gradient descent; by default of the units' length."""
        return tinker.AdamParams(
            learning_rate=(self.known.step if step is None else step) * EPSILON,
            beta1=beta1,
            beta2=0.95,
            eps=EPSILON,
            weight_decay=0.0,
            grad_clip_norm=clip,
        )

    async def score(self) -> Vector:
        """Log-probabilities of the fixed tokens of the present model, nats."""
        self._at = await self.scores(await self.trainer())
        return self._at

    async def scores(self, trainer: Trainer) -> Vector:
        """Log-probabilities of the fixed tokens, nats.

        Each example is asked for alone until results are known to come back in order.
        """
        if not self.ordered:
            return np.concatenate([await score(trainer, example) for example in EXAMPLES])
        found = await trainer.forward([example.plain() for example in EXAMPLES])
        return np.concatenate(found).astype(np.float64)

    async def moved(self, work: Work, *, adam: tinker.AdamParams | None = None) -> Vector:
        """How far the present model is moved by some work and one step."""
        trainer = await self.trainer()
        try:
            before = await self.score() if self._at is None else self._at
            await work(trainer)
            await trainer.optim_step(adam or self.adam())
            self.steps += 1
            movement = await self.score() - before
        except Exception:
            await self.leave()  # part of a gradient may be left in it
            raise
        if not rms(movement) <= _SPOILED * self.target:
            await self.leave()
        return movement

    async def measure_units(self) -> Units:
        """Find a step of the right length, and the movements of both examples alone.

        Raises:
            ValueError: if no step moves the model as far as wanted.
        """
        self.target, start = await self._visible(), _FIRST_STEP
        while True:
            step, first = await self._right_step(start)
            half = await self.moved(trained(FIRST), adam=self.adam(step / 2.0))
            noise = apart(2.0 * half, first)
            if noise <= _QUIET or self.target * _LOUDER > _LARGEST:
                break
            self.target, start = self.target * _LOUDER, step * _LOUDER
        second = await self.moved(trained(SECOND), adam=self.adam(step))
        self.units = Units(step, first, second, noise)
        return self.units

    async def _visible(self) -> float:
        """A movement well above what the company of another example changes by rounding."""
        trainer = await self.trainer()
        alone = np.concatenate([await score(trainer, example) for example in EXAMPLES])
        found = np.concatenate(await trainer.forward([example.plain() for example in EXAMPLES]))
        rounding = rms(found - alone) if found.shape == alone.shape else 0.0
        if rounding > _LARGEST:  # results in another order, not rounding: another probe's finding
            rounding = 0.0
        return min(max(_SMALLEST, _ABOVE_ROUNDING * rounding), _LARGEST)

    async def _right_step(self, step: float) -> tuple[float, Vector]:
        """The length of a step that moves the first example as far as wanted, and that movement.

        Args:
            step: length to begin with.
        """
        for _ in range(_TRIES):
            moved = await self.moved(trained(FIRST), adam=self.adam(step))
            share = rms(moved[:FIRST_TOKENS]) / self.target
            if _ENOUGH[0] <= share <= _ENOUGH[1]:
                return step, moved
            step /= min(max(share, 1e-3), 1e3) if np.isfinite(share) else 1e3
        raise ValueError(
            f"no learning rate moves the model by about {self.target:g} nats; the last one, "
            f"{step * EPSILON:g} with epsilon {EPSILON:g}, was meant to"
        )


def trained(*parts: Example, factors: Sequence[float] | None = None) -> Work:
    """Train on examples in one request, with their weights times these factors.

    With a factor of 0 the gradient is 0, which every service takes, unlike a step without any.
    """
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


def shares(moved: Vector, units: Units) -> dict[str, float | None]:
    """A movement as multiples of those of both examples alone, and what that leaves unexplained."""
    if not np.isfinite(moved).all():
        return {"first": None, "second": None, "unexplained": None, "noise": units.noise}
    basis = np.stack([units.first, units.second], axis=1)
    (first, second), *_ = np.linalg.lstsq(basis, moved, rcond=None)
    left = moved - basis @ np.array([first, second])
    return {
        "first": float(first),
        "second": float(second),
        "unexplained": rms(left) / max(rms(moved), 1e-30),
        "noise": units.noise,
    }


def multiple(moved: Vector, unit: Vector) -> dict[str, float | None]:
    """A movement as a multiple of another one, and what that leaves unexplained."""
    if not np.isfinite(moved).all():
        return {"ratio": None, "unexplained": None}
    ratio = float(moved @ unit / max(float(unit @ unit), 1e-30))
    return {"ratio": ratio, "unexplained": rms(moved - ratio * unit) / max(rms(moved), 1e-30)}


def apart(one: Vector, other: Vector) -> float:
    """Difference of two movements as a share of the second."""
    return rms(one - other) / max(rms(other), 1e-30)


def rms(values: Vector) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(values))))
