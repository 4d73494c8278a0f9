"""Conformance probes of the training path: what a request's loss, weights and steps really do."""

from __future__ import annotations

from typing import Any

import numpy as np
import tinker
import torch

from evidence.conformance import Measurement
from evidence.conformance_probes import (
    CLIP_SHARE,
    DECAY_PER_STEP,
    FIRST_TOKENS,
    SHORTER_CLIP,
    STEP_TOLERANCE,
    nats_bound,
)
from tasks.conformance_bench import (
    BETA1,
    EXAMPLES,
    FIRST,
    SECOND,
    Bench,
    Example,
    Vector,
    multiple,
    rms,
    score,
    shares,
    trained,
)
from tasks.conformance_relay import Relay
from tasks.failures import PermanentServiceError, ServiceError
from tasks.trainer import CustomLoss, Trainer

_SILENCE = trained(FIRST, factors=(0.0,))
_LONG_STEP = 0.01
_EPSILON_OF_DECAY = 1e12
"""With such an epsilon momentum moves nothing: what the step does is decay alone."""
STALE_NATS = 0.2
"""How far the sampling log-probabilities of the importance-sampling probe are from the model's."""


async def forward_adds_nothing(bench: Bench) -> list[Measurement]:
    """A step without a gradient after nothing but forwards, so long that any gradient shows."""
    adam = tinker.AdamParams(
        learning_rate=_LONG_STEP, beta1=0.0, beta2=0.95, eps=1e-8, weight_decay=0.0
    )
    await bench.untrained()
    before, again = await bench.score(), await bench.score()
    values = {"nats": rms(await bench.moved(_SILENCE, adam=adam)), "rounding": rms(again - before)}
    if values["nats"] > nats_bound(values):
        await bench.leave()
        bench.forwards_count = True
    return [Measurement("forward_adds_nothing", values)]


async def repeatable(bench: Bench) -> list[Measurement]:
    """Units of all movements, and whether half a step moves half as far."""
    units = await bench.measure_units()
    return [Measurement("repeatable", {"gap": units.noise, "target": bench.target})]


async def result_order(bench: Bench) -> list[Measurement]:
    """Both examples in one request against each alone, and with weights at every other token."""
    trainer = await bench.trainer()
    alone = [await score(trainer, example) for example in EXAMPLES]
    both = await trainer.forward([example.plain() for example in EXAMPLES])
    rounding = await _rounding(trainer, alone)
    values = {"in_order": _gap(both, alone), "reversed": _gap(both[::-1], alone)} | rounding
    in_order = values["in_order"]
    bench.ordered = in_order is not None and in_order <= nats_bound(values)
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
    if len(seen) != len(true):
        return [Measurement("result_order", values)]
    zeros = {
        "gap": float(np.abs(seen - true)[unweighted].mean()),
        "zeros": float((seen == 0.0)[unweighted].mean()),
    }
    return [Measurement("result_order", values), Measurement("unweighted_tokens", zeros | rounding)]


async def _rounding(trainer: Trainer, alone: list[Vector]) -> dict[str, float | None]:
    """How far the scores of an example change with the company of itself, whatever the order is."""
    pairs = [
        (await trainer.forward([example.plain()] * 2), values)
        for example, values in zip(EXAMPLES, alone, strict=True)
    ]
    gaps = [_gap(found, [values] * 2) for found, values in pairs]
    return {"rounding": max((gap for gap in gaps if gap is not None), default=None)}


def _gap(found: list[Any], expected: list[Vector]) -> float | None:
    if [len(values) for values in found] != [len(values) for values in expected]:
        return None
    return float(np.abs(np.concatenate(found) - np.concatenate(expected)).mean())


async def sum_over_request(bench: Bench) -> list[Measurement]:
    """Both examples in one request, the second with negative weights."""
    moved = await bench.moved(trained(FIRST, SECOND, factors=(1.0, -1.0)))
    return [Measurement("sum_over_request", shares(moved, bench.known))]


async def weights_are_factors(bench: Bench) -> list[Measurement]:
    """The first example with doubled weights, and the loss that is reported for it."""
    true = (await bench.score())[:FIRST_TOKENS]
    expected = -2.0 * float(true @ np.array(FIRST.weights))
    reported: float | None = None

    async def work(trainer: Trainer) -> None:
        nonlocal reported
        metrics = await trainer.forward_backward([FIRST.datum(2.0)], "cross_entropy")
        reported = metrics.get("loss:sum")

    values = multiple(await bench.moved(work), bench.known.first) | {"noise": bench.known.noise}
    ratio = None if reported is None else reported / expected
    return [
        Measurement("weights_are_factors", values),
        Measurement("reported_loss", {"ratio": ratio}, silent=reported is None),
    ]


