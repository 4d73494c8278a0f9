"""Conformance probes of what a service keeps: optimizer state, checkpoints, publications, room."""

from __future__ import annotations

import numpy as np

from evidence.conformance import Measurement
from evidence.conformance_probes import FIRST_TOKENS
from tasks.conformance_bench import BETA1, FIRST, SECOND, Bench, Vector, apart, trained
from tasks.failures import CapacityBlocked, ServiceError
from tasks.sampling import ServiceSampler
from tasks.sdk import reads_optimizer
from tasks.trainer import Trainer

LONGER = 3.0
"""By how much the second publication's step is longer than the first's."""


async def optimizer_restored(bench: Bench) -> list[Measurement]:
    """One more step on three clients: saved and live, restored with and without optimizer.

    The step before went another way than this one, so that Adam's first moment decides where it
    goes: a live client moves by beta1 of the one and 1 - beta1 of the other, over 1 - beta1^t.
    """
    await bench.moved(trained(FIRST))
    uri = await (await bench.trainer()).save(f"conformance-restore-{bench.steps}")
    described = await bench.service.reachability.checkpoint(uri)
    number = bench.steps + 1
    live = await bench.moved(_OTHER_WAY, adam=bench.adam(beta1=BETA1))
    await bench.leave()
    resumed = await _loaded(bench, uri, optimizer=True)
    cold = await _loaded(bench, uri, optimizer=False)
    units = bench.known
    expected = (BETA1 * units.first - (1.0 - BETA1) * units.second) / (1.0 - BETA1**number)
    values = {
        "resumed": apart(resumed, live),
        "saved": apart(live, expected),
        "saved_from_cold": apart(live, -units.second),
        "cold": apart(cold, live),
        "resumed_from_cold": apart(resumed, cold),
        "noise": units.noise,
    }
    known = {"known": float(described is not None)}
    return [
        Measurement("optimizer_restored", values),
        Measurement("reported_checkpoint", known, silent=described is None),
    ]


_OTHER_WAY = trained(SECOND, factors=(-1.0,))


async def _loaded(bench: Bench, uri: str, *, optimizer: bool) -> Vector:
    """How far the next step moves a client that was loaded from a checkpoint."""
    trainer = await bench.service.load_trainer(uri, label="conformance", optimizer=optimizer)
    try:
        before = await bench.scores(trainer)
        await _OTHER_WAY(trainer)
        await trainer.optim_step(bench.adam(beta1=BETA1))
        return await bench.scores(trainer) - before
    finally:
        await trainer.close()


async def checkpoint_kinds(bench: Bench) -> list[Measurement]:
    """A training and a sampler checkpoint of one name, both opened."""
    trainer = await bench.trainer()
    name = f"conformance-kinds-{bench.steps}"
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
    for length in (1.0, LONGER):
        await bench.moved(trained(FIRST), adam=bench.adam(length * bench.known.step))
        sampler = await (await bench.trainer()).publish("conformance")
        trainer_at.append((await bench.score())[:FIRST_TOKENS])
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
    """The sampler's scores of the first example; a token without one counts as 0."""
    found = await sampler.compute_logprobs(FIRST.tokens)
    return np.array([value or 0.0 for value in found[1:]])


async def reports(bench: Bench) -> list[Measurement]:
    """What a new client says about itself; a silent service is no exception."""
    trainer = await bench.trainer()
    info, observed = trainer.info, await trainer.observe()
    settings = (observed or {}).get("optimizer")
    model, rank = info.base_model, info.lora_rank
    same_model = None if model is None else float(model == bench.lora.base_model)
    same_rank = None if rank is None else float(rank == bench.lora.rank)
    return [
        Measurement("reported_base_model", {"same": same_model}, silent=model is None),
        Measurement("reported_rank", {"same": same_rank}, silent=rank is None),
        Measurement(
            "reported_optimizer",
            {"known": float(info.optimizer is not None), "asked": float(reads_optimizer())},
            silent=info.optimizer is None,
        ),
        Measurement(
            "reported_optimizer_settings",
            {"known": float(settings is not None)},
            silent=settings is None,
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
