"""Sampling sessions, the weights they use, and the batches in which they are computed."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local_service.faults import SemanticFaults
from deploy.local_service.futures import FutureTable, Outcome, Promise, failed
from deploy.local_service.live import Numerics, SampleTask, Sampling
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


class SampleBatch:
    """Sampling jobs on one set of weights, computed on the engine's thread."""

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
        self._jobs: list[SampleJob] = []
        self._sampling: Sampling | None = None

    def add(self, jobs: Sequence[SampleJob]) -> None:
        """Take jobs on, all of the same weights; cancelled ones are left out."""
        alive = [job for job in jobs if not job.promise.cancelled]
        self._jobs = [job for job in self._jobs if job.promise.outcome is None] + alive
        if not alive:
            return
        with self._failing_all():
            if self._sampling is None:
                weights = self._cache.get(alive[0].source)
                self._sampling = self._numerics.sampling(weights)
            self._sampling.add([self._task(job) for job in alive])

    def step(self) -> bool:
        """Add one token to each sequence; say whether anything is left to do."""
        if self._sampling is None:
            return False
        with self._failing_all():
            if self._sampling.step():
                return True
            self._fail("cancelled", category="user")
        return False

    @contextlib.contextmanager
    def _failing_all(self) -> Iterator[None]:
        """Give every job without an outcome the error that the block raises, and end the batch."""
        try:
            yield
        except FileNotFoundError:
            self._sampling = None
            self._fail("the sampler's checkpoint was deleted", category="user")
        except Exception as error:
            logger.exception("sampling failed")
            self._sampling = None
            self._fail(f"{type(error).__name__}: {error}", category="server")

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

    def _fail(self, message: str, *, category: str) -> None:
        # Promises that have an outcome keep it.
        for job in self._jobs:
            self._futures.resolve(job.promise, failed(message, category=category))
