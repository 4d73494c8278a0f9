"""One arm's training state: which weights are live, and how to get back to them.

The history that counts is in the tables: update k of an arm is applied once, to the weights after
update k - 1. What is live at the service is a copy of it. When the copy is lost, or it is not
known whether a step was applied to it, it is dropped; the last checkpoint that the service still
keeps is loaded with its optimizer, and the stored updates after it are applied again. Nothing is
ever sampled again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import tinker

from tasks.anchor import recomputed_logprobs
from tasks.arms import ArmPlan
from tasks.context import RunContext
from tasks.datums import Floats, datum_of
from tasks.failures import (
    Failure,
    FailureKind,
    ServiceError,
    checkpoint_gone,
    checkpoint_named_gone,
)
from tasks.fingerprint import MOVED_NATS
from tasks.minibatch import Minibatch, MinibatchLoss, load_minibatch, write_update
from tasks.openings import Openings, refuse_load
from tasks.patience import Patience
from tasks.restore_check import (
    compare_three_ways,
    difference,
    load_facts,
    note_replay,
    three_way_is_due,
    wrong_weights,
)
from tasks.sampling import ServiceSampler
from tasks.trainer import Trainer
from tasks.witness import Witness

T = TypeVar("T")


class Learner:
    """The live training client of one arm in one phase.

    Args:
        ctx: the run.
        arm: the arm.
        phase: ``train`` or ``pilot``.
        init_uri: the full initialization checkpoint that every arm starts from.
    """

    def __init__(self, ctx: RunContext, arm: ArmPlan, *, phase: str, init_uri: str) -> None:
        self.ctx, self.arm, self.phase = ctx, arm, phase
        self._init_uri = init_uri
        self._openings = Openings(ctx, arm.name, phase)
        self._trainer: Trainer | None = None
        self._version = 0
        self._witness = Witness(counts=False)
        self._sampler: tuple[int, ServiceSampler] | None = None
        self._lost: Patience | None = None
        self._busy = asyncio.Lock()

    def version_of_step(self, step: int) -> int:
        """Optimizer steps done before rollout step `step` is sampled."""
        return step * self.ctx.execution.rollout.updates_per_step

    @property
    def init_uri(self) -> str:
        """The initialization checkpoint that the arm starts from."""
        return self._init_uri

    @property
    def trainer(self) -> Trainer | None:
        """The live client, if there is one."""
        return self._trainer

    async def at(self, version: int) -> Trainer:
        """The live client with exactly `version` updates applied; restores and replays if needed.

        Raises:
            ServiceError: a final one.
        """

        async def ready(trainer: Trainer) -> Trainer:
            return trainer

        return await self.do(version, "training client", ready)

    async def do(self, version: int, what: str, operation: Callable[[Trainer], Awaitable[T]]) -> T:
        """Run an operation on the client at a version; after a failure restore and run it again.

        The operation must be safe to repeat on a restored client. A try that has replayed more
        updates than every failed one before it is progress: the waiting begins anew. One operation
        runs at a time: an evaluation that publishes old weights again never meets half an update.
        """
        async with self._busy:
            return await self._do(version, what, operation)

    async def _do(self, version: int, what: str, operation: Callable[[Trainer], Awaitable[T]]) -> T:
        patience, reached = self.ctx.service.patience(), -1
        while True:
            try:
                trainer = await self._advanced_to(version)
                return await operation(trainer)
            except ServiceError as error:
                got = -1 if self._trainer is None else self._version
                await self.drop()
                if error.final or error.failure is None:
                    raise
                self._record_failure(what, error)
                if got > reached:
                    reached = got
                    patience.succeeded()
                await patience.wait(error.failure, f"{what} of {self.arm.name}")

    async def update(self, index: int) -> None:
        """Apply update `index` to the live weights and keep its tables."""

        async def apply(trainer: Trainer) -> None:
            await self._apply(trainer, index)

        await self.do(index, f"update {index}", apply)

    async def sampler(self, version: int) -> ServiceSampler:
        """A sampler of the weights after `version` updates."""
        if self._sampler is not None and self._sampler[0] == version:
            return self._sampler[1]

        async def publish(trainer: Trainer) -> ServiceSampler:
            return await trainer.publish(f"{self.arm.name}@{version}")

        sampler = await self.do(version, f"sampler of version {version}", publish)
        self._sampler = (version, sampler)
        return sampler

    async def lost(self, error: ServiceError) -> None:
        """Take note that the service has forgotten this policy; the next use restores it.

        Raises:
            ServiceError: if it has been lost for as long as the policy waits.
        """
        async with self._busy:
            await self.drop()
        self._record_failure("policy lost", error)
        self._lost = self._lost or self.ctx.service.patience()
        failure = error.failure or Failure(FailureKind.LOST_MODEL, error.error)
        await self._lost.wait(failure, f"policy of {self.arm.name}")

    def progressed(self) -> None:
        """Take note that something was finished since the policy was last lost."""
        if self._lost is not None:
            self._lost.succeeded()

    async def save(self, step: int) -> str:
        """Keep weights and optimizer after rollout step `step`; returns the checkpoint's URI."""
        version = self.version_of_step(step + 1)
        name = f"{self.phase}-{version:06d}"

        async def save(trainer: Trainer) -> str:
            return await trainer.save(name)

        uri = await self.do(version, f"checkpoint {name}", save)
        self._lost = None
        self.ctx.run.append(
            "checkpoint",
            arm=self.arm.name,
            phase=self.phase,
            step=step,
            policy_version=version,
            uri=uri,
        )
        return uri

    async def publish_final(self, version: int) -> str:
        """Publish the weights after `version` updates under a name; returns their URI.

        A name is given once to a client: where the service has forgotten what was published, the
        weights may still be live, and are published again under another one.
        """
        place = (self.arm.name, version)
        published = self.ctx.run.events("published")
        before = sum((event["arm"], event["policy_version"]) == place for event in published)
        name = f"{self.phase}-sampler-{version:06d}" + (f"-{before + 1}" if before else "")

        async def publish(trainer: Trainer) -> str:
            return await trainer.publish_named(name)

        return await self.do(version, f"publish {name}", publish)

    async def drop(self) -> None:
        """Let the live client go; nothing is lost that counts."""
        trainer, self._trainer, self._sampler = self._trainer, None, None
        if trainer is not None:
            await trainer.close()

    async def _advanced_to(self, version: int) -> Trainer:
        if self._trainer is None or self._version > version:
            await self.drop()
            await self._open(version)
        trainer = self._trainer
        if trainer is None:
            raise RuntimeError(f"no client of {self.arm.name} after it was opened")
        first, replayed = self._version, list[float]()
        while self._version < version:
            self.ctx.tell(
                "replay",
                f"update {self._version} again",
                arm=self.arm.name,
                done=self._version,
                total=version,
            )
            apart = await self._apply(trainer, self._version)
            replayed += [] if apart is None else [apart]
        load = self._openings.recorded()[-1] if len(replayed) > 1 else None
        if load and three_way_is_due(self.ctx, load, first=first, replayed=len(replayed)):
            noise, resumed = replayed[:2]
            await compare_three_ways(
                self.ctx, self.arm, self.phase, load, noise=noise, resumed=resumed
            )
        return trainer

    async def _open(self, version: int) -> None:
        """Load the newest checkpoint that holds no more than `version` updates and is still kept.

        Every time the newest is tried first, whatever was found before.

        Raises:
            ServiceError: permanent if the service says that even the initialization checkpoint is
                not there; a lost model if it says so less clearly, as one that is going down does.
        """
        gone: list[tuple[str, int, ServiceError]] = []
        for uri, contained in self._checkpoints(version):
            found = await self._loaded(uri, contained, version)
            if isinstance(found, ServiceError):
                gone.append((uri, contained, found))
                continue
            self._note_gone(gone)
            self._trainer, self._version = found, contained
            self._witness = Witness(counts=bool(self.ctx.server.local))
            return
        raise self._nothing_left(gone)

    def _checkpoints(self, version: int) -> list[tuple[str, int]]:
        """What can be loaded towards a version, newest first: URI and updates that it contains."""
        saved = [
            (event["uri"], event["policy_version"])
            for event in self.ctx.run.events("checkpoint")
            if (event["arm"], event["phase"]) == (self.arm.name, self.phase)
            and 0 < event["policy_version"] <= version
        ]
        return [*sorted(saved, key=lambda one: -one[1]), (self._init_uri, 0)]

    async def _loaded(
        self, uri: str, contained: int, version: int, *, again: bool = False
    ) -> Trainer | ServiceError:
        """A client with the checkpoint; the error where two sessions found that it is gone.

        Raises:
            ServiceError: any other.
        """
        try:
            return await self._openings.load(uri, contained, replayed=version - contained)
        except ServiceError as error:
            if error.failure is None or not checkpoint_gone(error.failure):
                raise
            gone = error
        return gone if again else await self._loaded(uri, contained, version, again=True)

    def _note_gone(self, gone: list[tuple[str, int, ServiceError]]) -> None:
        """Keep which checkpoints were not there while another one was; once for each."""
        noted = {event["uri"] for event in self.ctx.run.events("checkpoint_gone")}
        for uri, contained, error in gone:
            if uri not in noted:
                self.ctx.run.append(
                    "checkpoint_gone",
                    arm=self.arm.name,
                    phase=self.phase,
                    uri=uri,
                    policy_version=contained,
                    error=error.error,
                )

    def _nothing_left(self, gone: list[tuple[str, int, ServiceError]]) -> ServiceError:
        uri, _, error = gone[-1]
        failure = error.failure or Failure(FailureKind.LOST_MODEL, error.error)
        if checkpoint_named_gone(failure) or failure.kind is FailureKind.PERMANENT:
            self._note_gone(gone)
            failure = replace(failure, kind=FailureKind.PERMANENT)
        text = (
            f"none of the {len(gone)} checkpoints can be loaded, not even the initialization "
            f"checkpoint {uri}: {failure.text}"
        )
        return replace(failure, text=text).as_error(f"training client of {self.arm.name}")

    async def _apply(self, trainer: Trainer, index: int) -> float | None:
        """Send update `index` once. Intent is written before, the outcome after.

        Returns:
            For a replay, how far its scores were from those of the live model in the mean, nats.

        Raises:
            PermanentServiceError: if the first replay after a load shows that other weights than
                the checkpoint's were loaded.
        """
        minibatch = load_minibatch(self.ctx, self.arm, self.phase, index)
        anchor = await recomputed_logprobs(self.ctx, self.arm, self.phase, minibatch, trainer)
        loss = self._loss(minibatch, anchor)
        datums = [datum_of(sequence) for sequence in minibatch.sequences]
        place = {"arm": self.arm.name, "phase": self.phase, "update": index}
        await self._witness.look(trainer, datums)
        self.ctx.run.append("step_intent", **place, model_id=trainer.info.model_id)
        answer = await trainer.step(datums, loss, self.ctx.adam)
        self._witness.compare(loss.logprobs)
        if answer.loss_error is not None:
            self.ctx.run.append("step_outcome", **place, outcome="unknown")
            raise answer.loss_error
        how = "applied"
        if answer.step_error is not None:
            how = await self._witness.decide(trainer, datums, index, answer.step_error)
        self.ctx.run.append("step_outcome", **place, outcome=how)
        if answer.step_error is not None and (answer.abandoned or not how.startswith("applied")):
            raise answer.step_error
        self._version = index + 1
        apart = self._keep(minibatch, loss)
        if apart is not None:
            await self._check_weights(trainer, datums, index, apart)
        return apart

    def _loss(self, minibatch: Minibatch, anchor: list[Floats] | None) -> MinibatchLoss:
        """The loss that the update is trained with."""
        return minibatch.custom_loss(anchor)

    async def _check_weights(
        self, trainer: Trainer, datums: Sequence[tinker.Datum], index: int, apart: float
    ) -> None:
        """Refuse a load whose first replayed update was scored by other weights.

        How far the client repeats itself is measured only where the scores are far apart.
        """
        load = self._openings.recorded()[-1]
        if index != load["policy_version"] or not apart > MOVED_NATS:
            return
        again = [await trainer.forward(datums) for _ in range(2)]
        problem = wrong_weights(apart, again)
        if problem is not None:
            refuse_load(self.ctx, load_facts(load), [problem])

    def _keep(self, minibatch: Minibatch, loss: MinibatchLoss) -> float | None:
        """Add an update to the history, or compare its replay with what is there."""
        if write_update(self.ctx, self.arm, self.phase, minibatch, loss):
            if self.phase == "train":
                self.ctx.step_completed()
            return None
        scored = (minibatch.sequences, loss.logprobs)
        apart = difference(self.ctx, self.arm, self.phase, minibatch.update, scored)
        note_replay(self.ctx, self._openings.recorded()[-1], minibatch.update, apart)
        return apart.mean

    def _record_failure(self, what: str, error: ServiceError) -> None:
        kind = None if error.failure is None else error.failure.kind.value
        self.ctx.run.append(
            "service_failure",
            arm=self.arm.name,
            phase=self.phase,
            what=what,
            kind=kind,
            error=error.error,
        )
