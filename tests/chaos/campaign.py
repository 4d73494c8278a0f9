"""One run that is killed again and again, until it ends all the same."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from tasks.patience import RetryPolicy
from tasks.service_settings import Deadlines
from tests.chaos.phases import PHASES
from tests.chaos.victim import Attempt, carry_on
from tests.chaos.world import World

POLICY = RetryPolicy(
    capacity_delays=(0.2, 0.4, 0.8),
    outage_delays=(0.2, 0.4, 0.8, 1.5),
    same_error_limit=20,  # the injected 500 always has the same words
)
DEADLINES = Deadlines(
    create=60.0, train=60.0, save=60.0, sample=120.0, sample_progress=60.0, close=2.0
)
LONGEST_ATTEMPT = 300.0
MOST_FAILURES = 10
Documents = tuple[Mapping[str, Any], Mapping[str, Any]]


@dataclass
class Profile:
    """How long each phase of an undisturbed run takes, and how often it writes."""

    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    writes: list[int] = field(default_factory=lambda: [0] * len(PHASES))


@dataclass(frozen=True)
class Kill:
    """One planned kill.

    Attributes:
        phase: index of the phase in which it falls.
        share: where in it, from 0 to 1.
        by_write: at a write of the run directory instead of at a moment of the clock.
        service: ``""``, ``too`` (the service is killed with it) or ``alone``.
    """

    phase: int
    share: float
    by_write: bool
    service: str = ""


@dataclass
class Story:
    """What happened to one run.

    Attributes:
        kills: SIGKILLs of the run's process by the phase in which they found it.
        service_kills: kills of the service while the run was going on.
        attempts: processes that worked on it.
        held: starts that were refused because the run was held by another process's lease.
        outcome: how it ended.
        finished: when each part was known to be kept, seconds since the epoch.
        seconds: wall time.
    """

    kills: Counter[str] = field(default_factory=Counter)
    service_kills: int = 0
    attempts: int = 0
    held: int = 0
    outcome: dict[str, Any] = field(default_factory=dict)
    finished: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def schedule(rng: random.Random, kills: Mapping[str, int]) -> list[Kill]:
    """Plan kills at random moments of given phases, in the order of the phases.

    A phase that is killed several times is gone through in as many pieces, so that each piece has
    its own moment; every fifth kill or so takes the service with it, or the service alone.
    """
    planned = []
    for index, phase in enumerate(PHASES):
        count = kills.get(phase, 0)
        for _ in range(count):
            share = rng.random() * min(1.0, 1.4 / count)
            service = rng.choice(["too", "alone"]) if rng.random() < 0.2 else ""
            planned.append(Kill(index, share, not service and rng.random() < 0.5, service))
    return planned


class Campaign:
    """A run of some documents in a world."""

    def __init__(self, world: World, documents: Documents, *, name: str) -> None:
        self._world, self._documents = world, documents
        self.run_dir = f"{world.run_root}/{name}"
        self._machines = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.chaos.victim"])

    def undisturbed(self) -> tuple[Story, Profile]:
        """Let the run go through, and measure it."""
        story, profile = Story(), Profile()
        started = time.monotonic()
        process, channel = self._start(None, profile)
        at, writes, phase = time.monotonic(), 0, 0
        for message in _messages(process, channel):
            if message[0] == "phase":
                profile.seconds[phase] += time.monotonic() - at
                profile.writes[phase] += message[2] - writes
                at, phase, writes = time.monotonic(), message[1], message[2]
            self._note(story, message)
        profile.seconds[phase] += time.monotonic() - at
        profile.writes[phase] = max(1, profile.writes[phase])
        story.attempts, story.seconds = 1, time.monotonic() - started
        return story, profile

    def disturbed(self, kills: list[Kill], profile: Profile) -> Story:
        """Kill the run at each planned moment, and let it end."""
        story, left = Story(), list(kills)
        started = time.monotonic()
        while not story.outcome:
            self._attempt(story, left, profile)
        story.seconds = time.monotonic() - started
        return story

    def _attempt(self, story: Story, left: list[Kill], profile: Profile) -> None:
        """One process of the run, and at most one kill of it."""
        story.attempts += 1
        told = len(story.failures)
        process, channel = self._start(left[0] if left else None, profile)
        phase = self._watch(process, channel, story, left, profile)
        process.join()
        if process.exitcode == -9:
            del left[:1]
            story.kills[PHASES[phase]] += 1
        elif len(story.failures) > told and "lease" in story.failures[-1]:
            story.failures.pop()
            story.held += 1
            time.sleep(0.3)
        elif len(story.failures) > MOST_FAILURES:
            raise RuntimeError("; ".join(story.failures))

    def _watch(
        self, process: Any, channel: Connection, story: Story, left: list[Kill], profile: Profile
    ) -> int:
        """Follow a process until it is gone, and strike at the planned moment; its last phase."""
        phase, moment = 0, float("inf")
        by_itself = bool(left) and left[0].by_write
        deadline = time.monotonic() + LONGEST_ATTEMPT
        while True:
            seconds = min(moment, deadline) - time.monotonic()
            ready = wait([process.sentinel, channel], max(0.0, seconds))
            message = _received(channel) if channel in ready else None
            if message is not None:
                self._note(story, message)
                if message[0] == "phase":
                    phase = message[1]
            elif ready:
                return phase
            elif time.monotonic() >= deadline:
                process.kill()
                raise RuntimeError(f"an attempt did not end within {LONGEST_ATTEMPT} s")
            else:
                moment, by_itself = float("inf"), False
                if self._strike(left[0], process, story):
                    return phase
                del left[:1]
            if left and not by_itself and moment == float("inf") and phase >= left[0].phase:
                length = max(0.05, profile.seconds[left[0].phase])
                moment = time.monotonic() + left[0].share * length

    def _strike(self, kill: Kill, process: Any, story: Story) -> bool:
        """Kill the process, the service, or both; whether the process was killed."""
        if kill.service != "alone":
            process.kill()
        if kill.service:
            story.service_kills += 1
            self._world.kill_service(pause=0.3 * kill.share)
        return kill.service != "alone"

    def _start(self, kill: Kill | None, profile: Profile) -> tuple[Any, Connection]:
        spec, execution = self._documents
        by_write = kill is not None and kill.by_write
        instants = 2 * max(1, profile.writes[kill.phase]) if kill is not None else 0
        attempt = Attempt(
            spec=spec,
            execution=execution,
            url=self._world.url,
            run_dir=self.run_dir,
            policy=POLICY,
            deadlines=DEADLINES,
            die_in=kill.phase if kill is not None and by_write else None,
            die_at=int(kill.share * instants) if kill is not None else 0,
            environment={
                # On a store that machines share, each attempt runs on another one than the last.
                "HOME": str(self._world.home(self._machines % 2)),
                "TINKER_TELEMETRY": "0",
                "TINKER_API_KEY": "tml-local-test-key",
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1",
                **{name: os.environ[name] for name in ("NO_PROXY", "no_proxy")},
                **self._world.environment,
            },
        )
        self._machines += 1
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=carry_on, args=(attempt, sender), daemon=True)
        process.start()
        sender.close()
        return process, receiver

    def _note(self, story: Story, message: tuple[Any, ...]) -> None:
        if message[0] == "part":
            story.finished.setdefault(message[1], time.time())
        elif message[0] == "ended":
            story.outcome = message[1]
        elif message[0] == "failed":
            story.failures.append(message[1])


def _received(channel: Connection) -> tuple[Any, ...] | None:
    try:
        return tuple(channel.recv())
    except (EOFError, OSError):
        return None


def _messages(process: Any, channel: Connection) -> Any:
    while (message := _received(channel)) is not None:
        yield message
    process.join()
