"""Lay token sequences out as rows that are computed once each, however many sequences share them.

Sequences that begin with the same tokens share the rows of that beginning: one prompt of a group
is computed once, not once per completion. The result for a sequence does not depend on which
others it is packed with, because every row is computed apart (see `kernels`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from deploy.local_service.kernels import KEY_QUANTUM, ROW_QUANTUM, padded

_QUERY_TILE = 128
"""Most queries of one sequence in a block; bounds the memory of attention over long prompts."""
_BLOCK_CELLS = 1 << 21
"""Most query-key pairs (per head) in one block, padding included, unless one tile has more."""
_DEEPEST_SPLIT = 100
"""Nested beginnings beyond this depth are not looked at; it bounds the recursion."""
_SMALL_BLOCK_CELLS = 1 << 15
"""Below this size padding costs less than another block."""


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """One sequence to pack."""

    tokens: Sequence[int]
    cached: int = 0
    """Leading tokens whose keys and values are known already; fewer than all."""
    cache_start: int = 0
    """Row of the first cached key in the pool of known keys and values."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBlock:
    """Queries that attend together, padded to one rectangle."""

    query_rows_BQ: Tensor
    """[B, Q] row of each query; padding points at row 0."""
    key_rows_BK: Tensor
    """[B, K] row of each key in position order: below N a packed row, from N on a cached one."""
    mask_B1XK: Tensor
    """[B, 1, Q * heads_per_kv, K] float, 0 or -inf."""


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Rows to compute and how they attend to each other."""

    tokens_N: Tensor
    """[N] token of each row; N is a multiple of the row quantum, the surplus repeats row 0."""
    positions_N: Tensor
    """[N] position of each row in its sequences."""
    rows_S: list[Tensor]
    """Per sequence: the row of each of its tokens after the cached ones."""
    blocks: list[AttentionBlock]
    output_rows_N: Tensor
    """[N] where each row's attention output stands in the blocks' outputs, one after the other."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that share their first ``shared`` tokens."""

    members: tuple[int, ...]
    shared: int

    def rows(self, sequences: Sequence[PackedSequence]) -> int:
        """Return how many rows the group needs."""
        first = sequences[self.members[0]]
        own = sum(len(sequences[n].tokens) - self.shared for n in self.members)
        return self.shared - first.cached + own


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive rows of one sequence, or of a beginning that several share."""

    start: int
    position: int
    length: int
    earlier: Tensor
    """Rows of the keys before the segment, in position order."""


def shared_groups(sequences: Sequence[PackedSequence]) -> list[Group]:
    """Partition sequences into groups with a common beginning so that the most rows are saved.

    A group of n sequences that share s rows saves (n - 1) * s. Sequences are sorted by their
    tokens, so that a group is a run of neighbours, and runs are split where neighbours have least
    in common, as long as the pieces together save more.
    """
    order = sorted(
        range(len(sequences)),
        key=lambda n: (sequences[n].cached, sequences[n].cache_start, tuple(sequences[n].tokens)),
    )
    common = [_common_rows(sequences[a], sequences[b]) for a, b in pairwise(order)]
    groups = []
    for start, end in _best_runs(common, 0, len(order), depth=0)[1]:
        members = tuple(order[start:end])
        first = sequences[members[0]]
        shared = first.cached + min(common[start : end - 1], default=_own_rows(first))
        groups.append(Group(members, shared))
    return groups


def _own_rows(sequence: PackedSequence) -> int:
    return len(sequence.tokens) - sequence.cached


def _common_rows(left: PackedSequence, right: PackedSequence) -> int:
    """Return how many rows two sequences could share, 0 if their known tokens differ."""
    if (left.cached, left.cache_start) != (right.cached, right.cache_start):
        return 0
    return max(0, _common_length(left.tokens, right.tokens) - left.cached)


def _best_runs(
    common: Sequence[int], start: int, end: int, *, depth: int
) -> tuple[int, list[tuple[int, int]]]:
    """Return the most rows that runs of start..end can save, and those runs.

    Args:
        common: rows that neighbours n and n + 1 could share.
        start: first sequence.
        end: one after the last.
        depth: splits made on the way here.
    """
    inner = common[start : end - 1]
    if not inner:
        return 0, [(start, end)] if end > start else []
    least = min(inner)
    whole = least * len(inner)
    if depth == _DEEPEST_SPLIT and least > 0:
        return whole, [(start, end)]
    cuts = [start + n + 1 for n, rows in enumerate(inner) if rows == least]
    saved, runs = 0, []
    for piece_start, piece_end in zip([start, *cuts], [*cuts, end], strict=True):
        piece_saved, piece_runs = _best_runs(common, piece_start, piece_end, depth=depth + 1)
        saved += piece_saved
        runs += piece_runs
    return (saved, runs) if saved > whole or least == 0 else (whole, [(start, end)])


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    for n, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return n
    return min(len(left), len(right))


def pack(
    sequences: Sequence[PackedSequence], *, groups: Sequence[Group], heads_per_kv: int
) -> Packing:
    """Lay out the sequences of some groups.

    Args:
        sequences: all sequences that the groups' members point into.
        groups: which of them to pack, as `shared_groups` returned them.
        heads_per_kv: query heads per key/value head, for the mask's rows.

    Returns:
        A packing whose ``rows_S`` has one entry per packed sequence, in the order of the groups'
        members.
    """
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[_Segment] = []
    rows_S: list[Tensor] = []
    total = padded(sum(group.rows(sequences) for group in groups), ROW_QUANTUM)

    def add(sequence: PackedSequence, begin: int, end: int, earlier: Tensor) -> Tensor:
        start = len(tokens)
        tokens.extend(sequence.tokens[begin:end])
        positions.extend(range(begin, end))
        segments.append(_Segment(start, begin, end - begin, earlier))
        return torch.arange(start, start + end - begin)

    for group in groups:
        first = sequences[group.members[0]]
        known = torch.arange(first.cached) + total + first.cache_start
        shared_rows = add(first, first.cached, group.shared, known)
        before = torch.cat([known, shared_rows])
        for n in group.members:
            own = add(sequences[n], group.shared, len(sequences[n].tokens), before)
            rows_S.append(torch.cat([shared_rows, own]))
    surplus = total - len(tokens)
    blocks, output_rows = _blocks(segments, total=total, heads_per_kv=heads_per_kv)
    return Packing(
        tokens_N=torch.tensor(tokens + tokens[:1] * surplus),
        positions_N=torch.tensor(positions + positions[:1] * surplus),
        rows_S=rows_S,
        blocks=blocks,
        output_rows_N=output_rows,
    )


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some consecutive queries of a segment and the keys the last of them sees."""

    segment: _Segment
    offset: int
    queries: int

    @property
    def keys(self) -> int:
        return self.segment.position + self.offset + self.queries

    @property
    def rectangle(self) -> tuple[int, int]:
        return padded(self.queries, ROW_QUANTUM), padded(self.keys, KEY_QUANTUM)


