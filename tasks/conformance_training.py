"""Conformance probes of the training path: what a request's loss, weights and steps really do."""

from __future__ import annotations

from typing import Any

import numpy as np
import tinker
import torch

from evidence.conformance import Measurement
from evidence.conformance_probes import CLIP_SHARE, DECAY_PER_STEP
from tasks.conformance_bench import (
    EXAMPLES,
    FIRST,
    SECOND,
    Bench,
    Example,
    Vector,
    multiple,
    score,
    shares,
    trained,
)
from tasks.conformance_relay import Relay
from tasks.failures import PermanentServiceError
from tasks.trainer import CustomLoss, Trainer

_EPSILON_OF_DECAY = 1e12
"""With such an epsilon momentum moves nothing: what the step does is decay alone."""
STALE_NATS = 0.2
"""How far the sampling log-probabilities of the importance-sampling probe are from the model's."""


async def repeatable(bench: Bench) -> list[Measurement]:
    """Units of all movements, and whether they repeat."""
    units = await bench.measure_units()
    return [Measurement("repeatable", {"gap": units.noise})]


async def result_order(bench: Bench) -> list[Measurement]:
    """Both examples in one request against each alone."""
    async with bench.model() as trainer:
        alone = [await score(trainer, example) for example in EXAMPLES]
        both = await trainer.forward([example.plain() for example in EXAMPLES])
        halves = [
            tuple(weight if number % 2 else 0.0 for number, weight in enumerate(example.weights))
            for example in EXAMPLES
        ]
        found = [
            (await trainer.forward([Example(example.tokens, half).datum()]))[0]
            for example, half in zip(EXAMPLES, halves, strict=True)
        ]
    unweighted = np.concatenate([np.array(half) == 0.0 for half in halves])
    seen, true = np.concatenate(found), np.concatenate(alone)
    values = {"in_order": _gap(both, alone), "reversed": _gap(both[::-1], alone)}
    if len(seen) != len(true):
        return [Measurement("result_order", values)]
    zeros = {
        "gap": float(np.abs(seen - true)[unweighted].mean()),
        "zeros": float((seen == 0.0)[unweighted].mean()),
    }
    return [Measurement("result_order", values), Measurement("unweighted_tokens", zeros)]


def _gap(found: list[Any], expected: list[Vector]) -> float | None:
    if [len(values) for values in found] != [len(values) for values in expected]:
        return None
    return float(np.abs(np.concatenate(found) - np.concatenate(expected)).mean())


async def sum_over_request(bench: Bench) -> list[Measurement]:
    """Both examples in one request, the second with negative weights."""
    moved = await bench.moved(trained(FIRST, SECOND, factors=(1.0, -1.0)))
    return [Measurement("sum_over_request", shares(moved, bench.known))]


async def weights_are_factors(bench: Bench) -> list[Measurement]:
    """The first example with doubled weights."""
    moved = await bench.moved(trained(FIRST, factors=(2.0,)))
    values = multiple(moved, bench.known.first) | {"noise": bench.known.noise}
    return [Measurement("weights_are_factors", values)]


async def gradients_accumulate(bench: Bench) -> list[Measurement]:
    """Each example in a request of its own, then one step."""

    async def work(trainer: Trainer) -> None:
        await trained(FIRST)(trainer)
        await trained(SECOND)(trainer)

    return [Measurement("gradients_accumulate", shares(await bench.moved(work), bench.known))]


async def forward_adds_nothing(bench: Bench) -> list[Measurement]:
    """A forward of the second example with weights before training on the first."""

    async def work(trainer: Trainer) -> None:
        await trainer.forward([SECOND.datum()])
        await trained(FIRST)(trainer)

    return [Measurement("forward_adds_nothing", shares(await bench.moved(work), bench.known))]


async def custom_loss(bench: Bench) -> list[Measurement]:
    """A weighted sum computed on the client, the second example's weights negative."""
    data = [example.plain() for example in EXAMPLES]

    async def work(trainer: Trainer) -> None:
        await trainer.forward_backward_custom(data, _weighted)

    try:
        moved = await bench.moved(work)
    except PermanentServiceError as error:
        reported = {"loss_reported": 0.0} if "loss:sum" in str(error) else {}
        return [Measurement("custom_loss", reported, refused=str(error))]
    return [Measurement("custom_loss", shares(moved, bench.known))]