async def gradients_accumulate(bench: Bench) -> list[Measurement]:
    """Each example in a request of its own, then one step."""

    async def work(trainer: Trainer) -> None:
        await trained(FIRST)(trainer)
        await trained(SECOND)(trainer)

    return [Measurement("gradients_accumulate", shares(await bench.moved(work), bench.known))]


async def step_takes_all(bench: Bench) -> list[Measurement]:
    """Two steps without a gradient behind a plain one, the first with momentum.

    With momentum the plain step moves the model again, by beta1 / (1 - beta1^t) of itself, t
    counting this model's steps. Without it nothing is left that could move the model.
    """
    await bench.moved(trained(FIRST))
    with_momentum = await bench.moved(_SILENCE, adam=bench.adam(beta1=BETA1))
    share = BETA1 / (1.0 - BETA1 ** max(bench.steps, 1))
    without = await bench.moved(_SILENCE)
    units = bench.known
    carried = multiple(with_momentum, share * units.first)["ratio"]
    left = multiple(without, units.first)["ratio"]
    return [
        Measurement("gradient_cleared", {"left": left, "noise": units.noise}),
        Measurement("momentum", {"carried": carried, "noise": units.noise}),
    ]


async def custom_loss(bench: Bench) -> list[Measurement]:
    """A weighted sum computed on the client, the second example's weights negative."""
    data = [example.plain() for example in EXAMPLES]

    async def work(trainer: Trainer) -> None:
        await trainer.forward_backward_custom(data, _weighted)

    try:
        moved = await bench.moved(work)
    except ServiceError as error:
        if not isinstance(error, PermanentServiceError):
            raise
        reported = {"loss_reported": 0.0} if "loss:sum" in str(error) else {}
        return [Measurement("custom_loss", reported, refused=str(error), unusable=True)]
    except (RuntimeError, ValueError, KeyError, TypeError, AssertionError) as error:
        refused = f"{type(error).__name__}: {error}"
        return [Measurement("custom_loss", refused=refused, unusable=True)]
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
    now = await bench.score()
    old = now + STALE_NATS * np.cos(np.arange(len(now)))
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


async def step_length(bench: Bench) -> list[Measurement]:
    """One step whose gradient is shortened to a quarter of its length, as it follows from theory.

    The weights' movement along its own gradient g is step * |g|^2, which gives |g| if steps are as
    long as asked for; a shortened step then moves the model by that share. Steps of another length
    give another |g|, and another share. Where nothing was shortened, a much shorter clip tells
    whether clips have no effect or steps are far too long.
    """
    units = bench.known
    weights = np.array([*FIRST.weights, *([0.0] * len(SECOND.weights))])
    length = float(np.sqrt(max(float(weights @ units.first), 0.0) / units.step))

    async def clipped(clip: float) -> float | None:
        moved = await bench.moved(trained(FIRST), adam=bench.adam(clip=clip))
        return multiple(moved, units.first)["ratio"]

    values = {"share": await clipped(CLIP_SHARE * length), "noise": units.noise}
    if values["share"] is not None and values["share"] >= 1.0 - STEP_TOLERANCE:
        values["shortened"] = await clipped(SHORTER_CLIP * CLIP_SHARE * length)
    return [Measurement("learning_rate", values), Measurement("gradient_clip", dict(values))]


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
        before = await bench.scores(trainer)
        await trained(FIRST, SECOND)(trainer)
        await trainer.optim_step(bench.adam(2.0 * units.step))
        moved = await bench.scores(trainer) - before
        await _SILENCE(trainer)
        await trainer.optim_step(decay)
        left = await bench.scores(trainer) - before
    values = {"left": multiple(left, moved)["ratio"], "noise": units.noise}
    return [Measurement("weight_decay", values)]


async def replayed_request(bench: Bench) -> list[Measurement]:
    """Gradient and step through a relay that sends each of the two requests twice."""
    async with Relay(bench.service.settings) as relay:
        other = bench.through(bench.service.towards(relay.url))

        async def doubled(trainer: Trainer) -> None:
            relay.twice("forward_backward", "optim_step")
            await trained(FIRST)(trainer)

        try:
            once = await other.moved(trained(FIRST))
            values = multiple(await other.moved(doubled), once)
        finally:
            await other.close()
        values |= {"repeats": float(relay.repeats), "refused": float(relay.refused)}
    if not relay.repeats:
        return [Measurement("replayed_request", values, refused="no request was sent twice")]
    return [Measurement("replayed_request", values | {"noise": bench.known.noise})]
