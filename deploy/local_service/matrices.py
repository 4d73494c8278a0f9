"""Matrices to multiply token rows with, laid out for the processor at hand.

With oneDNN a matrix is stored in blocks once, instead of being rearranged within every product:
for 8 to 64 rows that makes a product a quarter faster. Where torch has no oneDNN (or not for a
dtype), the plain product is used. One process uses one of the two throughout, for the two may
differ in the last bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_EXPECTED_ROWS = 64
"""Hint for the block layout; it does not limit the number of rows."""


class Matrix:
    """A frozen matrix, or a frozen one with a low-rank change.

    The change is either merged into the copy that rows are multiplied with, or kept apart as
    ``up @ down``; ``weight`` stays the frozen matrix in both cases.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        merged: Tensor | None = None,
        down: Tensor | None = None,
        up: Tensor | None = None,
    ) -> None:
        """Describe the matrix.

        Args:
            weight: [out, in], frozen, in the compute dtype.
            merged: [out, in], the frozen matrix with the change added; not kept.
            down: [rank, in], with ``up``.
            up: [out, rank].
        """
        self.weight = weight
        self._packed = None if merged is None else pack(merged)
        self._down = None if down is None else pack(down)
        self._up = None if up is None else pack(up)

    def multiply(self, rows_NI: Tensor) -> Tensor:
        """Return the rows times the matrix and its change, [N, out]; no gradient is recorded."""
        if self._packed is None:
            self._packed = pack(self.weight)
        product = multiply_packed(rows_NI, self._packed)
        if self._down is not None and self._up is not None:
            product += multiply_packed(multiply_packed(rows_NI, self._down), self._up)
        return product


def pack(weight_OI: Tensor) -> Tensor:
    """Return a matrix in the layout that `multiply_packed` takes."""
    if not _packs(weight_OI.dtype):
        return weight_OI.contiguous()
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(
        weight_OI.detach().contiguous(), _EXPECTED_ROWS
    )
    return packed


def multiply_packed(rows_NI: Tensor, packed: Tensor) -> Tensor:
    """Return ``rows @ matrix.T`` for a matrix that `pack` returned."""
    if not packed.is_mkldnn:
        return F.linear(rows_NI, packed)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows_NI, packed, None, "none", [], "")
    return product


def _packs(dtype: torch.dtype) -> bool:
    """Say whether oneDNN packs matrices of a dtype here."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.float32:
        return True
    return dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
