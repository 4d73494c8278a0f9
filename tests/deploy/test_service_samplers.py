"""Merged weights are few, and a batch that fails answers every request in it."""

import asyncio
from pathlib import Path

from deploy.local_service.faults import SemanticFaults
from deploy.local_service.futures import FutureTable
from deploy.local_service.requests import Sample
from deploy.local_service.samplers import SampleBatch, SampleJob, WeightsCache, WeightsSource
from tests.deploy.scripted_batch import ScriptedBatch


class Core:
    """Makes weights by name; samples by a function of the test's choice."""

    def __init__(self, step=None):
        self.made = []
        self._step = step

    def sampling_weights(self, base_model, folder):
        if folder is not None and folder.name == "deleted":
            raise FileNotFoundError(folder)
        self.made.append(None if folder is None else folder.name)
        return object()

    def sampling(self, weights):
        return ScriptedBatch(self._step)


def source(name):
    return WeightsSource("tiny", None if name is None else Path(name))


def test_least_recently_used_weights_are_dropped():
    """Room for two: a, b, a again, c drops b; b is made anew."""
    core = Core()
    cache = WeightsCache(core, size=2)
    for name in ("a", "b", "a", "c", "a", "b"):
        cache.get(source(name))

    assert core.made == ["a", "b", "c", "b"]
    assert cache.keys() == ["tiny:a", "tiny:b"]


def test_weights_at_hand_are_not_made_again():
    """What the trainer has merged already is put in."""
    core, weights = Core(), object()
    cache = WeightsCache(core, size=2)
    cache.put(source("a"), weights)

    assert cache.get(source("a")) is weights
    assert core.made == []


def run(core, names, cancelled=()):
    """Run a batch of jobs; return their outcomes by name."""

    async def main():
        table = FutureTable()
        table.attach(asyncio.get_running_loop())
        jobs = []
        for name in names:
            promise, _ = table.open(name, session_id="s", fingerprint="f")
            promise.cancelled = name in cancelled
            request = Sample.model_validate(
                {
                    "sampling_session_id": "s",
                    "seq_id": 0,
                    "prompt": {"chunks": []},
                    "sampling_params": {"max_tokens": 1},
                }
            )
            jobs.append(SampleJob(promise, source(names[0]), request, (1,), None, 10))
        batch = SampleBatch(
            numerics=core,
            futures=table,
            faults=SemanticFaults(allowed=False),
            cache=WeightsCache(core, size=2),
        )
        batch.add(jobs)
        while batch.step():
            pass
        return {name: table.find(name).outcome for name in names}

    return asyncio.run(main())


def test_error_in_a_batch_reaches_every_request_of_it(caplog):
    """No promise is left open; the category says that it was not the caller's fault."""

    def broken(tasks):
        raise MemoryError("no memory")

    outcomes = run(Core(broken), ["a", "b"])

    assert [outcome.body for outcome in outcomes.values()] == [
        {"error": "MemoryError: no memory", "category": "server"}
    ] * 2
    assert "sampling failed" in caplog.text


def test_deleted_checkpoint_is_named():
    """A sampler whose files are gone is the caller's business."""
    outcome = run(Core(), ["deleted"])["deleted"]

    assert outcome.body == {
        "error": "the sampler's checkpoint was deleted",
        "category": "user",
    }


def test_cancelled_requests_are_not_computed():
    """They are left out of the batch."""
    seen = []
    run(Core(lambda tasks: seen.append(len(tasks))), ["a", "b", "c"], cancelled=("b",))

    assert seen == [2]
