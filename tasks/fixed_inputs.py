"""Fixed, hashed inputs for the preflights: the same tokens, masks and numbers in every run.

Completions are taken from the prompts' own token ids, so that no service is needed to make them
and nothing about them is sampled. Advantages have both signs and zeros, lengths differ.
"""

from __future__ import annotations

import numpy as np

from tasks.context import RunContext
from tasks.datums import TrainedSequence

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