def _blocks(
    segments: Sequence[_Segment], *, total: int, heads_per_kv: int
) -> tuple[list[AttentionBlock], Tensor]:
    """Cut segments into tiles, put tiles of similar size into blocks."""
    tiles = [
        _Tile(segment, offset, min(_QUERY_TILE, segment.length - offset))
        for segment in segments
        for offset in range(0, segment.length, _QUERY_TILE)
    ]
    tiles.sort(key=lambda tile: tile.rectangle)
    output_rows = torch.zeros(total, dtype=torch.long)
    blocks = []
    done = 0
    for batch in _batches(tiles):
        block = _block(batch, heads_per_kv=heads_per_kv)
        queries = block.query_rows_BQ.shape[1]
        for b, tile in enumerate(batch):
            start = tile.segment.start + tile.offset
            begin = done + b * queries
            output_rows[start : start + tile.queries] = torch.arange(begin, begin + tile.queries)
        done += len(batch) * queries
        blocks.append(block)
    return blocks, output_rows


def _batches(tiles: Sequence[_Tile]) -> list[list[_Tile]]:
    """Split sorted tiles where padding them to one rectangle would cost too much."""
    batches: list[list[_Tile]] = []
    used = queries = keys = 0
    for tile in tiles:
        tile_queries, tile_keys = tile.rectangle
        wide, tall = max(queries, tile_queries), max(keys, tile_keys)
        cells = wide * tall * (len(batches[-1]) + 1 if batches else 1)
        needed = used + tile_queries * tile_keys
        fits = cells <= max(_SMALL_BLOCK_CELLS, min(_BLOCK_CELLS, 2 * needed))
        if batches and fits:
            batches[-1].append(tile)
            used, queries, keys = needed, wide, tall
        else:
            batches.append([tile])
            used, queries, keys = tile_queries * tile_keys, tile_queries, tile_keys
    return batches


def _block(tiles: Sequence[_Tile], *, heads_per_kv: int) -> AttentionBlock:
    queries = max(tile.rectangle[0] for tile in tiles)
    keys = max(tile.rectangle[1] for tile in tiles)
    query_rows = torch.zeros(len(tiles), queries, dtype=torch.long)
    key_rows = torch.zeros(len(tiles), keys, dtype=torch.long)
    last_seen = torch.zeros(len(tiles), queries, dtype=torch.long)
    for b, tile in enumerate(tiles):
        segment, start = tile.segment, tile.segment.start + tile.offset
        query_rows[b, : tile.queries] = torch.arange(start, start + tile.queries)
        own = torch.arange(segment.start, start + tile.queries)
        key_rows[b, : tile.keys] = torch.cat([segment.earlier, own])
        first = segment.position + tile.offset
        last_seen[b, : tile.queries] = torch.arange(first, first + tile.queries)
    mask = torch.zeros(len(tiles), queries, keys)
    mask.masked_fill_(torch.arange(keys) > last_seen[..., None], -torch.inf)
    return AttentionBlock(query_rows, key_rows, mask.repeat_interleave(heads_per_kv, 1)[:, None])


def row_batches(sequences: Sequence[PackedSequence], *, max_rows: int) -> list[list[Group]]:
    """Return all sequences in batches of groups, each of at most so many rows if it can be.

    A group too large for a batch is cut, and its shared beginning computed once per piece; a
    single sequence with more rows makes a batch of its own. The batches depend on the sequences
    alone.
    """
    pieces = [
        piece
        for group in shared_groups(sequences)
        for piece in _cut(group, sequences, max_rows=max_rows)
    ]
    pieces.sort(key=lambda group: len(sequences[group.members[0]].tokens))
    batches: list[list[Group]] = []
    used = 0
    for piece in pieces:
        rows = piece.rows(sequences)
        if batches and used + rows <= max_rows:
            batches[-1].append(piece)
            used += rows
        else:
            batches.append([piece])
            used = rows
    return batches


def _cut(group: Group, sequences: Sequence[PackedSequence], *, max_rows: int) -> list[Group]:
    """Split a group into pieces of at most so many rows."""
    shared = group.shared - sequences[group.members[0]].cached
    pieces: list[list[int]] = []
    used = 0
    for n in group.members:
        own = len(sequences[n].tokens) - group.shared
        if pieces and used + own <= max_rows:
            pieces[-1].append(n)
            used += own
        else:
            pieces.append([n])
            used = shared + own
    return [Group(tuple(piece), group.shared) for piece in pieces]
