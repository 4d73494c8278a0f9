"""The unembedding: hidden rows to log-probabilities of chosen tokens, few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deploy.local_service import kernels
from deploy.local_service.kernels import ROW_QUANTUM, padded
from deploy.local_service.matrices import Matrix

HEAD_ROWS = 128
"""Rows unembedded at once: 25 MB of logits for a vocabulary of 49 thousand."""


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Distinct (row, token) pairs to score, sorted by row then token."""

    rows_P: Tensor
    tokens_P: Tensor
    inverse: Tensor
    """Index into the pairs for each pair that was asked for, in the order asked."""

    @classmethod
    def of(cls, rows: Tensor, tokens: Tensor) -> Pairs:
        """Return the distinct pairs of two index vectors of equal length."""
        width = int(tokens.max()) + 1 if len(tokens) else 1
        keys, inverse = torch.unique(rows * width + tokens, return_inverse=True)
        return cls(keys // width, keys % width, inverse)


def unembed(head_VH: Matrix, hidden_NH: Tensor, rows_U: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (rows [C], logits [C, V]) for chunks of some hidden rows.

    Args:
        head_VH: unembedding, float32.
        hidden_NH: normalised hidden rows, float32.
        rows_U: rows of interest.
    """
    for part in torch.split(rows_U, HEAD_ROWS):
        if len(part) == 0:
            return
        filled = part.new_zeros(padded(len(part), ROW_QUANTUM))
        filled[: len(part)] = part
        logits = head_VH.multiply(hidden_NH.index_select(0, filled))
        yield part, logits[: len(part)]


def pair_logprobs(head_VH: Matrix, hidden_NH: Tensor, pairs: Pairs) -> Tensor:
    """Return the log-probability of each distinct pair, [P] float32."""
    out = torch.empty(len(pairs.rows_P))
    for rows, logits in unembed(head_VH, hidden_NH, torch.unique(pairs.rows_P)):
        span, local = pairs_of(pairs, rows)
        normalizers = kernels.log_normalizers(logits)
        out[span] = logits[local, pairs.tokens_P[span]] - normalizers[local]
    return out


def pairs_of(pairs: Pairs, rows_C: Tensor) -> tuple[slice, Tensor]:
    """Return where the pairs of consecutive distinct rows stand, and each one's row among them."""
    begin = int(torch.searchsorted(pairs.rows_P, rows_C[0]))
    end = int(torch.searchsorted(pairs.rows_P, rows_C[-1], right=True))
    span = slice(begin, end)
    return span, torch.searchsorted(rows_C, pairs.rows_P[span])
