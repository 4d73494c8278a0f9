"""Conformance probes of what a service keeps: optimizer state, checkpoints, publications, room."""

from __future__ import annotations

import numpy as np

from evidence.conformance import Measurement
from tasks.conformance_bench import FIRST, SECOND, Bench, Vector, apart, trained
from tasks.failures import CapacityBlocked, ServiceError
from tasks.sampling import ServiceSampler
from tasks.trainer import Trainer

WARM_STEPS = 3
LONGER = 3.0
"""By how much the second publication's step is longer than the first's."""


async def optimizer_restored(bench: Bench) -> list[Measurement]:
    """One more step on four clients: never saved, saved, restored with and without optimizer.

    The steps before went another way than this one, so that Adam's first moment decides where it
    goes.
    """
    async with bench.model() as control, bench.model() as saved:
        await _warm(bench, control)
        await _warm(bench, saved)
        uri = await saved.save("conformance-restore")
        expected, live = await _one_more(bench, control), await _one_more(bench, saved)
    resumed = await _loaded(bench, uri, optimizer=True)
    cold = await _loaded(bench, uri, optimizer=False)
    values = {
        "resumed": apart(resumed, expected),
        "saved": apart(live, expected),
        "cold": apart(cold, expected),
        "resumed_from_cold": apart(resumed, cold),
        "noise": bench.known.noise,
    }
    return [Measurement("optimizer_restored", values)]


async def _warm(bench: Bench, trainer: Trainer) -> None:
    for _ in range(WARM_STEPS):
        await trained(FIRST)(trainer)
        await trainer.optim_step(bench.adam(bench.known.step))


async def _one_more(bench: Bench, trainer: Trainer) -> Vector:
    before = await bench.score(trainer)
    await trained(SECOND, factors=(-1.0,))(trainer)
    await trainer.optim_step(bench.adam(bench.known.step))
    return await bench.score(trainer) - before


async def _loaded(bench: Bench, uri: str, *, optimizer: bool) -> Vector:
    trainer = await bench.service.load_trainer(uri, label="conformance", optimizer=optimizer)
    try:
        return await _one_more(bench, trainer)
    finally:
        await trainer.close()


async def checkpoint_kinds(bench: Bench) -> list[Measurement]:
    """A training and a sampler checkpoint of one name, both opened."""
    name = "conformance-kinds"
    async with bench.model() as trainer:
        training = await trainer.save(name)
        sampler = await trainer.publish_named(name)

    async def load() -> None:
        await (await bench.service.load_trainer(training, label="conformance")).close()

    async def open_it() -> None:
        opened = await bench.service.open_sampler(path=sampler, label="conformance")
        await opened.compute_logprobs(FIRST.tokens)
        await opened.close()

    values = {}
    for kind, opening in (("training", load), ("sampler", open_it)):
        try:
            await opening()
        except CapacityBlocked:
            raise
        except ServiceError:
            values[kind] = 0.0
        else:
            values[kind] = 1.0
    return [Measurement("checkpoint_kinds", values)]


async def published_sampler(bench: Bench) -> list[Measurement]:
    """Two publications with a longer step between them, against the trainer at both moments."""
    trainer_at, sampler_at = [], []
    async with bench.model() as trainer:
        for length in (1.0, LONGER):
            await trained(FIRST)(trainer)
            await trainer.optim_step(bench.adam(length * bench.known.step, beta1=0.0))
            sampler = await trainer.publish("conformance")
            trainer_at.append(await bench.score(trainer))
            sampler_at.append(await _scored(sampler))
    ours, theirs = trainer_at[1] - trainer_at[0], sampler_at[1] - sampler_at[0]
    length = float(np.linalg.norm(ours))
    values = {
        "ratio": float(np.linalg.norm(theirs)) / max(length, 1e-30),
        "gap": abs(float(theirs.sum() - ours.sum())) / max(abs(float(ours.sum())), 1e-30),
        "noise": bench.known.noise,
    }
    return [Measurement("published_sampler", values)]


async def _scored(sampler: ServiceSampler) -> Vector:
    """The sampler's scores of the fixed tokens; a token without one counts as 0."""
    found = [
        value or 0.0
        for example in (FIRST, SECOND)
        for value in (await sampler.compute_logprobs(example.tokens))[1:]
    ]
    return np.array(found)


async def reports(bench: Bench) -> list[Measurement]:
    """What a new client says about itself; a silent service is no exception."""
    async with bench.model() as trainer:
        info = trainer.info
    model, rank = info.base_model, info.lora_rank
    same_model = None if model is None else float(model == bench.lora.base_model)
    same_rank = None if rank is None else float(rank == bench.lora.rank)
    return [
        Measurement("reported_base_model", {"same": same_model}, silent=model is None),
        Measurement("reported_rank", {"same": same_rank}, silent=rank is None),
        Measurement(
            "reported_optimizer",
            {"known": float(info.optimizer is not None)},
            silent=info.optimizer is None,
        ),
    ]


async def capacity_answer(bench: Bench, *, most: int) -> list[Measurement]:
    """Open up to so many clients at once; what the first refusal looks like, and a release.

    Nothing is waited for: the refusal itself is what is asked about.
    """
    opened: list[Trainer] = []
    recognised: float | None = None
    try:
        for _ in range(most):
            try:
                opened.append(await bench.service.try_trainer(bench.lora, label="conformance"))
            except CapacityBlocked:
                recognised = 1.0
                break
            except ServiceError:
                recognised = 0.0
                break
    finally:
        for trainer in opened:
            await trainer.close()
    values: dict[str, float | None] = {
        "clients": float(len(opened)),
        "refused": float(recognised is not None),
        "recognised": recognised,
        "room_again": None if recognised is None else await _room(bench),
    }
    return [Measurement("capacity_answer", values)]


async def _room(bench: Bench) -> float:
    try:
        await (await bench.service.try_trainer(bench.lora, label="conformance")).close()
    except ServiceError:
        return 0.0
    return 1.0
