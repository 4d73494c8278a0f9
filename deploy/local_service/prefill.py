"""Compute prompts: their keys and values into slots, their last hidden rows, their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deploy.local_service.kv_cache import BLOCK_TOKENS, DecodeSlots, PrefixCache
from deploy.local_service.packing import Group, PackedSequence, Packing, pack, row_batches
from deploy.local_service.sample_request import PromptScoring
from deploy.local_service.sampler_weights import SamplerWeights
from deploy.local_service.scoring import ScoreRequest, Scores, score_hidden
from deploy.local_service.transformer import Keep, PackedAttention, hidden_rows

PREFILL_ROWS = 1024
"""Prompt tokens computed at once, unless one prompt has more."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt to compute, for one or more sequences that continue it."""

    tokens: Sequence[int]
    slots: list[int] = field(default_factory=list)
    """Where its keys and values go."""
    scorings: list[PromptScoring] = field(default_factory=list)
    """What to score of it."""
    scores: list[Scores] = field(default_factory=list)
    """Filled in: one per scoring."""
    last_hidden: Tensor | None = None
    """Filled in: [hidden], the row that the first new token comes from."""
    cache_hit_tokens: int = 0
    """Filled in: leading tokens that were not computed."""


class Prefill:
    """Computes prompts of one set of weights, using and feeding a prefix cache."""

    def __init__(
        self, weights: SamplerWeights, slots: DecodeSlots, cache: PrefixCache | None
    ) -> None:
        self._weights = weights
        self._slots = slots
        self._cache = cache

    def run(self, prompts: Sequence[Prompt]) -> None:
        """Compute the prompts; the slots must be reserved already.

        A prompt that is scored is computed whole: scores need the hidden rows of every token.
        """
        pool = _KnownPool()
        sequences = [self._sequence(prompt, pool) for prompt in prompts]
        known = pool.joined()
        for groups in row_batches(sequences, max_rows=PREFILL_ROWS):
            self._run_batch(prompts, sequences, groups, known)

    def _sequence(self, prompt: Prompt, pool: _KnownPool) -> PackedSequence:
        if self._cache is None or prompt.scorings:
            return PackedSequence(prompt.tokens)
        blocks = self._cache.find(self._weights.sha256, prompt.tokens)
        prompt.cache_hit_tokens = len(blocks) * BLOCK_TOKENS
        start = pool.add(blocks)
        return PackedSequence(prompt.tokens, cached=prompt.cache_hit_tokens, cache_start=start)

    def _run_batch(
        self,
        prompts: Sequence[Prompt],
        sequences: Sequence[PackedSequence],
        groups: Sequence[Group],
        known: Tensor | None,
    ) -> None:
        weights = self._weights
        packing = pack(sequences, groups=groups, heads_per_kv=weights.base.shape.heads_per_kv)
        members = [n for group in groups for n in group.members]
        writer = _SlotWriter(
            self._slots, packing, [sequences[n] for n in members], [prompts[n] for n in members]
        )
        hidden = hidden_rows(
            weights,
            packing.tokens_N,
            packing.positions_N,
            attend=PackedAttention(packing, known=known, keep=writer.keep(known)),
        )
        for n, rows in zip(members, packing.rows_S, strict=True):
            self._finish(prompts[n], hidden, rows)

    def _finish(self, prompt: Prompt, hidden_NH: Tensor, rows_T: Tensor) -> None:
        prompt.last_hidden = hidden_NH[rows_T[-1]]
        asked = [
            ScoreRequest(
                tokens=prompt.tokens,
                next_tokens=scoring.next_tokens,
                topk=scoring.topk,
                targets=scoring.targets,
            )
            for scoring in prompt.scorings
        ]
        if asked:
            rows = [rows_T] * len(asked)
            prompt.scores = score_hidden(self._weights.head, hidden_NH, asked, rows)
        if self._cache is not None and prompt.slots:
            self.remember(prompt.tokens, slot=prompt.slots[0])

    def remember(self, tokens: Sequence[int], *, slot: int) -> None:
        """Put the whole blocks of a slot's tokens into the prefix cache."""
        if self._cache is None:
            return
        for name, start in self._cache.missing(self._weights.sha256, tokens):
            block = self._slots.read(slot, start=start, end=start + BLOCK_TOKENS)
            self._cache.put(name, block)


class _KnownPool:
    """Cached blocks laid one after the other, equal beginnings once."""

    def __init__(self) -> None:
        self._starts: dict[tuple[int, ...], int] = {}
        self._blocks: list[Tensor] = []

    def add(self, blocks: Sequence[Tensor]) -> int:
        """Return the row at which the blocks' first key stands."""
        key = tuple(id(block) for block in blocks)
        if key not in self._starts:
            self._starts[key] = len(self._blocks) * BLOCK_TOKENS if blocks else 0
            self._blocks += blocks
        return self._starts[key]

    def joined(self) -> Tensor | None:
        """Return [layers, 2, C, kv_heads, head_dim], or None if nothing is known."""
        return torch.cat(self._blocks, dim=2) if self._blocks else None


class _SlotWriter:
    """Copies each prompt's keys and values into its slots, layer by layer."""

    def __init__(
        self,
        slots: DecodeSlots,
        packing: Packing,
        sequences: Sequence[PackedSequence],
        prompts: Sequence[Prompt],
    ) -> None:
        self._slots = slots
        total = len(packing.tokens_N)
        longest = max(len(sequence.tokens) for sequence in sequences)
        targets, sources = [], []
        for sequence, prompt, rows in zip(sequences, prompts, packing.rows_S, strict=True):
            cached = torch.arange(sequence.cached) + total + sequence.cache_start
            source = torch.zeros(longest, dtype=torch.long)
            source[: len(sequence.tokens)] = torch.cat([cached, rows])
            targets += prompt.slots
            sources += [source] * len(prompt.slots)
        self._targets = torch.tensor(targets, dtype=torch.long)
        self._sources = torch.stack(sources) if sources else torch.zeros(0, 0, dtype=torch.long)

    def keep(self, known: Tensor | None) -> Keep:
        """Return the function that attention gives each layer's keys and values to."""

        def write(layer: int, k_NGD: Tensor, v_NGD: Tensor) -> None:
            if len(self._targets) == 0:
                return
            k_pool, v_pool = k_NGD, v_NGD
            if known is not None:
                k_pool = torch.cat([k_NGD, known[layer, 0]])
                v_pool = torch.cat([v_NGD, known[layer, 1]])
            k, v = k_pool[self._sources], v_pool[self._sources]
            self._slots.write(layer, self._targets, k, v)

        return write
