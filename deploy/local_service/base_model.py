"""The frozen base model: shape, weights fused for few large products, rotary table, tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from deploy.local_service.matrices import Matrix
from deploy.local_service.model_files import read_model_files
from evidence.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The precisions of the matrix products; residual stream and logits are float32 in both."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama-style decoder."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float

    @property
    def query_dim(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of one layer; norms are float32."""

    qkv: Matrix
    """Query, key and value rows, one below the other."""
    attention_out: Matrix
    gate_up: Matrix
    """Gate rows above up rows."""
    down: Matrix
    attention_norm: Tensor
    mlp_norm: Tensor


class BaseModel:
    """Frozen weights of a Llama-style model and what belongs to them."""

    def __init__(
        self,
        *,
        name: str,
        sha256: str,
        folder: Path,
        dtype: torch.dtype,
        config: dict[str, Any],
        weights: dict[str, Tensor],
    ) -> None:
        self.name = name
        self.sha256 = sha256
        self.folder = folder
        self.dtype = dtype
        self.shape = _shape(config)
        self.vocab_size = self.shape.vocab
        self.max_positions = self.shape.max_positions
        self.eos_ids = _eos_ids(config)
        self.embedding = weights["model.embed_tokens.weight"].float()
        self.layers = tuple(_layer(weights, n, dtype=dtype) for n in range(self.shape.layers))
        self.final_norm = weights["model.norm.weight"].float()
        self.head = Matrix(weights.get("lm_head.weight", self.embedding).float())
        self.rotary = _rotary_table(self.shape)

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype = torch.float32) -> BaseModel:
        """Read a folder that `model_store.resolve` returned.

        Args:
            folder: the model's folder.
            dtype: precision of the matrix products inside the layers, one of `DTYPES`.

        Raises:
            InputError: if the folder holds no resolved model, another architecture, or the dtype
                is not served.
        """
        if dtype not in DTYPES.values():
            raise InputError("dtype", str(dtype), f"one of {', '.join(DTYPES)}")
        files = read_model_files(folder, verify=False)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        _expect_plain_llama(config, where=str(folder / "config.json"))
        return cls(
            name=files.name,
            sha256=files.base_sha256,
            folder=folder,
            dtype=dtype,
            config=config,
            weights=load_file(folder / "model.safetensors"),
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer as the ``tokenizers`` library reads it (no chat template)."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text without adding any."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def _shape(config: dict[str, Any]) -> ModelShape:
    heads = config["num_attention_heads"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    return ModelShape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        mlp=config["intermediate_size"],
        vocab=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=theta,
    )


def _eos_ids(config: dict[str, Any]) -> frozenset[int]:
    found = config.get("eos_token_id")
    return frozenset(found if isinstance(found, list) else [found])


def _expect_plain_llama(config: dict[str, Any], *, where: str) -> None:
    """Refuse what the kernels do not compute: other architectures, biases, scaled rotations."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    checks = (
        ("model_type", config.get("model_type"), "llama"),
        ("hidden_act", config.get("hidden_act"), "silu"),
        ("attention_bias", config.get("attention_bias", False), False),
        ("mlp_bias", config.get("mlp_bias", False), False),
        ("rope_type", kind, "default"),
    )
    for field, value, expected in checks:
        if value != expected:
            raise InputError(field, value, repr(expected), where=where)


def _layer(weights: dict[str, Tensor], number: int, *, dtype: torch.dtype) -> LayerWeights:
    def get(*names: str) -> Matrix:
        parts = [weights[f"model.layers.{number}.{name}.weight"] for name in names]
        return Matrix(torch.cat(parts).to(dtype).contiguous())

    def norm(name: str) -> Tensor:
        return weights[f"model.layers.{number}.{name}.weight"].float()

    return LayerWeights(
        qkv=get("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_out=get("self_attn.o_proj"),
        gate_up=get("mlp.gate_proj", "mlp.up_proj"),
        down=get("mlp.down_proj"),
        attention_norm=norm("input_layernorm"),
        mlp_norm=norm("post_attention_layernorm"),
    )


def _rotary_table(shape: ModelShape) -> Tensor:
    """Return [2, max_positions, head_dim / 2]: cosines and sines of every rotation angle."""
    pairs = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    positions = torch.arange(shape.max_positions, dtype=torch.float64)
    angles = torch.outer(positions, shape.rope_theta**-pairs)
    return torch.stack([angles.cos(), angles.sin()]).float()
