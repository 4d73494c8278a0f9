"""Choose the next token of each row from its logits."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deploy.local_service import kernels

GREEDY_BELOW = 1e-6
"""A temperature below this takes the most likely token."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How to sample."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """Tokens to choose from, -1 or 0 for all."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Whether the model's own distribution is not the one to sample from."""
        return self.temperature != 1.0 or self.top_p < 1.0 or self.top_k > 0


def row_generator(seed: int | None, index: int) -> random.Random:
    """Return the source of one sequence's random numbers.

    Args:
        seed: the request's seed, or None for one from the operating system.
        index: number of the sequence within its request.
    """
    if seed is None:
        return random.Random(random.SystemRandom().getrandbits(256))
    return random.Random(int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest(), "big"))


def choose(
    logits_NV: Tensor, choices: Sequence[Choice], uniforms: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return a token per row and its log-probability.

    The token is the one at which the cumulated probability first exceeds the row's uniform number.
    The log-probability is that of the model's own distribution, whatever the temperature, top-k
    and top-p.

    Args:
        logits_NV: [N, V] float32.
        choices: N settings.
        uniforms: N numbers in [0, 1).

    Returns:
        tokens [N] int64 and log-probabilities [N] float32.
    """
    maxima, values, sums = kernels.exponentials(logits_NV)
    normalizers = kernels.log_normalizers_of(maxima, sums)
    tokens = _invert(values, sums, torch.tensor(uniforms, dtype=torch.float64))
    for n, choice in enumerate(choices):
        if choice.greedy:
            tokens[n] = logits_NV[n].argmax()
        elif choice.filtered:
            tempered = _filtered(logits_NV[n], choice)[None]
            _, row_values, row_sums = kernels.exponentials(tempered)
            uniform = torch.tensor(uniforms[n : n + 1], dtype=torch.float64)
            tokens[n] = _invert(row_values, row_sums, uniform)[0]
    picked = logits_NV.gather(1, tokens[:, None])[:, 0]
    return tokens, picked - normalizers


def _invert(values_NBC: Tensor, sums_NB: Tensor, uniforms_N: Tensor) -> Tensor:
    """Return the index at which the cumulated values first exceed uniform times their sum.

    First the block is found, then the place within it; a value of 0 is never chosen.
    """
    cumulated_NB = sums_NB.cumsum(dim=-1)
    goal_N = uniforms_N * cumulated_NB[:, -1]
    block_N = _first_above(cumulated_NB, goal_N)
    size_N = sums_NB.gather(1, block_N[:, None])[:, 0]
    before_N = cumulated_NB.gather(1, block_N[:, None])[:, 0] - size_N
    rows = torch.arange(len(values_NBC))
    within_NC = values_NBC[rows, block_N].double().cumsum(dim=-1)
    share_N = ((goal_N - before_N) / size_N).clamp_(0.0, 1.0)
    place_N = _first_above(within_NC, share_N * within_NC[:, -1])
    return block_N * values_NBC.shape[2] + place_N


def _first_above(cumulated_NC: Tensor, goal_N: Tensor) -> Tensor:
    """Return where each row first exceeds its goal, at the latest where it reaches its end."""
    above = torch.searchsorted(cumulated_NC, goal_N[:, None], right=True)[:, 0]
    last = torch.searchsorted(cumulated_NC, cumulated_NC[:, -1:].contiguous())[:, 0]
    return torch.minimum(above, last)


def _filtered(logits_V: Tensor, choice: Choice) -> Tensor:
    """Return the logits at a temperature, -inf outside top-k and top-p.

    Top-k keeps the k most likely tokens (and any as likely as the last of them). Top-p keeps the
    fewest most likely tokens of what is left whose probabilities reach p.
    """
    tempered = logits_V / choice.temperature
    if 0 < choice.top_k < len(tempered):
        smallest = tempered.topk(choice.top_k).values[-1]
        tempered = tempered.masked_fill(tempered < smallest, -torch.inf)
    if choice.top_p < 1.0:
        ordered, order = tempered.sort(descending=True, stable=True)
        probabilities = ordered.double().softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        dropped = order[before >= choice.top_p]
        tempered = tempered.index_fill(0, dropped[dropped != order[0]], -torch.inf)
    return tempered
