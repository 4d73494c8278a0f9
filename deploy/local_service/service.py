"""The embedded service, put together: state, engine, and what happens at start, end and silence."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import secrets
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from deploy.local_service.bases import Bases
from deploy.local_service.checkpoint_store import CheckpointStore, utc_now
from deploy.local_service.context import Context
from deploy.local_service.engine_loop import EngineLoop
from deploy.local_service.faults import SemanticFaults
from deploy.local_service.futures import FutureTable
from deploy.local_service.live import Numerics
from deploy.local_service.operations import Operations
from deploy.local_service.runs import RunBook
from deploy.local_service.samplers import SampleBatch, SampleJob, WeightsCache
from deploy.local_service.sampling_desk import SamplingDesk
from deploy.local_service.sessions import SessionBook, session_ended
from deploy.local_service.settings import ServiceSettings
from deploy.local_service.training_desk import TrainingDesk
from deploy.local_service.training_queue import TrainingQueue

logger = logging.getLogger(__name__)

_STOP_SECONDS = 10.0


class Service:
    """One embedded service over one store folder."""

    def __init__(
        self,
        settings: ServiceSettings,
        numerics: Numerics,
        *,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        """Read the store and put the parts together. The caller holds the store's lock.

        Args:
            settings: what the service was told.
            numerics: the numeric core.
            clock: time of day, in UTC.
        """
        self.settings = settings
        self.numerics = numerics
        self.instance_id = secrets.token_hex(8)
        """Another one after every start."""
        self.started_at = clock().isoformat()
        self.cache = WeightsCache(numerics, size=settings.max_merged)
        futures = FutureTable()
        faults = SemanticFaults(allowed=settings.allow_faults, names=settings.faults)
        engine: EngineLoop[SampleJob] = EngineLoop(
            lambda: SampleBatch(
                numerics=numerics, futures=futures, faults=faults, cache=self.cache
            ),
            max_batches=settings.max_merged,
        )
        self.context = Context(
            settings=settings,
            bases=Bases(numerics, settings.models),
            sessions=SessionBook(settings.store, clock=clock),
            runs=RunBook(settings.store, clock=clock),
            checkpoints=CheckpointStore(settings.store, clock=clock),
            futures=futures,
            engine=engine,
            faults=faults,
            clock=clock,
        )
        self.queue = TrainingQueue(self.context)
        self.sampling = SamplingDesk(self.context)
        self.training = TrainingDesk(
            self.context,
            queue=self.queue,
            operations=Operations(
                numerics=numerics,
                checkpoints=self.context.checkpoints,
                faults=faults,
                cache=self.cache,
            ),
            sampling=self.sampling,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Clean up after a kill, load what is to be preloaded, and compute until the block ends."""
        self.context.futures.attach(asyncio.get_running_loop())
        self.context.checkpoints.clean()
        self.sampling.clean()
        self.context.engine.start()
        for name in self.settings.preload:
            await self.context.bases.ensure(name)
        upkeep = asyncio.create_task(self._upkeep())
        try:
            yield
        finally:
            upkeep.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await upkeep
            self.context.futures.wake_all()
            stopped = await asyncio.to_thread(self.context.engine.stop, seconds=_STOP_SECONDS)
            if not stopped:
                logger.warning("the engine did not stop within %g s", _STOP_SECONDS)
            self.context.runs.close()

    async def _upkeep(self) -> None:
        period = min(5.0, self.settings.session_timeout_seconds / 4)
        while True:
            await asyncio.sleep(period)
            try:
                self.sweep()
            except Exception:
                logger.exception("upkeep failed; it is tried again")

    def sweep(self) -> None:
        """End silent sessions, forget old results, delete expired checkpoints."""
        for session in self.context.sessions.silent(seconds=self.settings.session_timeout_seconds):
            self.finish_session(
                session.session_id,
                reason="silence",
                detail=f"nothing heard for {self.settings.session_timeout_seconds:g} s",
            )
        self.context.futures.sweep(older_than_seconds=self.settings.result_ttl_seconds)
        self.context.checkpoints.sweep()

    def finish_session(self, session_id: str, *, reason: str, detail: str | None) -> None:
        """End a session and release its models, samplers and results; the first end stands."""
        session = self.context.sessions.finish(session_id, reason=reason, detail=detail)
        if session is None or session.finished is None:
            return
        released = self.queue.release(session)
        error = session_ended(session_id, session.finished)
        self.context.futures.drop_session(session_id, error=error)
        self.sampling.release(session)
        logger.info("session %s ended (%s); released %s", session_id, reason, released)

    def info(self) -> dict[str, Any]:
        """Return what the service is and what it holds."""
        bases = [self.context.bases.loaded(name) for name in self.settings.models]
        hidden = {"api_key", "ready_file", "store", "cache_dir"}
        return {
            "instance_id": self.instance_id,
            "started_at": self.started_at,
            "models": [
                {
                    "name": base.name,
                    "base_sha256": base.base_sha256,
                    "source": base.source,
                    "dtype": base.dtype,
                    "vocab_size": base.vocab_size,
                    "context_length": base.context_length,
                    "not_repeatable": list(base.not_repeatable),
                }
                for base in bases
                if base is not None
            ],
            "served_models": list(self.settings.models),
            "dtype": self.settings.dtype,
            "threads": self.settings.threads,
            "versions": self._versions(),
            "settings": self.settings.model_dump(mode="json", exclude=hidden),
            "faults": self.context.faults.names(),
            "live_models": len(self.queue.models),
            "pending_requests": self.context.futures.pending(),
        }

    def _versions(self) -> dict[str, str]:
        try:
            own = version("gated-rl")
        except PackageNotFoundError:
            own = "unknown"
        return {"gated-rl": own, "python": platform.python_version(), **self.numerics.versions()}
