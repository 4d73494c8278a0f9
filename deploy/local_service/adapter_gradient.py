"""The gradient of an adapter: products that hand their share of it on during the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deploy.local_service.adapter import Adapter
from deploy.local_service.matrices import Matrix


class AdapterGradient:
    """Sums the gradient of one request, apart from the adapter's own until it is complete."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._flat, self._views = adapter.empty_gradient()

    def multiply(self, layer: int, field: str, rows: Tensor, matrix: Matrix) -> Tensor:
        """Multiply rows by an adapted matrix; the backward pass adds to the gradient here."""
        modules = self._adapter.modules(layer, field)
        product: Tensor = _AdaptedProduct.apply(  # type: ignore[no-untyped-call]
            rows, matrix, self, modules
        )
        return product

    def multiply_back(
        self, matrix: Matrix, modules: tuple[str, ...], inputs_NI: Tensor, grads_NO: Tensor
    ) -> Tensor:
        """Return the gradient of rows from that of their products, and add the adapter's share.

        With W' = W + scale B A the rows' gradient is ``grad W'``; that of B is
        ``scale grad^T (x A^T)`` and that of A ``scale (grad B)^T x``.

        Args:
            matrix: holds the frozen W [out, in].
            modules: adapted modules, whose outputs lie side by side in the products.
            inputs_NI: the rows x.
            grads_NO: gradient of the products.
        """
        back = grads_NO @ matrix.weight
        if not modules:
            return back
        scale = self._adapter.config.scale
        back, inputs, grads = back.float(), inputs_NI.float(), grads_NO.float()
        start = 0
        for name in modules:
            a, b = self._adapter.parameters[f"{name}.A"], self._adapter.parameters[f"{name}.B"]
            part = grads[:, start : start + len(b)]
            start += len(b)
            low = part @ b
            self._views[f"{name}.B"].addmm_(part.t(), inputs @ a.t(), alpha=scale)
            self._views[f"{name}.A"].addmm_(low.t(), inputs, alpha=scale)
            back.addmm_(low, a, alpha=scale)
        return back.to(grads_NO.dtype)

    def multiply_head_back(self, head: Matrix, hidden_NH: Tensor, grads_NV: Tensor) -> Tensor:
        """Return the gradient of hidden rows from that of their logits; see `multiply_back`."""
        return self.multiply_back(head, self._adapter.unembed_modules, hidden_NH, grads_NV)

    def complete(self) -> None:
        """Add the sum to the adapter's gradient."""
        self._adapter.gradient.add_(self._flat)
        self._adapter.has_gradient = True


class _AdaptedProduct(torch.autograd.Function):
    """``rows @ (weight + up @ down).T`` with the gradient of the low-rank part handed on."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, matrix: Matrix, gradient: AdapterGradient, modules: tuple[str, ...]
    ) -> Tensor:
        ctx.matrix, ctx.gradient, ctx.modules = matrix, gradient, modules
        ctx.save_for_backward(rows if modules else rows.new_empty(0))
        return matrix.multiply(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inputs,) = ctx.saved_tensors
        back: Tensor = ctx.gradient.multiply_back(ctx.matrix, ctx.modules, inputs, grads[0])
        return back, None, None, None
