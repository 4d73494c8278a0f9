"""One attempt at a run, in a process that is killed: by the person who started it, or by itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from evidence.execution import ExecutionFile
from evidence.ledger import LEDGER
from evidence.local_store import LocalStore
from evidence.object_store import ObjectStore
from evidence.profile import unscaled
from evidence.run import Run
from evidence.spec import Spec
from flows.plan import RunPlan
from flows.run import carry_out
from tasks.patience import RetryPolicy
from tasks.service_settings import Deadlines, ServiceSettings
from tests.chaos.phases import Progress
from tests.chaos.world import settle

WRITES = ("append_line", "write_new", "replace")


@dataclass(frozen=True)
class Attempt:
    """What an attempt is told.

    Attributes:
        spec: document of the spec.
        execution: document of the execution file.
        url: address of the service.
        run_dir: folder or URL under which the run lies.
        policy: shortened waits.
        deadlines: shortened deadlines.
        die_in: phase from which on it kills itself, None if it does not.
        die_at: at which instant from then on: each write has one before and one after it.
        environment: variables to set.
    """

    spec: Mapping[str, Any]
    execution: Mapping[str, Any]
    url: str
    run_dir: str
    policy: RetryPolicy
    deadlines: Deadlines
    die_in: int | None = None
    die_at: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def carry_on(attempt: Attempt, channel: Connection) -> None:
    """Carry the run on until it ends; every phase and finished part is told through the channel."""
    settle(attempt.environment)
    plan = RunPlan(
        scaled=unscaled(Spec.parse(attempt.spec), ExecutionFile.parse(attempt.execution)),
        service=ServiceSettings(url=attempt.url, deadlines=attempt.deadlines),
        run_id="run",
        run_dir=attempt.run_dir,
        policy=attempt.policy,
    )
    _Watched(attempt, channel).install()
    try:
        outcome = asyncio.run(carry_out(plan))
    except Exception as error:  # noqa: BLE001 - whoever started this decides what it means
        channel.send(("failed", f"{type(error).__name__}: {error}"))
    else:
        channel.send(("ended", outcome.to_record()))


class _Watched:
    """Looks at every write of the run directory, and ends the process at the chosen one."""

    def __init__(self, attempt: Attempt, channel: Connection) -> None:
        self._attempt, self._channel = attempt, channel
        self._progress = Progress()
        self._instant, self._writes = 0, 0

    def install(self) -> None:
        """Stand between the run and its store."""
        events, parts = _found(self._attempt.run_dir)
        for event in events:
            self._progress.event(event)
        for path in parts:  # one that was kept just before a kill has not been told
            self._tell("part", path)
        self._tell("phase", self._progress.phase, 0)
        for store in (LocalStore, ObjectStore):
            for name in WRITES:
                setattr(store, name, self._wrapped(getattr(store, name)))

    def _wrapped(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def watched(store: Any, path: str, data: bytes, **options: Any) -> Any:
            if path.startswith("lease/"):  # signs of life, from a thread of their own
                return write(store, path, data, **options)
            before = self._progress.phase
            self._progress.path(path)
            self._enter(before)
            self._maybe_die()
            result = write(store, path, data, **options)
            self._writes += 1
            before = self._progress.phase
            if path == LEDGER:
                self._progress.event(json.loads(data))
            elif path.startswith("parts/"):
                self._tell("part", path)
            self._enter(before)
            self._maybe_die()
            return result

        return watched

    def _enter(self, before: int) -> None:
        if self._progress.phase != before:
            self._tell("phase", self._progress.phase, self._writes)

    def _maybe_die(self) -> None:
        die_in = self._attempt.die_in
        if die_in is not None and self._progress.phase >= die_in:
            if self._instant == self._attempt.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self._instant += 1

    def _tell(self, *what: Any) -> None:
        self._channel.send(what)


def _found(run_dir: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Events and parts that earlier attempts have left."""
    try:
        run = Run.open(f"{run_dir}/run")
    except ValueError:  # not there yet, or not whole yet
        return [], []
    return run.events(), run.files("parts")
