"""Fixed, hashed inputs for the preflights: the same tokens, masks and numbers in every run.

Completions are taken from the prompts' own token ids, so that no service is needed to make them
and nothing about them is sampled. Advantages have both signs and zeros, lengths differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from losses.errors import LossInputError
from losses.inputs import LossInputs
from tasks.context import RunContext
from tasks.datums import Support, TrainedSequence

_PROMPTS = 4
_LENGTHS = (3, 8, 5, 12)
_ADVANTAGES = (1.0, -0.75, 0.5, -0.25, 0.0)
MAX_PROMPT = 64
"""Longest part of a prompt that is used; the last tokens are kept."""


def fixed_batch(ctx: RunContext) -> list[TrainedSequence]:
    """Eight sequences over the first training tasks, with made-up completions of unequal length."""
    items = ctx.environment.train_batch(0, ctx.execution.rollout.groups)[:_PROMPTS]
    sequences = []
    for group, item_id in enumerate(items):
        prompt = np.array(ctx.environment.item(item_id).prompt_tokens, dtype=np.int64)[-MAX_PROMPT:]
        for sample in range(2):
            length = _LENGTHS[(group + 2 * sample) % len(_LENGTHS)]
            sequences.append(_sequence(prompt, group, sample, length))
    return sequences


def _sequence(
    prompt: np.ndarray[tuple[int], np.dtype[np.int64]], group: int, sample: int, length: int
) -> TrainedSequence:
    completion = np.resize(prompt[::-1], length)
    tokens = np.concatenate([prompt, completion])
    mask = np.zeros(len(tokens), dtype=bool)
    mask[len(prompt) :] = True
    advantages = np.zeros(len(tokens))
    for offset in range(length):
        advantages[len(prompt) + offset] = _ADVANTAGES[(group + sample + offset) % 5]
    return TrainedSequence(
        group=group,
        sample=sample,
        tokens=tokens,
        loss_mask=mask,
        sampling_logprobs=np.zeros(len(tokens)),
        advantages=advantages,
    )


STALE_NATS = (0.0, 0.05, -0.05, 0.3, -0.3, 1.5, -1.5)
"""How far the sampling log-probabilities lie from the current ones, in turn."""


def stale(
    batch: Sequence[TrainedSequence], current: Sequence[NDArray[np.float32]]
) -> list[TrainedSequence]:
    """The batch as if an older policy had sampled it: ratios on both sides of every clip.

    Raises:
        LossInputError: if a sequence has another number of log-probabilities than targets.
    """
    aged = []
    for number, (sequence, logprobs) in enumerate(zip(batch, current, strict=True)):
        targets = len(sequence.tokens) - 1
        if len(logprobs) != targets:
            raise LossInputError(
                f"sequence {number}: the service returned {len(logprobs)} log-probabilities, "
                f"expected {targets}, one for each target token"
            )
        shifts = np.resize(np.roll(STALE_NATS, number), len(logprobs))
        sampling = np.zeros(len(sequence.tokens))
        sampling[1:] = (logprobs + shifts).astype(np.float32)
        sampling = np.where(sequence.loss_mask, np.minimum(sampling, 0.0), 0.0)
        aged.append(replace(sequence, sampling_logprobs=sampling))
    return aged


def taught_batch(
    loss: Mapping[str, Any], batch: Sequence[TrainedSequence]
) -> list[TrainedSequence]:
    """The batch with a made-up teacher, for a loss that reads one; unchanged for every other.

    The teacher's values are other shifts of the sampling ones. What a logit-level loss compares are
    the first tokens of the vocabulary, to which the teacher gives falling probabilities.
    """
    if loss["kind"] not in ("sdpo_token", "sdpo_logit"):
        return list(batch)
    taught = [replace(one, teacher_logprobs=np.roll(one.sampling_logprobs, 1)) for one in batch]
    if loss["kind"] == "sdpo_token":
        return taught
    ranks = np.arange(int(loss["top_k"]))
    return [
        replace(
            one,
            support=Support(
                np.tile(ranks, (len(one.tokens), 1)),
                np.tile(-(ranks + 1.0) * np.log(2.0) - 0.1, (len(one.tokens), 1)),
            ),
        )
        for one in taught
    ]


@dataclass(frozen=True, slots=True)
class ForcedInputs:
    """Made-up log-probabilities that reach both sides of every threshold, whatever the model."""

    target_logprobs_D: list[NDArray[np.float32]]
    inputs_D: list[LossInputs]

    def to_record(self) -> list[dict[str, Any]]:
        """Return the numbers as plain data."""
        return [
            {
                "target_logprobs": target.tolist(),
                "sampling_logprobs": inputs.sampling_logprobs_T.tolist(),
                "advantages": inputs.advantages_T.tolist(),
                "loss_mask": inputs.loss_mask_T.tolist(),
            }
            for target, inputs in zip(self.target_logprobs_D, self.inputs_D, strict=True)
        ]


_PROBABILITIES = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)


def forced_inputs() -> ForcedInputs:
    """Every pair of seven probabilities, with five advantages, in sequences of unequal length."""
    pairs = [(p, q) for p in _PROBABILITIES for q in _PROBABILITIES]
    rows = [(p, q, a) for a in _ADVANTAGES for p, q in pairs]
    starts = [0, 11, 60, 150, len(rows)]
    targets, inputs = [], []
    for start, end in pairwise(starts):
        p, q, advantage = (np.array(column) for column in zip(*rows[start:end], strict=True))
        mask = np.ones(len(p), dtype=bool)
        mask[::7] = False
        targets.append(np.log(p).astype(np.float32))
        inputs.append(
            LossInputs(
                sampling_logprobs_T=torch.from_numpy(np.log(q)),
                advantages_T=torch.from_numpy(advantage.astype(np.float64)),
                loss_mask_T=torch.from_numpy(mask),
                anchor_logprobs_T=torch.from_numpy(np.log(q)),
                teacher_logprobs_T=torch.from_numpy(np.log(np.roll(q, 1))),
            )
        )
    return ForcedInputs(targets, inputs)
