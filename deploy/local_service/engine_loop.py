"""The one thread that computes: training in arrival order per model, sampling in shared batches.

Two kinds of work share the thread. Training jobs of one model run in the order in which they
arrived; models take turns. Sampling jobs that use the same weights run as one continuous batch,
which later ones may join between two tokens. Neither kind starves the other: each is charged the
seconds it uses, and when both wait, the one that has used less goes next. A training job may also
run in the middle of a sampling batch (between two tokens), so that a long batch holds nobody up.
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
"""How long jobs on other weights wait before a running batch takes no further jobs."""


class SampleWork(Protocol):
    """A sampling job, as the loop sees it."""

    @property
    def weights_key(self) -> str:
        """Name of the weights it samples from; equal keys share a batch."""


JobT = TypeVar("JobT", bound=SampleWork)
ResultT = TypeVar("ResultT")


class EngineStoppedError(Exception):
    """The service is going down; work that was not done will not be done."""


class BatchRunner(Protocol[JobT]):
    """Computes sampling jobs on one set of weights."""

    def __call__(self, jobs: list[JobT], admit: Callable[[], list[JobT]]) -> None:
        """Run the jobs, and those that `admit` hands out between two tokens, to their end.

        It gives every job its outcome and lets no error out, except `EngineStoppedError`.
        """


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
        self, run_batch: BatchRunner[JobT], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare the loop.

        Args:
            run_batch: computes a batch of sampling jobs.
            clock: monotonic seconds.
        """
        self._run_batch = run_batch
        self._clock = clock
        self._ready = threading.Condition()
        self._control: deque[Callable[[], None]] = deque()
        self._train: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()
        self._samples: OrderedDict[str, deque[_Waiting[JobT]]] = OrderedDict()
        self._share = FairShare()
        self._running = {"train": 0, "sample": 0}
        self._stopping = False
        self._mark = 0.0
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
            if not self._train and not self._running["train"]:
                self._share.level("train")
            self._train.setdefault(model_id, deque()).append(job)
            self._ready.notify()

    def submit_sample(self, job: JobT) -> None:
        """Queue a sampling job."""
        with self._ready:
            if not self._samples and not self._running["sample"]:
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
            except EngineStoppedError:
                return
            except Exception:
                logger.exception("a job of the engine let an error out")

    def _anything(self) -> bool:
        return bool(self._control or self._train or self._samples)

    def _turn(self) -> None:
        self._run_control()
        with self._ready:
            waiting = [
                kind for kind, queue in (("train", self._train), ("sample", self._samples)) if queue
            ]
        if not waiting:
            return
        self._mark = self._clock()
        if self._share.next_kind(waiting) == "train":
            self._run_one_training_job()
        else:
            self._run_sampling_batch()

    def _run_control(self) -> None:
        while True:
            with self._ready:
                if not self._control:
                    return
                job = self._control.popleft()
            job()

    def _charge(self, kind: str) -> None:
        now = self._clock()
        with self._ready:
            self._share.charge(kind, now - self._mark)
        self._mark = now

    def _finish(self, kind: str) -> None:
        self._charge(kind)
        with self._ready:
            self._running[kind] -= 1

    def _run_one_training_job(self) -> None:
        with self._ready:
            model_id, queue = next(iter(self._train.items()))
            job = queue.popleft()
            # The next model comes first next time.
            del self._train[model_id]
            if queue:
                self._train[model_id] = queue
            self._running["train"] += 1
        try:
            job()
        finally:
            self._finish("train")

    def _run_sampling_batch(self) -> None:
        with self._ready:
            key = min(self._samples, key=lambda name: self._samples[name][0].since)
            jobs = [waiting.job for waiting in self._samples.pop(key)]
            self._running["sample"] += 1
        try:
            self._run_batch(jobs, lambda: self._between_tokens(key))
        finally:
            self._finish("sample")

    def _between_tokens(self, key: str) -> list[JobT]:
        """Let others in while a batch runs, and return the jobs that join it."""
        self._run_control()
        self._charge("sample")
        while self._training_is_behind():
            self._run_one_training_job()
        with self._ready:
            if self._stopping:
                raise EngineStoppedError("the service is going down")
            if self._others_wait_too_long(key):
                return []
            return [waiting.job for waiting in self._samples.pop(key, ())]

    def _training_is_behind(self) -> bool:
        with self._ready:
            return (
                bool(self._train)
                and not self._stopping
                and self._share.next_kind(("train", "sample")) == "train"
            )

    def _others_wait_too_long(self, key: str) -> bool:
        horizon = self._clock() - _ROTATION_SECONDS
        return any(
            queue[0].since <= horizon for name, queue in self._samples.items() if name != key
        )
