"""The advantages of a self-distilled comparison through the path that trains, on fixed inputs.

GRPO's advantages go the way of every advantage of the flow and are compared with the cookbook's
own. SDPO's come from scores of the service under another prefix, and are compared with a float64
computation that shares no code with it; with the teacher switched off they must be GRPO's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tinker
import torch
from numpy.typing import NDArray

from losses.advantages import group_advantages
from losses.inputs import LossInputs
from losses.reference import sdpo
from losses.sdpo_advantage import align_teacher_logprobs, registered_sdpo_advantages
from tasks.datums import TrainedSequence, loss_inputs_of
from tasks.parity_measurements import Comparison, GradientProbe, compared, reference_of
from tasks.sampling import ServiceSampler

_REWARDS = (5 / 6, 1 / 3, 0.5, 0.5, 0.1, 1.0, 2 / 3, 0.9)
STUDENT_PREFIX, TEACHER_PREFIX = 4, 9
"""Tokens that the teacher's prefix replaces, and its own."""

Floats = NDArray[np.float64]


def rewarded(
    batch: Sequence[TrainedSequence], settings: Mapping[str, Any]
) -> list[TrainedSequence]:
    """The batch with the group advantages of made-up rewards, as the flow computes them."""
    return _with_group_values(batch, lambda rewards_G: group_advantages(settings, rewards_G))


def cookbook_rewarded(batch: Sequence[TrainedSequence]) -> list[TrainedSequence]:
    """The batch with the cookbook's own advantages of the same rewards."""
    from tinker_cookbook.rl.data_processing import compute_advantages  # noqa: PLC0415 - is slow
    from tinker_cookbook.rl.types import TrajectoryGroup  # noqa: PLC0415

    def stock(rewards_G: torch.Tensor) -> torch.Tensor:
        count = len(rewards_G)
        empty = [_trajectory() for _ in range(count)]
        return compute_advantages([TrajectoryGroup(empty, rewards_G.tolist(), [{}] * count)])[0]

    return _with_group_values(batch, stock)


def _trajectory() -> Any:
    """A trajectory of the cookbook's without steps: its reward is its group's final one."""
    from tinker_cookbook.rl.types import Trajectory  # noqa: PLC0415

    return Trajectory(transitions=[], final_ob=tinker.ModelInput.from_ints([0]))