def _weighted(
    data: list[tinker.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    del data
    terms = [
        factor * (torch.tensor(example.weights) * values).sum()
        for example, values, factor in zip(EXAMPLES, logprobs, (1.0, -1.0), strict=True)
    ]
    return -torch.stack(terms).sum(), {}


async def custom_equals_builtin(bench: Bench) -> list[Measurement]:
    """Importance sampling with ratios away from 1 and advantages of both signs, both ways."""
    split = len(FIRST.weights)
    old = bench.known.before + STALE_NATS * np.cos(np.arange(len(bench.known.before)))
    parts = list(zip(EXAMPLES, (old[:split], old[split:]), (1.0, -1.0), strict=True))

    async def builtin(trainer: Trainer) -> None:
        data = [example.builtin(sampled, factor) for example, sampled, factor in parts]
        await trainer.forward_backward(data, "importance_sampling")

    async def ours(trainer: Trainer) -> None:
        data = [example.plain() for example in EXAMPLES]
        await trainer.forward_backward_custom(data, _importance(parts))

    try:
        expected = await bench.moved(builtin)
    except PermanentServiceError as error:
        return [Measurement("custom_equals_builtin", refused=str(error), silent=True)]
    values = multiple(await bench.moved(ours), expected) | {"noise": bench.known.noise}
    return [Measurement("custom_equals_builtin", values)]


def _importance(parts: list[tuple[Example, Vector, float]]) -> CustomLoss:
    def loss(
        data: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        del data
        terms = [
            factor * (torch.exp(values - torch.tensor(old)) * torch.tensor(example.weights)).sum()
            for (example, old, factor), values in zip(parts, logprobs, strict=True)
        ]
        return -torch.stack(terms).sum(), {}

    return loss


async def reported_loss(bench: Bench) -> list[Measurement]:
    """The metric ``loss:sum`` of one example with equal weights against its log-probabilities."""
    weight = 3.0 / len(FIRST.weights)
    example = Example(FIRST.tokens, (weight,) * len(FIRST.weights))
    async with bench.model() as trainer:
        expected = -weight * float((await score(trainer, example)).sum())
        reported = (await trainer.forward_backward([example.datum()], "cross_entropy")).get(
            "loss:sum"
        )
    ratio = None if reported is None else reported / expected
    return [Measurement("reported_loss", {"ratio": ratio}, silent=reported is None)]


async def step_length(bench: Bench) -> list[Measurement]:
    """One step whose gradient is shortened to a quarter of its length, as it follows from theory.

    The weights' movement along its own gradient g is step * |g|^2, which gives |g| if steps are as
    long as asked for; a shortened step then moves the model by that share. Steps of another length
    give another |g|, and another share.
    """
    units = bench.known
    weights = np.array([*FIRST.weights, *([0.0] * len(SECOND.weights))])
    length = float(np.sqrt(max(float(weights @ units.first), 0.0) / units.step))
    adam = bench.adam(units.step, clip=CLIP_SHARE * length)
    moved = await bench.moved(trained(FIRST), adam=adam)
    share = multiple(moved, units.first)["ratio"]
    return [
        Measurement("learning_rate", {"share": share, "noise": units.noise}),
        Measurement("gradient_clip", {"share": share, "noise": units.noise}),
    ]


async def weight_decay(bench: Bench) -> list[Measurement]:
    """One step without a gradient on a moved model, with a decay that halves every weight."""
    units = bench.known
    decay = tinker.AdamParams(
        learning_rate=1.0,
        beta1=0.9,
        beta2=0.95,
        eps=_EPSILON_OF_DECAY,
        weight_decay=DECAY_PER_STEP,
        grad_clip_norm=0.0,
    )
    async with bench.model() as trainer:
        await trained(FIRST, SECOND)(trainer)
        await trainer.optim_step(bench.adam(units.step))
        moved = await bench.score(trainer) - units.before
        await trained(FIRST, factors=(0.0,))(trainer)
        await trainer.optim_step(decay)
        left = await bench.score(trainer) - units.before
    values = {"left": multiple(left, moved)["ratio"], "noise": units.noise}
    return [Measurement("weight_decay", values)]


async def replayed_request(bench: Bench) -> list[Measurement]:
    """Gradient and step through a relay that sends each of the two requests twice."""
    async with Relay(bench.service.settings) as relay:
        other = bench.through(bench.service.towards(relay.url))
        try:

            async def work(trainer: Trainer) -> None:
                relay.twice("forward_backward", "optim_step")
                await trained(FIRST)(trainer)

            moved = await other.moved(work)
        finally:
            await other.service.release_all()
        values: dict[str, float | None] = dict(multiple(moved, bench.known.first))
        values["repeats"] = float(relay.repeats)
        values["refused"] = float(relay.refused)
    if not relay.repeats:
        return [Measurement("replayed_request", values, refused="no request was sent twice")]
    return [Measurement("replayed_request", values | {"noise": bench.known.noise})]
