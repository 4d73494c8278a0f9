"""Checkpoints of one adapter on disk: parameters, optimizer state, and what they belong to."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from deploy.local_service.adapter import Adapter, LoraConfig
from deploy.local_service.base_model import BaseModel
from deploy.local_service.byte_tokenizer import write_json
from deploy.local_service.optimizer import AdamW, AdamWConfig
from evidence.errors import ConflictError, InputError

ADAPTER_FILE, RECORD_FILE = "adapter.safetensors", "adapter.json"
"""Names of the files of an adapter's parameters, and of what they belong to."""
_OPTIMIZER = "optimizer.safetensors"
_FORMAT = 1


def save_checkpoint(
    folder: Path, *, base: BaseModel, adapter: Adapter, optimizer: AdamW | None
) -> None:
    """Write an adapter, and its optimizer's state if given, into a folder.

    Every file is synced; the record is written last, so that a folder without one is incomplete.

    Args:
        folder: is made if it is not there; may not hold a checkpoint.
        base: the model the adapter belongs to.
        adapter: what to write.
        optimizer: its state, or None for weights alone.

    Raises:
        ConflictError: if the folder holds a checkpoint already.
        OSError: if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / RECORD_FILE).exists():
        raise ConflictError("folder", str(folder), "one without a checkpoint")
    record = checkpoint_record(
        base_model=base.name,
        base_sha256=base.sha256,
        lora_config=asdict(adapter.config),
        adapter_sha256=adapter.sha256(),
    )
    parameters = {name: value.contiguous() for name, value in adapter.parameters.items()}
    _save(folder / ADAPTER_FILE, parameters)
    if optimizer is not None:
        _save(folder / _OPTIMIZER, {"first": optimizer.first, "second": optimizer.second})
        last = optimizer.last_config
        record["optimizer"] = {
            "type": "adamw",
            "steps": optimizer.steps,
            "last_config": None if last is None else asdict(last),
            "sha256": optimizer.sha256(),
        }
    write_json(folder / RECORD_FILE, record)
    _sync(folder / RECORD_FILE)
    _sync(folder)


def checkpoint_record(
    *, base_model: str, base_sha256: str, lora_config: dict[str, Any], adapter_sha256: str
) -> dict[str, Any]:
    """Return the record of a checkpoint without optimizer state."""
    return {
        "format": _FORMAT,
        "base_model": base_model,
        "base_sha256": base_sha256,
        "lora_config": lora_config,
        "adapter_sha256": adapter_sha256,
        "optimizer": None,
    }


def read_record(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint says about itself.

    Raises:
        InputError: if the folder holds no complete checkpoint.
    """
    path = folder / RECORD_FILE
    if not path.is_file():
        raise InputError(str(path), "no file", "the record of a complete checkpoint")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def load_checkpoint(
    folder: Path, *, base: BaseModel, with_optimizer: bool
) -> tuple[Adapter, AdamW]:
    """Read a checkpoint and compare its digests.

    Args:
        folder: where `save_checkpoint` wrote it.
        base: the model it must belong to.
        with_optimizer: read the optimizer's state; otherwise the optimizer is a fresh one.

    Raises:
        InputError: if it is incomplete, belongs to another base model, has no optimizer state
            though asked for, or its bytes are not those that were written.
    """
    record = read_record(folder)
    if record["base_sha256"] != base.sha256:
        raise InputError("base_sha256", record["base_sha256"], base.sha256, where=str(folder))
    adapter = Adapter(base.shape, LoraConfig(**record["lora_config"]))
    _fill(adapter, _tensors(folder / ADAPTER_FILE), folder)
    _expect("adapter_sha256", adapter.sha256(), record["adapter_sha256"], folder)
    optimizer = AdamW(len(adapter.flat))
    if with_optimizer:
        state = record["optimizer"]
        if state is None:
            expected = "a checkpoint with optimizer state"
            raise InputError("optimizer", None, expected, where=str(folder))
        moments = load_file(folder / _OPTIMIZER)
        optimizer.first, optimizer.second = moments["first"], moments["second"]
        optimizer.steps = state["steps"]
        last = state["last_config"]
        optimizer.last_config = None if last is None else AdamWConfig(**last)
        _expect("optimizer.sha256", optimizer.sha256(), state["sha256"], folder)
    return adapter, optimizer


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise InputError(path.name, str(error), "a safetensors file", where=str(path)) from error


def _fill(adapter: Adapter, parameters: dict[str, Tensor], folder: Path) -> None:
    if parameters.keys() != adapter.parameters.keys():
        raise InputError(
            ADAPTER_FILE, sorted(parameters), "the parameters of its lora_config", where=str(folder)
        )
    for name, value in parameters.items():
        expected = list(adapter.parameters[name].shape)
        if list(value.shape) != expected:
            raise InputError(name, list(value.shape), f"shape {expected}", where=str(folder))
        adapter.parameters[name].copy_(value)


def _expect(field: str, found: str, expected: str, folder: Path) -> None:
    if found != expected:
        raise InputError(field, found, f"{expected}, as written", where=str(folder))


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        save_file(tensors, str(path))
    _sync(path)


def _sync(path: Path) -> None:
    """Make a file's or folder's content survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
