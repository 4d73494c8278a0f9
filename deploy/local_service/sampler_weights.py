"""Weights to compute with: a base model, or a base model with one adapter merged into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deploy.local_service.adapter import FUSED, UNEMBED, Adapter
from deploy.local_service.base_model import BaseModel, LayerWeights


@dataclass(frozen=True, slots=True, eq=False)
class SamplerWeights:
    """Immutable weights; tensors that the adapter does not touch are the base model's own."""

    base: BaseModel
    layers: tuple[LayerWeights, ...]
    head: Tensor
    """Unembedding [vocab, hidden], float32."""
    sha256: str
    """Digest of base, dtype and adapter: equal digests compute equal bits."""

    @classmethod
    def of_base(cls, base: BaseModel) -> SamplerWeights:
        """Return the base model's weights as they are."""
        return cls(base=base, layers=base.layers, head=base.head, sha256=_key(base, "base"))

    @classmethod
    def merged(cls, base: BaseModel, adapter: Adapter) -> SamplerWeights:
        """Return the base model's weights with ``alpha / rank * B @ A`` added.

        The sum is taken in float32 and rounded once to the compute dtype. Costs a copy of the
        adapted matrices.
        """
        layers = tuple(
            _merged_layer(layer, adapter, number) for number, layer in enumerate(base.layers)
        )
        change = adapter.delta(UNEMBED)
        head = base.head if change is None else change.add_(base.head)
        return cls(base=base, layers=layers, head=head, sha256=_key(base, adapter.sha256()))


def _key(base: BaseModel, adapter: str) -> str:
    return f"{base.sha256}:{base.dtype}:{adapter}"


def _merged_layer(layer: LayerWeights, adapter: Adapter, number: int) -> LayerWeights:
    def merge(field: str) -> Tensor:
        weight: Tensor = getattr(layer, field)
        modules = adapter.modules(number, field)
        if not modules:
            return weight
        changes = [change for module in modules if (change := adapter.delta(module)) is not None]
        return torch.cat(changes).add_(weight).to(weight.dtype)

    merged: Callable[[str], Tensor] = merge
    fields = {field: merged(field) for field in FUSED}
    return LayerWeights(**fields, attention_norm=layer.attention_norm, mlp_norm=layer.mlp_norm)
