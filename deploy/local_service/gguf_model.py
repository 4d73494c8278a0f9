"""Turn a GGUF file of a Llama model into a folder that transformers and the service can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from torch import Tensor

from deploy.local_service.byte_tokenizer import write_json, write_tokenizer
from evidence.errors import InputError

_CONTROL_TOKEN = 3
"""The GGUF token type of special tokens."""

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf_file: Path, folder: Path) -> None:
    """Write config, float32 weights and tokenizer of a GGUF Llama model into a folder.

    Quantised weights are expanded to float32. The rows of the query and key projections are put
    back into the half-split rotary order that ``LlamaForCausalLM`` expects.

    Args:
        gguf_file: a GGUF file whose architecture is ``llama`` and tokenizer is byte-level BPE.
        folder: an existing, empty folder.

    Raises:
        InputError: if the file holds another architecture or tokenizer.
    """
    reader = GGUFReader(str(gguf_file))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _expect(fields, "general.architecture", "llama", gguf_file)
    _expect(fields, "tokenizer.ggml.model", "gpt2", gguf_file)
    config = llama_config(fields, tied=not any(t.name == "output.weight" for t in reader.tensors))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        part = tensor.name.split(".")[-2]
        if part in heads:
            value = half_split_rows(value, heads=heads[part])
        weights[_name(tensor.name)] = value.contiguous()
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    _write_tokenizer(folder, fields, max_length=config["max_position_embeddings"])


def llama_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """Return the transformers configuration of the model that GGUF metadata describes."""
    hidden = int(fields["llama.embedding_length"])
    heads = int(fields["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }


def half_split_rows(weight: Tensor, *, heads: int) -> Tensor:
    """Reorder projection rows from interleaved to half-split rotary pairs.

    Within each head GGUF stores the pair of rotation n as rows 2n and 2n+1; transformers stores it
    as rows n and n + head_dim/2.

    Args:
        weight: [heads * head_dim, hidden].
        heads: number of heads in the rows.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _name(gguf_name: str) -> str:
    """Return transformers' name of a GGUF tensor."""
    if gguf_name in _TOP_LEVEL:
        return _TOP_LEVEL[gguf_name]
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"


def _write_tokenizer(folder: Path, fields: dict[str, Any], *, max_length: int) -> None:
    """Write the tokenizer that the GGUF metadata holds."""
    tokens = list(fields["tokenizer.ggml.tokens"])
    kinds = fields["tokenizer.ggml.token_type"]
    merges = [tuple(text.split(" ", 1)) for text in fields["tokenizer.ggml.merges"]]
    write_tokenizer(
        folder,
        tokens=tokens,
        merges=merges,
        special=[t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN],
        split_digits=fields.get("tokenizer.ggml.pre") == "smollm",
        chat_template=fields["tokenizer.chat_template"],
        max_length=max_length,
    )


def _expect(fields: dict[str, Any], name: str, value: str, file: Path) -> None:
    """Refuse a file whose metadata field has another value."""
    if fields.get(name) != value:
        raise InputError(name, fields.get(name), repr(value), where=file.name)
