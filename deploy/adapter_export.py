"""Write a trained adapter into a folder that can be shipped: bfloat16 tensors and their record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deploy.local_service.base_model import BaseModel
from deploy.local_service.checkpoint import (
    ADAPTER_FILE,
    RECORD_FILE,
    checkpoint_record,
    load_checkpoint,
    read_record,
)
from deploy.local_service.model_store import resolve
from evidence.canonical import sha256_hex
from evidence.errors import InputError

MAX_BYTES = 6 * 1024 * 1024
"""Largest adapter that is shipped."""


def write_tensors(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Round a checkpoint's adapter to bfloat16 and write it.

    Args:
        checkpoint: folder of a checkpoint of the embedded service.
        folder: gets ``adapter.safetensors``.

    Returns:
        The record that binds it: base model with its digest, shape, digest of the rounded values in
        float32, digest and size of the file.

    Raises:
        InputError: if the file is larger than what is shipped.
    """
    base = BaseModel.load(resolve(read_record(checkpoint)["base_model"]).folder)
    adapter, _ = load_checkpoint(checkpoint, base=base, with_optimizer=False)
    rounded = {name: value.to(torch.bfloat16) for name, value in adapter.parameters.items()}
    with torch.no_grad():
        for name, value in rounded.items():
            adapter.parameters[name].copy_(value)
    path = folder / ADAPTER_FILE
    save_file(rounded, str(path))
    written = path.read_bytes()
    if len(written) > MAX_BYTES:
        raise InputError(str(path), len(written), f"at most {MAX_BYTES} bytes: take a lower rank")
    record = checkpoint_record(
        base_model=base.name,
        base_sha256=base.sha256,
        lora_config=read_record(checkpoint)["lora_config"],
        adapter_sha256=adapter.sha256(),
    )
    return record | {"file_sha256": sha256_hex(written), "file_bytes": len(written)}


def write_record(record: Mapping[str, Any], folder: Path) -> Path:
    """Write the record beside the tensors; it makes the folder an adapter."""
    path = folder / RECORD_FILE
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path
