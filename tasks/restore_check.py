"""Whether a restored state goes on like the one that was lost: live, resumed and cold compared.

The stored updates say what the live model scored. A replay is compared with them: its first update
tells whether the weights came back, every later one also tells about the optimizer, whose moments
have moved the weights by then. What a lost optimizer would look like is measured once per arm: a
client that loads the weights alone takes the same step.

A service need not repeat its scores. What the first replayed update differs by, before any step, is
the noise of the comparison: a cold client that is not well above it tells nothing, and only weights
that are much further from the stored scores than rounding could move them are refused.
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
from tasks.failures import ServiceError
from tasks.fingerprint import MOVED_NATS, TIMES_NOISE, mean_difference
from tasks.minibatch import load_minibatch
from tasks.openings import refuse_load
from tasks.trainer import Trainer

REPLAYED = "replay_compared"
THREE_WAY = "restore_three_way"
_NEAR, _FAR = 0.1, 0.5
"""Share of the cold client's difference below which a resumed one has kept its optimizer, and from
which on it has lost it."""
_ABOVE_NOISE = 10.0
"""A cold client tells something only so many times further from the live one than the noise is."""


@dataclass(frozen=True, slots=True)
class Apart:
    """How far other log-probabilities of an update are from the stored ones, nats.

    Attributes:
        largest: at the worst token, at least 0; NaN where either is not a number.
        mean: over all loss tokens, of the absolute difference; likewise.
    """

    largest: float
    mean: float


@dataclass(frozen=True, slots=True)
class ThreeWay:
    """How far a resumed and a cold client are from the live one, one step after the load.

    Attributes:
        live_resumed: mean absolute difference of a log-probability, nats.
        live_cold: likewise.
        noise: likewise of the resumed client before any step, which is no sign of an optimizer.
    """

    live_resumed: float
    live_cold: float
    noise: float

    @property
    def verdict(self) -> str:
        """``kept``, ``lost``, or ``cannot tell``.

        It cannot tell where the cold one is no different or not well above the noise, or where the
        resumed one is in between.
        """
        if not self.live_cold > _ABOVE_NOISE * self.noise:
            return "cannot tell"
        if self.live_resumed <= _NEAR * self.live_cold:
            return "kept"
        return "lost" if self.live_resumed >= _FAR * self.live_cold else "cannot tell"


def difference(
    ctx: RunContext,
    arm: ArmPlan,
    phase: str,
    update: int,
    scored: tuple[Sequence[TrainedSequence], Sequence[NDArray[np.float32]]],
) -> Apart:
    """Difference between stored log-probabilities of an update and others.

    Args:
        ctx: the run.
        arm: the arm.
        phase: the phase.
        update: the update whose `update_tokens` are compared.
        scored: its sequences, and the log-probabilities of their targets, [T] or, with a support
            before the sampled token, [T, K + 1].
    """
    table = ctx.run.read_arrow("update_tokens", key=(arm.name, phase, update))
    columns = {name: table.column(name).to_numpy() for name in ("group", "sample", "position")}
    stored = table.column("target_logprob").to_numpy()
    ours, theirs = [np.zeros(0)], [np.zeros(0)]
    for sequence, logprobs in zip(*scored, strict=True):
        mine = (columns["group"] == sequence.group) & (columns["sample"] == sequence.sample)
        scores = np.asarray(logprobs, np.float64)
        sampled = scores if scores.ndim == 1 else scores[:, -1]
        ours.append(sampled[columns["position"][mine] - 1])
        theirs.append(stored[mine].astype(np.float64))
    apart = np.abs(np.concatenate(ours) - np.concatenate(theirs))
    return Apart(
        largest=float(apart.max(initial=0.0)), mean=float(apart.mean()) if len(apart) else 0.0
    )


def wrong_weights(apart: float, again: Sequence[Sequence[NDArray[np.float32]]]) -> str | None:
    """Why the first update replayed after a load shows that other weights were loaded, if it does.

    Args:
        apart: mean difference of its scores, before any step, from the stored ones, nats.
        again: two scorings of one batch by the same client; they tell how far it repeats itself.

    Returns:
        The reason; None where rounding can explain the difference.
    """
    noise = mean_difference(*again)
    if not apart > max(MOVED_NATS, TIMES_NOISE * noise):
        return None
    return (
        f"before any step the restored client scores its first batch {apart:.3g} nats from the "
        f"live one in the mean, two scorings of its own differ by {noise:.3g}: other weights were "
        "loaded"
    )


async def compare_three_ways(
    ctx: RunContext,
    arm: ArmPlan,
    phase: str,
    load: Mapping[str, Any],
    *,
    noise: float,
    resumed: float,
) -> None:
    """Measure what a cold optimizer would look like, and hold the resumed one against it.

    Args:
        ctx: the run.
        arm: the arm.
        phase: the phase.
        load: the recorded load whose replay has just been compared; two updates were replayed.
        noise: mean difference of the first of them, nats.
        resumed: of the second.

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
    found = ThreeWay(live_resumed=resumed, live_cold=cold, noise=noise)
    ctx.run.append(
        THREE_WAY,
        **place,
        live_resumed=_number(found.live_resumed),
        live_cold=_number(found.live_cold),
        noise=_number(found.noise),
        verdict=found.verdict,
    )
    if found.verdict == "lost":
        text = (
            f"one step after the load the restored client is {resumed:.3g} nats from the live one, "
            f"one with a cold optimizer {cold:.3g}: the optimizer's moments were not restored"
        )
        refuse_load(ctx, load_facts(load), [text])


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
    return difference(ctx, arm, phase, version + 1, (sequences, scores)).mean


async def _step(ctx: RunContext, arm: ArmPlan, phase: str, update: int, trainer: Trainer) -> None:
    minibatch = load_minibatch(ctx, arm, phase, update)
    anchor = await recomputed_logprobs(ctx, arm, phase, minibatch, trainer)
    datums = [datum_of(sequence) for sequence in minibatch.sequences]
    answer = await trainer.step(datums, minibatch.custom_loss(anchor), ctx.adam)
    error = answer.loss_error or answer.step_error
    if error is not None:
        raise error


def note_replay(ctx: RunContext, load: Mapping[str, Any], update: int, apart: Apart) -> None:
    """Keep how far a replayed update was from the stored one."""
    ctx.run.append(
        REPLAYED,
        **{name: load[name] for name in ("arm", "phase", "restore")},
        update=update,
        difference=_number(apart.mean),
        largest=_number(apart.largest),
    )


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
