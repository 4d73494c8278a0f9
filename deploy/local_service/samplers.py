"""Sampling sessions, the weights they use, and the batches in which they are computed."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local_service.engine_loop import EngineStoppedError
from deploy.local_service.faults import SemanticFaults
from deploy.local_service.futures import FutureTable, Outcome, Promise, failed
from deploy.local_service.live import Numerics, SampleTask
from deploy.local_service.requests import Sample
from deploy.local_service.wire import Array, SampleResult, encode_sample_result

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Which weights to sample from."""

    base_model: str
    folder: Path | None
    """Folder of an adapter; None for the base model."""

    @property
    def key(self) -> str:
        """Equal for equal weights: folders are written once and never change."""
        return f"{self.base_model}:{self.folder.name if self.folder else 'base'}"


@dataclass(frozen=True, slots=True, eq=False)
class SampleJob:
    """One accepted sampling request."""

    promise: Promise
    source: WeightsSource
    request: Sample
    prompt: tuple[int, ...]
    targets: Array | None
    vocab_size: int

    @property
    def weights_key(self) -> str:
        """Name of the weights; equal keys share a batch."""
        return self.source.key


class WeightsCache:
    """Merged weights, the least recently used dropped first."""

    def __init__(self, numerics: Numerics, *, size: int) -> None:
        self._numerics = numerics
        self._size = size
        self._kept: OrderedDict[str, Any] = OrderedDict()

    def get(self, source: WeightsSource) -> Any:
        """Return the weights, merging them if they are not at hand.

        Raises:
            FileNotFoundError: if the adapter's folder is gone.
        """
        if source.key in self._kept:
            self._kept.move_to_end(source.key)
            return self._kept[source.key]
        self._make_room()
        weights = self._numerics.sampling_weights(source.base_model, source.folder)
        self._kept[source.key] = weights
        return weights

    def put(self, source: WeightsSource, weights: Any) -> None:
        """Keep weights that are at hand already."""
        self._make_room()
        self._kept[source.key] = weights

    def _make_room(self) -> None:
        # Before, not after: a merged copy is as large as the base model.
        while len(self._kept) >= self._size:
            self._kept.popitem(last=False)

    def keys(self) -> list[str]:
        """Name what is kept, least recently used first."""
        return list(self._kept)


class SampleRunner:
    """Computes batches of sampling jobs on the engine's thread."""

    def __init__(
        self,
        *,
        numerics: Numerics,
        futures: FutureTable,
        faults: SemanticFaults,
        cache: WeightsCache,
    ) -> None:
        self._numerics = numerics
        self._futures = futures
        self._faults = faults
        self._cache = cache

    def __call__(self, jobs: list[SampleJob], admit: Callable[[], list[SampleJob]]) -> None:
        """Run a batch; jobs of the same weights may join between two tokens."""
        batch: list[SampleJob] = []

        def tasks_of(new: list[SampleJob]) -> list[SampleTask]:
            alive = [job for job in new if not job.promise.cancelled]
            batch.extend(alive)
            return [self._task(job) for job in alive]

        tasks = tasks_of(jobs)
        if not tasks:
            return
        try:
            weights = self._cache.get(batch[0].source)
            self._numerics.generate(weights, tasks, lambda: tasks_of(admit()))
        except EngineStoppedError:
            raise
        except FileNotFoundError:
            self._fail(batch, "the sampler's checkpoint was deleted", category="user")
        except Exception as error:
            logger.exception("sampling failed")
            self._fail(batch, f"{type(error).__name__}: {error}", category="server")
        else:
            self._fail(batch, "cancelled", category="user")

    def _task(self, job: SampleJob) -> SampleTask:
        def finish(result: SampleResult) -> None:
            wrong = self._faults.sample_result(job.request, result)
            self._futures.resolve(job.promise, Outcome(proto=encode_sample_result(wrong)))

        return SampleTask(
            request=self._faults.sample_request(job.request, vocab_size=job.vocab_size),
            prompt=job.prompt,
            targets=job.targets,
            finish=finish,
            cancelled=lambda: job.promise.cancelled,
        )

    def _fail(self, batch: list[SampleJob], message: str, *, category: str) -> None:
        # Promises that have an outcome keep it.
        for job in batch:
            self._futures.resolve(job.promise, failed(message, category=category))
