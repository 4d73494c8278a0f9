"""The decoder: token rows in, normalised hidden rows out; attention and products are given.

Sampling, scoring and training run this one function, so that equal weights give equal bits on all
three paths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deploy.local_service import kernels
from deploy.local_service.matrices import Matrix
from deploy.local_service.packing import Packing
from deploy.local_service.sampler_weights import SamplerWeights

Multiply = Callable[[int, str, Tensor, Matrix], Tensor]
"""(layer, field of `LayerWeights`, rows, matrix) -> rows times the matrix."""


Keep = Callable[[int, Tensor, Tensor], None]
"""(layer, keys [N, kv_heads, head_dim], values likewise), told while a packing is computed."""


class Attend(Protocol):
    """Attention of one layer over rows."""

    def __call__(self, layer: int, q_NAD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        """Return the attention output of each row, [N, heads * head_dim]."""


def multiply_frozen(layer: int, field: str, rows: Tensor, matrix: Matrix) -> Tensor:
    """Multiply rows by a matrix that takes no gradient."""
    del layer, field
    return matrix.multiply(rows)


def hidden_rows(
    weights: SamplerWeights,
    tokens_N: Tensor,
    positions_N: Tensor,
    *,
    attend: Attend,
    multiply: Multiply = multiply_frozen,
    recompute: bool = False,
) -> Tensor:
    """Return the rows that the unembedding is applied to, [N, hidden] float32.

    Args:
        weights: what to compute with.
        tokens_N: [N] token ids; N a multiple of the row quantum.
        positions_N: [N] positions of the tokens.
        attend: attention over the rows and whatever came before them.
        multiply: the products with the layers' matrices.
        recompute: keep only each layer's input for the backward pass and compute the layer again
            there: a third more work, and the activations of one layer instead of all.
    """
    base = weights.base
    cos_N1C, sin_N1C = base.rotary[:, positions_N, None].to(base.dtype)
    x_NH = torch.nn.functional.embedding(tokens_N, base.embedding)
    if torch.is_grad_enabled():
        x_NH.requires_grad_()
    for number in range(len(weights.layers)):
        arguments = (weights, number, x_NH, (cos_N1C, sin_N1C), attend, multiply)
        if recompute:
            x_NH = checkpoint(_layer, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            x_NH = _layer(*arguments)
    return kernels.rms_norm(x_NH, base.final_norm, base.shape.norm_eps, torch.float32)


def _layer(
    weights: SamplerWeights,
    number: int,
    x_NH: Tensor,
    angles: tuple[Tensor, Tensor],
    attend: Attend,
    multiply: Multiply,
) -> Tensor:
    """Return the residual stream after one layer."""
    base, shape, layer = weights.base, weights.base.shape, weights.layers[number]
    normed = kernels.rms_norm(x_NH, layer.attention_norm, shape.norm_eps, base.dtype)
    qkv = multiply(number, "qkv", normed, layer.qkv)
    heads = qkv.view(len(x_NH), -1, shape.head_dim)
    turned = kernels.rotate(heads[:, : shape.heads + shape.kv_heads], *angles)
    attended = attend(
        number,
        turned[:, : shape.heads],
        turned[:, shape.heads :],
        heads[:, shape.heads + shape.kv_heads :],
    )
    x_NH = x_NH + multiply(number, "attention_out", attended, layer.attention_out)
    normed = kernels.rms_norm(x_NH, layer.mlp_norm, shape.norm_eps, base.dtype)
    gated = kernels.gated(multiply(number, "gate_up", normed, layer.gate_up))
    return x_NH + multiply(number, "down", gated, layer.down)


class PackedAttention:
    """Attention over a packing, with keys and values that may be known from earlier."""

    def __init__(
        self,
        packing: Packing,
        *,
        known: Tensor | None = None,
        keep: Keep | None = None,
    ) -> None:
        """Prepare.

        Args:
            packing: rows and blocks.
            known: [layers, 2, C, kv_heads, head_dim], the pool that ``cache_start`` points into.
            keep: told the keys and values of the rows.
        """
        self._packing = packing
        self._known = known
        self._keep = keep

    def __call__(self, layer: int, q_NAD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        """Return the attention output of each row, [N, heads * head_dim]."""
        if self._keep is not None:
            self._keep(layer, k_NGD, v_NGD)
        k_pool, v_pool = k_NGD, v_NGD
        if self._known is not None:
            k_pool = torch.cat([k_NGD, self._known[layer, 0]])
            v_pool = torch.cat([v_NGD, self._known[layer, 1]])
        outputs = [
            _attend_block(
                q_NAD, k_pool, v_pool, block.query_rows_BQ, block.key_rows_BK, block.mask_B1XK
            )
            for block in self._packing.blocks
        ]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, self._packing.output_rows_N)


def _attend_block(
    q_NAD: Tensor, k_PGD: Tensor, v_PGD: Tensor, query_rows: Tensor, key_rows: Tensor, mask: Tensor
) -> Tensor:
    """Return the outputs of a block's queries, [B * Q, heads * head_dim]."""
    (batch, queries), keys = query_rows.shape, key_rows.shape[1]
    heads, kv_heads, width = q_NAD.shape[1], k_PGD.shape[1], q_NAD.shape[2]
    per_kv = heads // kv_heads
    q = q_NAD.index_select(0, query_rows.reshape(-1))
    q = q.view(batch, queries, kv_heads, per_kv, width).permute(0, 2, 1, 3, 4)
    q = q.reshape(batch, kv_heads, queries * per_kv, width)
    k = k_PGD.index_select(0, key_rows.reshape(-1)).view(batch, keys, kv_heads, width)
    v = v_PGD.index_select(0, key_rows.reshape(-1)).view(batch, keys, kv_heads, width)
    out = kernels.attend(q, k.transpose(1, 2), v.transpose(1, 2), mask)
    out = out.view(batch, kv_heads, queries, per_kv, width).permute(0, 2, 1, 3, 4)
    return out.reshape(batch * queries, heads * width)
