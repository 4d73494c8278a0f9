"""The one thread that computes: training in arrival order per model, sampling in shared batches.

Two kinds of work share the thread. Training jobs of one model run in the order in which they
arrived; models take turns. Sampling jobs that use the same weights form one batch, which later
ones join between two tokens; batches of different weights are open side by side and take turns
token by token, so that none waits for another's longest sequence. Neither kind starves the other:
each is charged the seconds it uses, and when both wait, the one that has used less goes next, so
that a training job may also run between two tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

_BATCH_WINDOW_SECONDS = 0.003
"""Pause before a batch is started on an idle engine: requests of one group arrive together."""
_ROTATION_SECONDS = 1.0
"""How long jobs on other weights wait for a place before the oldest batch takes no more jobs."""


class SampleWork(Protocol):
    """A sampling job, as the loop sees it."""

    @property
    def weights_key(self) -> str:
        """Name of the weights it samples from; equal keys share a batch."""


JobT = TypeVar("JobT", bound=SampleWork)
JobT_contra = TypeVar("JobT_contra", bound=SampleWork, contravariant=True)
ResultT = TypeVar("ResultT")


class EngineStoppedError(Exception):
    """The service is going down; work that was not done will not be done."""


class SampleBatch(Protocol[JobT_contra]):
    """Sampling jobs on one set of weights, in computation.

    It gives every job its outcome; an error that it lets out ends the batch.
    """

    def add(self, jobs: Sequence[JobT_contra]) -> None:
        """Take jobs on."""

    def step(self) -> bool:
        """Compute one more token of each; say whether anything is left to do."""


@dataclass(slots=True)
class FairShare:
    """Seconds charged to each kind of work.

    A kind that was idle does not save up: when it comes back it starts level with the other.
    """

    used_seconds: dict[str, float] = field(default_factory=lambda: {"train": 0.0, "sample": 0.0})

    def charge(self, kind: str, seconds: float) -> None:
        """Add seconds to a kind's account."""
        self.used_seconds[kind] += seconds

    def level(self, kind: str) -> None:
        """Bring a kind that had nothing to do up to the other's account."""
        self.used_seconds[kind] = max(self.used_seconds.values())

    def next_kind(self, waiting: Sequence[str]) -> str:
        """Return the waiting kind that has used the least (training first when level)."""
        return min(waiting, key=lambda kind: (self.used_seconds[kind], kind != "train"))


@dataclass(slots=True)
class _Waiting(Generic[JobT]):
    job: JobT
    since: float


class EngineLoop(Generic[JobT]):
    """Queues and the thread that empties them."""

    def __init__(
        self,
        open_batch: Callable[[], SampleBatch[JobT]],
        *,
        max_batches: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the loop.

        Args:
            open_batch: makes an empty batch.
            max_batches: most batches open at once.
            clock: monotonic seconds.
        """
        self._open_batch = open_batch
        self._max_batches = max_batches
        self._clock = clock
        self._ready = threading.Condition()
        self._control: deque[Callable[[], None]] = deque()
        self._train: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()
        self._samples: OrderedDict[str, deque[_Waiting[JobT]]] = OrderedDict()
        self._batches: dict[str, SampleBatch[JobT]] = {}
        """Open batches by their weights, the oldest first; the thread's own."""
        self._turns: deque[str] = deque()
        """Weights of the open batches, the one whose turn it is first."""
        self._share = FairShare()
        self._training = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, *, seconds: float) -> bool:
        """End the loop after the job at hand; say whether it ended in time."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def submit_train(self, model_id: str, job: Callable[[], None]) -> None:
        """Queue a training job behind the model's earlier ones. The job lets no error out."""
        with self._ready:
            if not self._train and not self._training:
                self._share.level("train")
            self._train.setdefault(model_id, deque()).append(job)
            self._ready.notify()

    def submit_sample(self, job: JobT) -> None:
        """Queue a sampling job."""
        with self._ready:
            if not self._samples and not self._batches:
                self._share.level("sample")
            waiting = _Waiting(job, self._clock())
            self._samples.setdefault(job.weights_key, deque()).append(waiting)
            self._ready.notify()

    def call(self, job: Callable[[], ResultT]) -> Future[ResultT]:
        """Run a short job on the engine's thread before anything else, for a consistent look."""
        future: Future[ResultT] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except Exception as error:  # noqa: BLE001 - handed to the caller
                future.set_exception(error)

        with self._ready:
            if self._stopping:
                future.set_exception(EngineStoppedError("the service is going down"))
                return future
            self._control.append(run)
            self._ready.notify()
        return future

    def waiting(self, model_id: str) -> int:
        """Count a model's training jobs that have not started."""
        with self._ready:
            return len(self._train.get(model_id, ()))

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._ready:
                idle = not self._anything()
                while not self._anything() and not self._stopping:
                    self._ready.wait()
                if self._stopping:
                    return
            if idle and self._samples and not self._train:
                time.sleep(_BATCH_WINDOW_SECONDS)
            try:
                self._turn()
            except Exception:
                logger.exception("a job of the engine let an error out")

    def _anything(self) -> bool:
        return bool(self._control or self._train or self._samples or self._batches)

    def _turn(self) -> None:
        self._run_control()
        with self._ready:
            sampling = bool(self._samples or self._batches)
            waiting = [
                kind for kind, there in (("train", self._train), ("sample", sampling)) if there
            ]
        if not waiting:
            return
        kind = self._share.next_kind(waiting)
        begun = self._clock()
        try:
            if kind == "train":
                self._run_one_training_job()
            else:
                self._step_one_batch()
        finally:
            with self._ready:
                self._share.charge(kind, self._clock() - begun)

    def _run_control(self) -> None:
        while True:
            with self._ready:
                if not self._control:
                    return
                job = self._control.popleft()
            job()

    def _run_one_training_job(self) -> None:
        with self._ready:
            model_id, queue = next(iter(self._train.items()))
            job = queue.popleft()
            # The next model comes first next time.
            del self._train[model_id]
            if queue:
                self._train[model_id] = queue
            self._training = True
        try:
            job()
        finally:
            self._training = False

    def _step_one_batch(self) -> None:
        with self._ready:
            key = self._next_key()
            queue = None if self._closed(key) else self._samples.pop(key, None)
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = self._open_batch()
        else:
            self._turns.popleft()
        more = False
        try:
            if queue is not None:
                batch.add([waiting.job for waiting in queue])
            more = batch.step()
        finally:
            if more:
                self._turns.append(key)
            else:
                del self._batches[key]

    def _next_key(self) -> str:
        """Return the weights that waited longest for a free place, or else the next in turn."""
        without = self._without_batch()
        if without and len(self._batches) < self._max_batches:
            return min(without, key=lambda key: self._samples[key][0].since)
        return self._turns[0]

    def _closed(self, key: str) -> bool:
        """Say whether a batch takes no more jobs: the oldest makes room for those without one."""
        if len(self._batches) < self._max_batches or key != next(iter(self._batches)):
            return False
        horizon = self._clock() - _ROTATION_SECONDS
        return any(self._samples[other][0].since <= horizon for other in self._without_batch())

    def _without_batch(self) -> list[str]:
        return [key for key in self._samples if key not in self._batches]
