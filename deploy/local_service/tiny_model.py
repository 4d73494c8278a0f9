"""The model named ``tiny``: a few thousand parameters, made from nothing but this code."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from deploy.local_service.byte_tokenizer import (
    CHAT_END,
    CHAT_START,
    CHAT_TEMPLATE,
    END_OF_TEXT,
    byte_alphabet,
    write_json,
    write_tokenizer,
)

SOURCE = "built-in tiny model, version 1"
"""What the record says about where the model came from; part of its digest."""

_SPECIAL = [END_OF_TEXT, CHAT_START, CHAT_END]
_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP, _LAYERS = 16, 2, 1, 8, 32, 2
_CONTEXT = 4096
_EMBEDDING_STD, _WEIGHT_STD = 1.0, 0.35


def write_tiny(folder: Path) -> None:
    """Write the tiny model and its byte tokenizer into an existing folder.

    Token ids: 0 to 2 are the chat tokens, byte b is 3 + b. The weights come from SHAKE-256, so
    that every machine and library version makes the same bytes.
    """
    vocab = len(_SPECIAL) + 256
    config = _config(vocab)
    save_file(_weights(vocab), str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    write_tokenizer(
        folder,
        tokens=[*_SPECIAL, *byte_alphabet()],
        merges=[],
        special=_SPECIAL,
        split_digits=False,
        chat_template=CHAT_TEMPLATE,
        max_length=_CONTEXT,
    )


def _config(vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": vocab,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }


def _weights(vocab: int) -> dict[str, Tensor]:
    """Return the weights under transformers' names."""
    shapes = {
        "self_attn.q_proj": (_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD_DIM),
        "mlp.gate_proj": (_MLP, _HIDDEN),
        "mlp.up_proj": (_MLP, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _MLP),
    }
    name = "model.embed_tokens.weight"
    weights = {name: _noise(name, (vocab, _HIDDEN), std=_EMBEDDING_STD)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        for part, shape in shapes.items():
            name = f"{prefix}{part}.weight"
            weights[name] = _noise(name, shape, std=_WEIGHT_STD)
        for part in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{part}.weight"] = torch.ones(_HIDDEN)
    weights["model.norm.weight"] = torch.full((_HIDDEN,), _WEIGHT_STD)
    return weights


def _noise(name: str, shape: tuple[int, int], *, std: float) -> Tensor:
    """Return values of mean 0 and the given spread, uniform, derived from the tensor's name."""
    count = shape[0] * shape[1]
    raw = hashlib.shake_256(f"{SOURCE}:{name}".encode()).digest(4 * count)
    words = torch.tensor(struct.unpack(f"<{count}I", raw), dtype=torch.float64)
    uniform = words / 2**32 * 2 - 1
    return (uniform * (std * 3**0.5)).float().reshape(shape)
