"""The gradient of an adapter: products that hand their share of it on during the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deploy.local_service import kernels
from deploy.local_service.adapter import UNEMBED, Adapter
from deploy.local_service.base_model import Matrix


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

    def add(self, modules: tuple[str, ...], inputs_NI: Tensor, grads_NO: Tensor) -> None:
        """Add the share of some rows through modules whose outputs lie side by side.

        With z = A x, the gradient of B is ``scale * grad^T z`` and of A ``scale * (grad B)^T x``.
        """
        scale = self._adapter.config.scale
        inputs, grads = inputs_NI.float(), grads_NO.float()
        start = 0
        for name in modules:
            a, b = self._adapter.parameters[f"{name}.A"], self._adapter.parameters[f"{name}.B"]
            part = grads[:, start : start + len(b)]
            start += len(b)
            self._views[f"{name}.B"].addmm_(part.t(), inputs @ a.t(), alpha=scale)
            self._views[f"{name}.A"].addmm_((part @ b).t(), inputs, alpha=scale)

    @property
    def unembed_adapted(self) -> bool:
        """Whether the unembedding has an adapter."""
        return f"{UNEMBED}.A" in self._views

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
        if modules:
            ctx.save_for_backward(rows)
        return kernels.multiply(rows, matrix)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        matrix: Matrix = ctx.matrix
        if ctx.modules:
            ctx.gradient.add(ctx.modules, ctx.saved_tensors[0], grad)
        back = grad @ matrix.weight
        if matrix.down is not None and matrix.up is not None:
            back = back + (grad @ matrix.up) @ matrix.down
        return back, None, None, None
