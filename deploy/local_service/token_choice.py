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
    filtered = [n for n, choice in enumerate(choices) if choice.filtered and not choice.greedy]
    if filtered:
        tempered = _filtered(logits_NV[filtered], [choices[n] for n in filtered])
        _, values[filtered], sums[filtered] = kernels.exponentials(tempered)
    tokens = _invert(values, sums, torch.tensor(uniforms, dtype=torch.float64))
    greedy = [n for n, choice in enumerate(choices) if choice.greedy]
    if greedy:
        tokens[greedy] = logits_NV[greedy].argmax(dim=-1)
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


def _filtered(logits_NV: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Return the logits at their temperatures, -inf outside top-k and top-p.

    Top-k keeps the k most likely tokens (and any as likely as the last of them). Top-p keeps the
    fewest most likely tokens of what is left whose probabilities reach p.
    """
    tempered = logits_NV / torch.tensor([[choice.temperature] for choice in choices])
    for top_k in {choice.top_k for choice in choices if 0 < choice.top_k < logits_NV.shape[1]}:
        rows = [n for n, choice in enumerate(choices) if choice.top_k == top_k]
        smallest = tempered[rows].topk(top_k, dim=-1).values[:, -1:]
        tempered[rows] = tempered[rows].masked_fill(tempered[rows] < smallest, -torch.inf)
    rows = [n for n, choice in enumerate(choices) if choice.top_p < 1.0]
    if rows:
        ordered, order = tempered[rows].sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.double().softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        limits = torch.tensor([[choices[n].top_p] for n in rows], dtype=torch.float64)
        kept = ordered.masked_fill(before >= limits, -torch.inf)
        kept[:, 0] = ordered[:, 0]
        tempered[rows] = torch.empty_like(kept).scatter_(1, order, kept)
    return tempered
