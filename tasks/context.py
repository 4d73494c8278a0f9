"""What every task of a run is given: the run directory, the plan, the environment, the service."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import tinker

from envs.protocols import Environment, Episode, EpisodeSettings
from evidence.execution import ExecutionFile
from evidence.run import Run
from evidence.spec import Spec
from tasks.arms import ArmPlan, arm_plans
from tasks.failures import ModelLost, ServiceError, ServiceOutage
from tasks.planned import planned_lora, planned_rollouts
from tasks.progress import Progress, ProgressEvent, silent
from tasks.reachability import ServerInfo
from tasks.service import LoraSettings, Service

T = TypeVar("T")

PILOT = "pilot"
"""Phase of the pilot as planned."""


@dataclass
class Timer:
    """Seconds of a timed block, filled in when it ends.

    Attributes:
        seconds: what the journal says.
        earlier: seconds of tries that were interrupted; the block may add them.
    """

    seconds: float = 0.0
    earlier: float = 0.0


@dataclass(frozen=True, slots=True)
class LaunchChoices:
    """What was chosen when the run was started.

    Attributes:
        limit: at most so many rollout steps per arm; None for all.
        accept_unverified: gates whose missing evidence the person accepted.
        original_gate: the activation gate as originally planned, where a profile changed it.
    """

    limit: int | None = None
    accept_unverified: tuple[str, ...] = ()
    original_gate: Mapping[str, Any] | None = None


class RunContext:
    """One run in this process.

    A plain object on purpose: Prefect looks inside dataclasses and containers that are given to a
    task, but not inside this.

    Args:
        run: the run directory.
        spec: the effective spec.
        execution: the effective execution file.
        server: what the service says about itself.
        service: where models are trained and sampled.
        progress: listener.
        choices: what the person chose at launch, and what was planned originally.
    """

    def __init__(
        self,
        *,
        run: Run,
        spec: Spec,
        execution: ExecutionFile,
        service: Service,
        server: ServerInfo,
        progress: Progress = silent,
        choices: LaunchChoices | None = None,
    ) -> None:
        self.run, self.spec, self.execution = run, spec, execution
        self.service, self.server = service, server
        self.choices = choices or LaunchChoices()
        self.arms = arm_plans(spec, execution)
        self.pilot_phase = PILOT
        self._evaluated_turns = execution.rollout.max_turns
        self._progress = progress
        self._environment: Environment | None = None
        self.tokenizer: Any = None
        """The policy's tokenizer, once the environment has been built; for readable tables."""
        self._steps_completed = sum(key[1] == "train" for key in run.keys("updates"))

    @property
    def environment(self) -> Environment:
        """The source of tasks; it needs the tokenizer of the model that the service made."""
        if self._environment is None:
            raise RuntimeError("the environment is used before the service has been probed")
        return self._environment

    @environment.setter
    def environment(self, environment: Environment) -> None:
        self._environment = environment

    @property
    def has_environment(self) -> bool:
        """Whether the environment has been built."""
        return self._environment is not None

    def variant(self, execution: ExecutionFile) -> RunContext:
        """This run under other settings; everything else is shared with it."""
        other = copy.copy(self)
        other.adopt(execution, pilot_phase=self.pilot_phase)
        return other

    def adopt(self, execution: ExecutionFile, *, pilot_phase: str) -> None:
        """Go on under other settings, which a pilot of that phase has measured.

        Held-out items are played as planned whatever the new settings say: the evaluator was frozen
        before.
        """
        self.execution, self.arms = execution, arm_plans(self.spec, execution)
        self.pilot_phase = pilot_phase

    @property
    def limit(self) -> int | None:
        """At most so many rollout steps per arm."""
        return self.choices.limit

    @property
    def accept_unverified(self) -> tuple[str, ...]:
        """Gates whose missing evidence the person accepted at launch."""
        return self.choices.accept_unverified

    @property
    def trained_arms(self) -> tuple[ArmPlan, ...]:
        """The arms that are trained."""
        return tuple(arm for arm in self.arms if arm.trained)

    def arm(self, name: str) -> ArmPlan:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def rollout_steps(self) -> int:
        """Rollout steps of each arm in this run."""
        planned = self.execution.rollout_steps
        return planned if self.limit is None else min(planned, self.limit)

    @property
    def eval_ids(self) -> tuple[str, ...]:
        """The held-out items of this run."""
        planned = self.execution.evaluation.items
        return tuple(self.environment.eval_ids[:planned])

    @property
    def lora(self) -> LoraSettings:
        """The adapter that every trained arm starts from."""
        return planned_lora(self.spec, self.execution, optimizer=self._held_optimizer())

    def _held_optimizer(self) -> dict[str, float] | None:
        """What the embedded service is asked to hold, so that it can report it at creation."""
        if not self.server.local:
            return None
        settings = self.execution.optimizer.model_dump()
        return {name: value for name, value in settings.items() if name != "name"}

    @property
    def adam(self) -> tinker.AdamParams:
        """The planned optimizer step."""
        optimizer = self.execution.optimizer
        return tinker.AdamParams(
            learning_rate=optimizer.learning_rate,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            grad_clip_norm=optimizer.grad_clip_norm,
        )

    @property
    def rollout_settings(self) -> EpisodeSettings:
        """How training episodes are sampled."""
        return planned_rollouts(self.spec, self.execution)

    @property
    def evaluation_settings(self) -> EpisodeSettings:
        """How held-out items are decoded."""
        evaluation = self.execution.evaluation
        return EpisodeSettings(
            max_tokens=evaluation.max_tokens,
            temperature=evaluation.temperature,
            max_turns=self._evaluated_turns,
            max_seq_len=self.spec.max_seq_len,
            max_seq_len_policy=self.execution.max_seq_len_policy,
        )

    @property
    def steps_completed(self) -> int:
        """Optimizer steps of the comparison that are done, over all arms."""
        return self._steps_completed

    def step_completed(self) -> None:
        """Count one more optimizer step of the comparison."""
        self._steps_completed += 1

    def tell(
        self,
        phase: str,
        message: str = "",
        *,
        arm: str | None = None,
        done: int = 0,
        total: int = 0,
    ) -> None:
        """Tell the listener what is going on."""
        self._progress(ProgressEvent(phase, arm, done, total, message))

    @contextmanager
    def timed(
        self, arm: str, phase: str, step: int, what: str, *, units: int, samples: int = 0
    ) -> Iterator[Timer]:
        """Time a block; its row joins the journal unless this attempt has one already."""
        timer, started = Timer(), time.monotonic()
        yield timer
        timer.seconds = time.monotonic() - started + timer.earlier
        self.run.append(
            "timing",
            attempt=self.run.attempt,
            arm=arm,
            phase=phase,
            step=step,
            what=what,
            seconds=timer.seconds,
            units=units,
            samples=samples,
        )

    def timings(self, **wanted: Any) -> list[dict[str, Any]]:
        """The timings so far whose fields have the wanted values."""
        return [
            event
            for event in self.run.events("timing")
            if all(event[name] == value for name, value in wanted.items())
        ]


async def settle_all(work: Sequence[Awaitable[T]]) -> list[T]:
    """Wait for all of them, and only then raise what went wrong.

    A lost model or a service error waits for its siblings, so that what they finished is kept. The
    error raised is the gravest: a defect before a final service error before a lost model.
    """
    results = await asyncio.gather(*work, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise min(errors, key=_rank)
    return [result for result in results if not isinstance(result, BaseException)]


def require_graded(episodes: Sequence[Episode]) -> None:
    """Refuse episodes whose simulator or judge failed: they are neither a score nor dropped.

    Raises:
        ServiceOutage: if any is not graded. The run may go on later; finished work is kept.
    """
    for episode in episodes:
        if not episode.graded:
            words = str(episode.info.get("failure") or episode.stop_reason)
            raise ServiceOutage(words, what=f"grading of {episode.item_id}", final=True)


def _rank(error: BaseException) -> int:
    if not isinstance(error, ServiceError):
        return 0
    if error.final:
        return 1
    return 3 if isinstance(error, ModelLost) else 2
