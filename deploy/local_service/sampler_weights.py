"""Weights to compute with: a base model, or a base model with one adapter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deploy.local_service.adapter import FUSED, Adapter
from deploy.local_service.base_model import BaseModel, LayerWeights
from deploy.local_service.matrices import Matrix


@dataclass(frozen=True, slots=True, eq=False)
class SamplerWeights:
    """Immutable weights; tensors that the adapter does not touch are the base model's own."""

    base: BaseModel
    layers: tuple[LayerWeights, ...]
    head: Matrix
    """Unembedding [vocab, hidden], float32."""
    sha256: str
    """Digest of base, dtype and adapter: equal digests compute equal bits."""

    @classmethod
    def of_base(cls, base: BaseModel) -> SamplerWeights:
        """Return the base model's weights as they are."""
        return cls(base=base, layers=base.layers, head=base.head, sha256=_key(base, "base"))

    @classmethod
    def adapted(cls, base: BaseModel, adapter: Adapter) -> SamplerWeights:
        """Return the base model's weights with ``alpha / rank * B @ A`` added.

        In float32 the change is merged into a copy of each adapted matrix: one product instead of
        three. In bfloat16 it is kept apart, since most of a small change would be lost when the
        sum is rounded. The unembedding is float32 and always merged.
        """
        layers = tuple(
            _adapted_layer(layer, adapter, number) for number, layer in enumerate(base.layers)
        )
        head = _adapted_matrix(base.head, adapter, adapter.unembed_modules)
        return cls(base=base, layers=layers, head=head, sha256=_key(base, adapter.sha256()))


def _key(base: BaseModel, adapter: str) -> str:
    return f"{base.sha256}:{base.dtype}:{adapter}"


def _adapted_layer(layer: LayerWeights, adapter: Adapter, number: int) -> LayerWeights:
    matrices = {
        field: _adapted_matrix(getattr(layer, field), adapter, adapter.modules(number, field))
        for field in FUSED
    }
    return LayerWeights(**matrices, attention_norm=layer.attention_norm, mlp_norm=layer.mlp_norm)


def _adapted_matrix(matrix: Matrix, adapter: Adapter, modules: tuple[str, ...]) -> Matrix:
    weight = matrix.weight
    if not modules:
        return matrix
    if weight.dtype == torch.float32:
        return Matrix(weight, merged=adapter.merge(weight, modules))
    down = torch.cat([adapter.parameters[f"{name}.A"] for name in modules])
    ups = [adapter.parameters[f"{name}.B"] * adapter.config.scale for name in modules]
    up: Tensor = torch.block_diag(*ups)  # type: ignore[no-untyped-call]
    return Matrix(weight, down=down.to(weight.dtype), up=up.to(weight.dtype))
