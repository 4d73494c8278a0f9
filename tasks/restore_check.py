"""Whether a restored state goes on like the one that was lost: live, resumed and cold compared.

The stored updates say what the live model scored. A replay is compared with them: its first update
tells whether the weights came back, every later one also tells about the optimizer, whose moments
have moved the weights by then. What a lost optimizer would look like is measured once per arm: a
client that loads the weights alone takes the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.anchor import recomputed_logprobs
from tasks.arms import ArmPlan
from tasks.context import RunContext
from tasks.datums import TrainedSequence, datum_of
from tasks.failures import Failure, FailureKind, PermanentServiceError, ServiceError
from tasks.minibatch import load_minibatch
from tasks.trainer import Trainer

REPLAYED = "replay_compared"
THREE_WAY = "restore_three_way"
_NEAR, _FAR = 0.1, 0.5
"""Share of the cold client's difference below which a resumed one has kept its optimizer, and from
which on it has lost it."""


@dataclass(frozen=True, slots=True)
class ThreeWay:
    """How far a resumed and a cold client are from the live one, one step after the load.

    Attributes:
        live_resumed: largest difference of a log-probability, nats.
        live_cold: likewise.
    """

    live_resumed: float
    live_cold: float

    @property
    def verdict(self) -> str:
        """``kept``, ``lost``, or ``cannot tell`` (the cold one is no different, or in between)."""
        if self.live_cold > 0.0 and self.live_resumed <= _NEAR * self.live_cold:
            return "kept"
        if self.live_cold > 0.0 and self.live_resumed >= _FAR * self.live_cold:
            return "lost"
        return "cannot tell"


def difference(
    ctx: RunContext,
    arm: ArmPlan,
    phase: str,
    update: int,
    scored: tuple[Sequence[TrainedSequence], Sequence[NDArray[np.float32]]],
) -> float:
    """Largest difference between stored log-probabilities of an update and others, nats.

    Args:
        ctx: the run.
        arm: the arm.
        phase: the phase.
        update: the update whose `update_tokens` are compared.
        scored: its sequences, and the log-probabilities of their targets.

    Returns:
        At least 0; NaN where either is not a number.
    """
    table = ctx.run.read_arrow("update_tokens", key=(arm.name, phase, update))
    columns = {name: table.column(name).to_numpy() for name in ("group", "sample", "position")}
    stored = table.column("target_logprob").to_numpy()
    largest = 0.0
    for sequence, logprobs in zip(*scored, strict=True):
        mine = (columns["group"] == sequence.group) & (columns["sample"] == sequence.sample)
        apart = np.abs(np.asarray(logprobs)[columns["position"][mine] - 1] - stored[mine])
        largest = float(np.max([largest, *apart]))
    return largest


async def compare_three_ways(
    ctx: RunContext, arm: ArmPlan, phase: str, load: Mapping[str, Any], *, resumed: float
) -> None:
    """Measure what a cold optimizer would look like, and hold the resumed one against it.

    Args:
        ctx: the run.
        arm: the arm.
        phase: the phase.
        load: the recorded load whose replay has just been compared; two updates were replayed.
        resumed: difference of the second of them.

    Raises:
        PermanentServiceError: if the restored client goes on like one without its moments. The
            history cannot be continued on such a service.
    """
    place = {"arm": arm.name, "phase": phase, "restore": load["restore"]}
    uri, version = load["requested_uri"], load["policy_version"]
    try:
        cold = await _cold_difference(ctx, arm, phase, uri, version)
    except ServiceError as error:  # no slot for one more client, or no such load: measured later
        ctx.run.append("restore_not_compared", **place, error=str(error))
        return
    found = ThreeWay(live_resumed=resumed, live_cold=cold)
    ctx.run.append(
        THREE_WAY,
        **place,
        live_resumed=_number(found.live_resumed),
        live_cold=_number(found.live_cold),
        verdict=found.verdict,
    )
    if found.verdict == "lost":
        text = (
            f"one step after the load the restored client is {resumed:.3g} nats from the live one, "
            f"one with a cold optimizer {cold:.3g}: the optimizer's moments were not restored"
        )
        ctx.run.append("load_refused", problems=[text], **load_facts(load))
        failure = Failure(FailureKind.PERMANENT, text)
        what = f"load {load['requested_uri']} for {arm.name}"
        raise PermanentServiceError(text, what=what, failure=failure, final=True)


def load_facts(load: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a recorded load that name it."""
    names = ("arm", "phase", "restore", "policy_version", "requested_uri")
    return {name: load[name] for name in names}


