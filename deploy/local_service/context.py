"""What every part of the service shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from deploy.local_service.bases import Bases
from deploy.local_service.checkpoint_store import CheckpointStore
from deploy.local_service.engine_loop import EngineLoop
from deploy.local_service.errors import saturated
from deploy.local_service.faults import SemanticFaults
from deploy.local_service.futures import FutureTable
from deploy.local_service.runs import RunBook
from deploy.local_service.samplers import SampleJob
from deploy.local_service.sessions import SessionBook
from deploy.local_service.settings import ServiceSettings


@dataclass(frozen=True, slots=True)
class Context:
    """The state of one service."""

    settings: ServiceSettings
    bases: Bases
    sessions: SessionBook
    runs: RunBook
    checkpoints: CheckpointStore
    futures: FutureTable
    engine: EngineLoop[SampleJob]
    faults: SemanticFaults
    clock: Callable[[], datetime]

    def check_queue(self, *, status: int) -> None:
        """Refuse a request when too many are waiting.

        Raises:
            ApiError: the capacity answer.
        """
        if self.futures.pending() > self.settings.max_queue:
            raise saturated(
                f"queue is full ({self.settings.max_queue} requests waiting)",
                status=status,
                retry_after_seconds=self.settings.retry_after_seconds,
            )
