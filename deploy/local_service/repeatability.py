"""Measure, on the machine at hand, what repeatable results rest on.

The kernels take for granted that a row's result does not depend on how many rows are computed with
it, where it stands among them, or how many masked keys follow its own. That is a property of the
numeric libraries, the processor and the number of threads. It holds on those it was tested on; a
service can ask here at start instead of trusting that it holds everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deploy.local_service import kernels
from deploy.local_service.base_model import BaseModel, ModelShape
from deploy.local_service.kernels import KEY_PAGE, KEY_QUANTUM, QUERY_ROWS, ROW_QUANTUM
from deploy.local_service.matrices import Matrix

_ROWS = (1, 2, 3, 5, 8, 16)
"""Numbers of rows tried, in row quanta."""


def find_differences(base: BaseModel) -> list[str]:
    """Return what is not repeatable here, in words; empty if everything tried is.

    Takes a second for a model of 135 million parameters.
    """
    layer = base.layers[0]
    matrices = {
        "qkv": layer.qkv,
        "attention_out": layer.attention_out,
        "gate_up": layer.gate_up,
        "down": layer.down,
        "head": base.head,
    }
    found = []
    with torch.no_grad():
        for name, matrix in matrices.items():
            found += [f"{name}: {what}" for what in _product_differences(matrix)]
        found += [f"attention: {what}" for what in _attention_differences(base.shape, base.dtype)]
    return found


def _noise(*size: int, dtype: torch.dtype) -> Tensor:
    """Return the same random values whatever else draws random numbers."""
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


def _product_differences(matrix: Matrix) -> Iterator[str]:
    """Compare products of the same rows in other company and at other places."""
    most = max(_ROWS) * ROW_QUANTUM
    rows = _noise(most, matrix.weight.shape[1], dtype=matrix.weight.dtype)
    reference = matrix.multiply(rows)
    for count in (quanta * ROW_QUANTUM for quanta in _ROWS):
        if not torch.equal(matrix.multiply(rows[:count].clone()), reference[:count]):
            yield f"a row among {count} rows differs from the same row among {most}"
        turned = matrix.multiply(rows[:count].roll(1, 0)).roll(-1, 0)
        if not torch.equal(turned, reference[:count]):
            yield f"a row among {count} rows differs at another place"


def _attention_differences(shape: ModelShape, dtype: torch.dtype) -> Iterator[str]:
    """Compare one query computed as in decoding with the same computed in a prompt's block."""
    tokens = KEY_PAGE + 2 * KEY_QUANTUM
    heads, width = shape.kv_heads, shape.head_dim
    keys, values = (_noise(2, heads, tokens, width, dtype=dtype).flip(n) for n in (0, 2))
    rows = max(shape.heads_per_kv, QUERY_ROWS) * ROW_QUANTUM
    queries = _noise(1, heads, rows, width, dtype=dtype)
    for seen in (1, KEY_QUANTUM, KEY_PAGE - 3, KEY_PAGE + 1):
        mask = torch.zeros(tokens).masked_fill_(torch.arange(tokens) >= seen, -torch.inf)
        whole = kernels.attend(queries, keys[:1], values[:1], mask.expand(1, 1, rows, tokens))
        short = kernels.padded(seen, KEY_QUANTUM)
        few = queries[:, :, :QUERY_ROWS].expand(2 * ROW_QUANTUM, -1, -1, -1).contiguous()
        many_keys, many_values = (
            x[:1, :, :short].expand(2 * ROW_QUANTUM, -1, -1, -1).contiguous()
            for x in (keys, values)
        )
        decoded = kernels.attend(few, many_keys, many_values, mask[:short])
        if not torch.equal(decoded[0], whole[0, :, :QUERY_ROWS]):
            yield f"{seen} keys seen in decoding differ from the same in a prompt"
        if not torch.equal(decoded, decoded[:1].expand_as(decoded)):
            yield f"equal sequences of {seen} keys differ from each other"