async def _cold_difference(
    ctx: RunContext, arm: ArmPlan, phase: str, uri: str, version: int
) -> float:
    trainer = await ctx.service.try_cold(uri, label=f"cold-{arm.name}")
    try:
        await _step(ctx, arm, phase, version, trainer)
        sequences = load_minibatch(ctx, arm, phase, version + 1).sequences
        scores = await trainer.forward([datum_of(sequence) for sequence in sequences])
    finally:
        await trainer.close()
    return difference(ctx, arm, phase, version + 1, (sequences, scores))


async def _step(ctx: RunContext, arm: ArmPlan, phase: str, update: int, trainer: Trainer) -> None:
    minibatch = load_minibatch(ctx, arm, phase, update)
    anchor = await recomputed_logprobs(ctx, arm, phase, minibatch, trainer)
    datums = [datum_of(sequence) for sequence in minibatch.sequences]
    answer = await trainer.step(datums, minibatch.custom_loss(anchor), ctx.adam)
    error = answer.loss_error or answer.step_error
    if error is not None:
        raise error


def note_replay(ctx: RunContext, load: Mapping[str, Any], update: int, apart: float) -> None:
    """Keep how far a replayed update was from the stored one."""
    place = {name: load[name] for name in ("arm", "phase", "restore")}
    ctx.run.append(REPLAYED, **place, update=update, difference=_number(apart))


def three_way_is_due(
    ctx: RunContext, load: Mapping[str, Any], *, first: int, replayed: int
) -> bool:
    """Whether a restore can tell about the optimizer, and no restore of this arm has done so yet.

    It takes moments (a checkpoint after the first update) and the first two updates after it.

    Args:
        ctx: the run.
        load: the recorded load.
        first: the first update that was replayed.
        replayed: how many were.
    """
    known = [
        event
        for event in ctx.run.events(THREE_WAY)
        if (event["arm"], event["phase"]) == (load["arm"], load["phase"])
    ]
    restored = load["restore"] > 0 and load["policy_version"] > 0
    return restored and first == load["policy_version"] and replayed >= 2 and not known


def restore_checks(ctx: RunContext, arm: str) -> list[dict[str, Any]]:
    """What is known about each restore of a trained arm, oldest first; one entry per restore."""
    checks = []
    for load in ctx.run.events("client_opened"):
        if (load["arm"], load["phase"]) != (arm, "train") or load["restore"] == 0:
            continue
        replays = _of(ctx, REPLAYED, load)
        measured = _of(ctx, THREE_WAY, load)
        checks.append(
            {
                "after_restore": load["restore"],
                "policy_version": load["policy_version"],
                "replayed_updates": load["replayed_updates"],
                "live_resumed": [event["difference"] for event in replays],
                "live_cold": measured[-1]["live_cold"] if measured else None,
                "optimizer": measured[-1]["verdict"] if measured else "not measured",
            }
        )
    return checks


def _of(ctx: RunContext, event: str, load: Mapping[str, Any]) -> list[dict[str, Any]]:
    wanted = [load[name] for name in ("arm", "phase", "restore")]
    return [
        found
        for found in ctx.run.events(event)
        if [found["arm"], found["phase"], found["restore"]] == wanted
    ]


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None