def _with_group_values(batch: Sequence[TrainedSequence], of_group: Any) -> list[TrainedSequence]:
    rewards = np.resize(_REWARDS, len(batch))
    values = np.zeros(len(batch))
    groups = np.array([sequence.group for sequence in batch])
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        values[members] = of_group(torch.from_numpy(rewards[members])).numpy()
    return [
        replace(sequence, advantages=np.where(sequence.loss_mask, np.float32(value), 0.0))
        for sequence, value in zip(batch, values.tolist(), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """One fixed sequence as a teacher with another prefix scores it.

    Attributes:
        sequence: the sequence, with the group advantage of made-up rewards on its trained tokens.
        values: the service's answer, one entry a token of the teacher's sequence.
    """

    sequence: TrainedSequence
    values: list[float | None]

    @property
    def group_advantage(self) -> float:
        """The advantage of its trained tokens before any teacher."""
        return float(self.sequence.advantages[self.sequence.loss_mask][0])

    def advantages(self, settings: Mapping[str, Any]) -> Floats:
        """SDPO advantages as the flow computes them, [L], 0 for the first token."""
        sequence = self.sequence
        aligned = align_teacher_logprobs(
            self.values,
            sequence_tokens=len(sequence.tokens),
            student_prefix_tokens=STUDENT_PREFIX,
            teacher_prefix_tokens=TEACHER_PREFIX,
        )
        found = registered_sdpo_advantages(
            settings,
            aligned,
            torch.from_numpy(sequence.sampling_logprobs[1:].copy()),
            torch.from_numpy(sequence.loss_mask[1:].copy()),
            group_advantage=self.group_advantage,
        )
        return np.concatenate([[0.0], found.advantages_T.numpy()])

    def reference_advantages(self, settings: Mapping[str, Any]) -> Floats:
        """The same by the independent reference, token by token."""
        sequence, clip = self.sequence, settings["clip"]
        mask = sequence.loss_mask
        per_token: Floats = np.array(
            [0.0, *self._reference(None if _averages(settings) else clip)], dtype=np.float64
        )
        if _averages(settings):
            mean = per_token[mask].mean()
            bounded = mean if clip is None else max(-clip, min(clip, mean))
            return np.where(mask, bounded, 0.0)
        if settings["kind"] == "sdpo_hybrid":
            share = float(settings["grpo_weight"])
            return np.where(mask, share * self.group_advantage + (1 - share) * per_token, 0.0)
        return per_token

    def _reference(self, clip: float | None) -> list[float]:
        sequence = self.sequence
        return sdpo.aligned_advantages(
            self.values,
            sequence.sampling_logprobs.tolist(),
            sequence.loss_mask.tolist(),
            student_prefix=STUDENT_PREFIX,
            teacher_prefix=TEACHER_PREFIX,
            clip=clip,
            zero_nats=False,
        )


def _averages(settings: Mapping[str, Any]) -> bool:
    return bool(settings["kind"] == "sdpo_sequence")


async def teacher_scores(
    batch: Sequence[TrainedSequence], scorer: ServiceSampler
) -> list[TeacherScores]:
    """Score every sequence of the fixed batch behind a prefix made of its own first tokens."""
    scored = []
    for sequence in batch:
        tokens = sequence.tokens.tolist()
        prefix = np.resize(tokens[:TEACHER_PREFIX][::-1], TEACHER_PREFIX).tolist()
        values = await scorer.compute_logprobs([*prefix, *tokens[STUDENT_PREFIX:]])
        scored.append(TeacherScores(sequence, values))
    return scored


def sdpo_comparisons(
    loss: Mapping[str, Any],
    settings: Mapping[str, Any],
    scored: Sequence[TeacherScores],
    logprobs_D: Sequence[NDArray[np.float32]],
) -> dict[str, list[Comparison]]:
    """Loss and gradient under SDPO's advantages, and with the teacher switched off.

    Args:
        loss: of the self-distilled arm.
        settings: its advantage settings.
        scored: the fixed batch with the teacher's answers.
        logprobs_D: what the service returned for the targets before any step.

    Returns:
        ``reference``: against the float64 reference; ``baseline``: against the stock advantages.
    """
    ours = _probed(loss, scored, logprobs_D, [one.advantages(settings) for one in scored])
    theirs = [one.reference_advantages(settings) for one in scored]
    what = "SDPO advantages of served scores, against the float64 reference"
    off = {"kind": "sdpo_hybrid", "clip": settings["clip"], "grpo_weight": 1.0}
    disabled = _probed(loss, scored, logprobs_D, [one.advantages(off) for one in scored])
    stock = cookbook_rewarded([one.sequence for one in scored])
    return {
        "reference": [
            *_against(loss, ours, scored, theirs, what),
            *_against_published(loss, scored, logprobs_D),
        ],
        "baseline": _against(
            loss,
            disabled,
            scored,
            [one.advantages for one in stock],
            "advantages with the teacher switched off, against the cookbook's group means",
        ),
    }


def _inputs(one: TeacherScores, advantages: Floats, sampling: Floats | None = None) -> LossInputs:
    changed = replace(one.sequence, advantages=advantages)
    if sampling is not None:
        changed = replace(changed, sampling_logprobs=sampling)
    return loss_inputs_of(changed)


def _probed(
    loss: Mapping[str, Any],
    scored: Sequence[TeacherScores],
    logprobs_D: Sequence[NDArray[np.float32]],
    advantages: Sequence[Floats],
) -> GradientProbe:
    pairs = zip(scored, advantages, strict=True)
    probe = GradientProbe(loss, [_inputs(one, values) for one, values in pairs])
    probe.run(logprobs_D)
    return probe


def _against(
    loss: Mapping[str, Any],
    probe: GradientProbe,
    scored: Sequence[TeacherScores],
    advantages: Sequence[Floats],
    what: str,
) -> list[Comparison]:
    """A probe against the reference loss under other advantages."""
    terms = [
        reference_of(loss, values, _inputs(one, theirs))
        for values, one, theirs in zip(probe.logprobs_D, scored, advantages, strict=True)
    ]
    return compared(
        what,
        probe,
        losses=[float(term.term.sum()) for term in terms],
        slopes=[t.slope for t in terms],
    )


def _against_published(
    loss: Mapping[str, Any],
    scored: Sequence[TeacherScores],
    logprobs_D: Sequence[NDArray[np.float32]],
) -> list[Comparison]:
    """On the policy that sampled, the gradient of the published token-level loss: s - t.

    Without a clip; only the importance-sampling loss claims to be the same.
    """
    if loss["kind"] != "importance_sampling":
        return []
    settings = {"kind": "sdpo_token", "clip": None}
    on_policy = [
        replace(one, sequence=replace(one.sequence, sampling_logprobs=_aligned(one, values)))
        for one, values in zip(scored, logprobs_D, strict=True)
    ]
    probe = _probed(loss, on_policy, logprobs_D, [one.advantages(settings) for one in on_policy])
    slopes = [
        sdpo.token_level(
            values.astype(np.float64),
            np.array(one.values[TEACHER_PREFIX - STUDENT_PREFIX + 1 :], dtype=np.float64),
            one.sequence.loss_mask[1:],
            weights=np.ones(len(values)),
        ).slope
        for one, values in zip(on_policy, logprobs_D, strict=True)
    ]
    what = "on-policy gradient, against the published token-level loss"
    return compared(what, probe, losses=None, slopes=slopes)


def _aligned(one: TeacherScores, logprobs: NDArray[np.float32]) -> Floats:
    """The current log-probabilities at their tokens' positions, 0 off the mask."""
    values = np.r_[0.0, logprobs.astype(np.float64)]
    return np.where(one.sequence.loss_mask, values, 0.0)


def group_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a baseline whose advantages come from rewards alone."""
    kind = settings["kind"]
    return settings if kind == "group_mean" else {"kind": "group_mean", "std_norm": False}
