"""The arithmetic of one decoder layer, on rows of tokens, in shapes that keep every row's bits.

A result must depend on the request and the weights alone, not on what else is in the batch. That
holds because every operation here treats rows apart from each other, and because the library
routines that would choose another order of summation for other sizes are called in sizes where
they do not (`repeatability` measures it on the machine at hand):

* matrix products over tokens (`matrices`) have a multiple of `ROW_QUANTUM` rows;
* attention has a multiple of `KEY_QUANTUM` keys, the surplus masked, and sums the values in pages
  of `KEY_PAGE` keys, one page after the other;
* attention has at least `QUERY_ROWS` rows of queries per key/value head.

Shape suffixes: N rows (tokens), B sequences, Q queries, K keys, G key/value heads, R query heads
per key/value head, D head_dim, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_QUANTUM = 8
KEY_QUANTUM = 32
KEY_PAGE = 256
QUERY_ROWS = 4
"""Fewest rows of queries per key/value head in one product."""
VOCABULARY_BLOCK = 256
"""Probabilities are summed in blocks of so many tokens, then over blocks in float64."""


def padded(count: int, quantum: int) -> int:
    """Return the smallest positive multiple of a quantum that is not below a count."""
    return max(1, -(-count // quantum)) * quantum


def rms_norm(rows_NH: Tensor, weight_H: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return ``x * rsqrt(mean(x^2) + eps) * weight`` in another dtype, computed in float32."""
    return F.rms_norm(rows_NH, (rows_NH.shape[-1],), weight_H, eps).to(dtype)


def rotate(heads_NAD: Tensor, cos_N1C: Tensor, sin_N1C: Tensor) -> Tensor:
    """Turn the pairs (n, n + D/2) of each head by the angle of the row's position.

    Args:
        heads_NAD: [N, heads, D].
        cos_N1C: [N, 1, D/2], in the dtype of the heads.
        sin_N1C: likewise.
    """
    first, second = heads_NAD.chunk(2, -1)
    return torch.cat(
        (first * cos_N1C - second * sin_N1C, second * cos_N1C + first * sin_N1C), dim=-1
    )


def gated(gate_up_N2M: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, [N, M]."""
    gate, up = gate_up_N2M.chunk(2, -1)
    return F.silu(gate) * up


def attend(q_BGQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, mask_B1QK: Tensor) -> Tensor:
    """Return softmax attention of queries over keys, [B, G, Q, D].

    Args:
        q_BGQD: [B, G, Q, D]; Q runs over queries and the query heads that share a key/value head;
            at least `QUERY_ROWS`.
        k_BGKD: [B, G, K, D]; K a multiple of `KEY_QUANTUM`.
        v_BGKD: likewise.
        mask_B1QK: [B, 1, Q, K], 0 where a query sees a key and -inf elsewhere; every query sees at
            least one key.
    """
    keys = k_BGKD.shape[2]
    scores = torch.matmul(q_BGQD, k_BGKD.transpose(2, 3)).float() * q_BGQD.shape[-1] ** -0.5
    weights = torch.softmax(scores + mask_B1QK, dim=-1).to(v_BGKD.dtype)
    out = torch.matmul(weights[..., :KEY_PAGE], v_BGKD[:, :, :KEY_PAGE])
    for start in range(KEY_PAGE, keys, KEY_PAGE):
        end = start + KEY_PAGE
        out = out + torch.matmul(weights[..., start:end], v_BGKD[:, :, start:end])
    return out


def exponentials(logits_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of a softmax over the vocabulary.

    Returns:
        ``maxima`` [N, 1]; ``exponentials`` of logits less maxima, [N, blocks, VOCABULARY_BLOCK],
        zeros after the vocabulary's end; their sums per block, [N, blocks] float64.
    """
    count, width = logits_NV.shape
    blocks = -(-width // VOCABULARY_BLOCK)
    maxima = logits_NV.amax(dim=-1, keepdim=True)
    values = logits_NV.new_empty(count, blocks * VOCABULARY_BLOCK)
    torch.sub(logits_NV, maxima, out=values[:, :width]).exp_()
    values[:, width:] = 0.0
    values = values.view(count, blocks, VOCABULARY_BLOCK)
    return maxima, values, values.sum(dim=-1).double()


def log_normalizers(logits_NV: Tensor) -> Tensor:
    """Return ``log(sum(exp(logits)))`` of every row, [N] float32."""
    maxima, _, sums = exponentials(logits_NV)
    return log_normalizers_of(maxima, sums)


def log_normalizers_of(maxima_N1: Tensor, sums_NB: Tensor) -> Tensor:
    """Return what `log_normalizers` returns, from two of the parts that `exponentials` returns."""
    return (maxima_N1[:, 0].double() + sums_NB.sum(dim=-1).log()).float()
