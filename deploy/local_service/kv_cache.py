"""Keys and values: of the rows that are being decoded, and of prefixes seen before."""

from __future__ import annotations

import hashlib
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from deploy.local_service.base_model import ModelShape
from deploy.local_service.kernels import KEY_QUANTUM, ROW_QUANTUM, padded

BLOCK_TOKENS = 16
"""Tokens per block of the prefix cache."""
DEFAULT_PREFIX_BYTES = 1024**3
"""Keeps what some ninety conversations of 425 tokens do not share: SmolLM2-135M takes 46 KB a token.

A conversation whose beginning was dropped is computed anew at every turn.
"""


DEFAULT_DECODE_BYTES = 3 * 1024**3


class Decoding(Protocol):
    """A batch of sequences being decoded."""

    @property
    def planned_bytes(self) -> int:
        """Memory that its keys and values take once every sequence has its last token."""


class DecodeMemory:
    """The memory that all batches together may take for the rows being decoded."""

    def __init__(self, *, max_bytes: int = DEFAULT_DECODE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._batches: weakref.WeakSet[Decoding] = weakref.WeakSet()

    def share(self, batch: Decoding) -> None:
        """Count a batch's memory from now on, for as long as the batch exists."""
        self._batches.add(batch)

    def left_for(self, batch: Decoding) -> int:
        """Return the bytes that a batch may plan beside what the others plan."""
        return self._max_bytes - sum(o.planned_bytes for o in self._batches if o is not batch)


class DecodeSlots:
    """Keys and values of the rows being decoded, [layers, slots, kv_heads, capacity, head_dim].

    Memory starts as zeros: a masked key still enters a product with weight 0, and 0 times NaN would
    be NaN.
    """

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype
        self.keys = self._zeros(0, 0)
        self.values = self._zeros(0, 0)

    @property
    def slots(self) -> int:
        """Slots there is room for, a multiple of the row quantum."""
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens per slot, a multiple of the key quantum."""
        return self.keys.shape[3]

    def reserve(self, *, slots: int, tokens: int) -> None:
        """Make room for at least so many slots and tokens per slot."""
        slots, tokens = padded(slots, ROW_QUANTUM), padded(tokens, KEY_QUANTUM)
        if slots <= self.slots and tokens <= self.capacity:
            return
        slots, tokens = max(slots, self.slots), max(tokens, self.capacity)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._zeros(slots, tokens)
            new[:, : old.shape[1], :, : old.shape[3]] = old
            setattr(self, name, new)

    def write(self, layer: int, slots_S: Tensor, k_STGD: Tensor, v_STGD: Tensor) -> None:
        """Write the keys and values of positions 0 to T - 1 of some slots."""
        tokens = k_STGD.shape[1]
        self.keys[layer, slots_S, :, :tokens] = k_STGD.transpose(1, 2)
        self.values[layer, slots_S, :, :tokens] = v_STGD.transpose(1, 2)

    def move(self, source: int, target: int, *, tokens: int) -> None:
        """Copy the first tokens of one slot over another's."""
        self.keys[:, target, :, :tokens] = self.keys[:, source, :, :tokens]
        self.values[:, target, :, :tokens] = self.values[:, source, :, :tokens]

    def read(self, slot: int, *, start: int, end: int) -> Tensor:
        """Return a copy of a slot's keys and values, [layers, 2, end - start, kv_heads, D]."""
        pair = (self.keys[:, slot, :, start:end], self.values[:, slot, :, start:end])
        return torch.stack(pair, dim=1).transpose(2, 3).contiguous()

    def clear(self) -> None:
        """Give the memory back."""
        self.keys = self._zeros(0, 0)
        self.values = self._zeros(0, 0)

    def bytes_for(self, *, slots: int, tokens: int) -> int:
        """Return the memory that a reservation takes."""
        per_token = 2 * self._shape.layers * self._shape.kv_dim * self._dtype.itemsize
        return padded(slots, ROW_QUANTUM) * padded(tokens, KEY_QUANTUM) * per_token

    def _zeros(self, slots: int, tokens: int) -> Tensor:
        shape = self._shape
        size = (shape.layers, slots, shape.kv_heads, tokens, shape.head_dim)
        return torch.zeros(size, dtype=self._dtype)


class PrefixCache:
    """Keys and values of token prefixes, in blocks of `BLOCK_TOKENS`, least recently used out first.

    A block's name is the digest of the weights and of all tokens up to its end, so that a hit means
    equal weights and equal tokens from the start. The keys and values of a position have the same
    bits whether they were computed with a prompt or while decoding, so hits change no result.
    """

    def __init__(self, *, max_bytes: int = DEFAULT_PREFIX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._blocks: OrderedDict[bytes, Tensor] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return self._bytes

    def find(self, weights: str, tokens: Sequence[int]) -> list[Tensor]:
        """Return the known blocks [layers, 2, block, kv_heads, D] of the longest known prefix.

        At least the last token is left over: its hidden state is needed for what follows.
        """
        found = []
        for name in block_names(weights, tokens[:-1]):
            block = self._blocks.get(name)
            if block is None:
                break
            self._blocks.move_to_end(name)
            found.append(block)
        return found

    def missing(self, weights: str, tokens: Sequence[int]) -> list[tuple[bytes, int]]:
        """Return name and first position of every whole block of the tokens that is not held."""
        names = block_names(weights, tokens)
        return [(n, i * BLOCK_TOKENS) for i, n in enumerate(names) if n not in self._blocks]

    def put(self, name: bytes, block: Tensor) -> None:
        """Keep a block, dropping the least recently used ones beyond the limit."""
        size = block.numel() * block.element_size()
        if name in self._blocks or size > self._max_bytes:
            return
        self._blocks[name] = block
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, dropped = self._blocks.popitem(last=False)
            self._bytes -= dropped.numel() * dropped.element_size()

    def clear(self) -> None:
        """Drop everything."""
        self._blocks.clear()
        self._bytes = 0


def block_names(weights: str, tokens: Sequence[int]) -> list[bytes]:
    """Return the names of the whole blocks of a token sequence, each covering all tokens before."""
    names = []
    state = hashlib.sha256(weights.encode())
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        state.update(array("q", tokens[start : start + BLOCK_TOKENS]).tobytes())
        names.append(state.digest())
    return names
