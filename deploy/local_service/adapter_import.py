"""Take in an adapter that was trained elsewhere, as a checkpoint of weights without an optimizer.

The adapter comes with the digest of the base model that it was trained on and with its own. Both
are compared before anything is kept: an adapter on other weights would change what it adds to.
"""

from __future__ import annotations

import base64
import binascii
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import Field

from deploy.local_service.byte_tokenizer import write_json
from deploy.local_service.checkpoint import ADAPTER_FILE, RECORD_FILE, checkpoint_record
from deploy.local_service.checkpoint_store import TRAINING, CheckpointContent, CheckpointPath
from deploy.local_service.errors import invalid_request
from deploy.local_service.live import BaseFacts, LiveModel
from deploy.local_service.requests import LoraConfig, WireModel
from deploy.local_service.service import Service
from evidence.errors import InputError

NAME = "imported"
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class AdapterLora(LoraConfig):
    """Shape of an adapter that has been trained."""

    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)


class ImportAdapter(WireModel):
    """POST local/adapters."""

    base_model: str
    base_sha256: _Sha256
    """Digest of the base model that the adapter was trained on."""
    lora_config: AdapterLora
    adapter_sha256: _Sha256
    """Digest of the adapter as `Adapter.sha256` computes it, in float32."""
    safetensors: str
    """The tensors in base64: float32 or bfloat16, named as in a checkpoint."""


def import_adapter(service: Service, request: ImportAdapter, base: BaseFacts) -> str:
    """Check an adapter and keep it; on the engine's thread.

    The same adapter again gives the same address.

    Args:
        service: the service.
        request: the adapter.
        base: the loaded base model of that name.

    Returns:
        The checkpoint's address; it holds weights and no optimizer.

    Raises:
        ApiError: 400 naming the field if the base model is another one, the tensors cannot be read
            or are not those of the digest.
    """
    if request.base_sha256 != base.base_sha256:
        raise invalid_request(
            f"base_sha256 {request.base_sha256[:16]}: the adapter belongs to other weights, those "
            f"of {base.name} that are served are {base.base_sha256[:16]}"
        )
    path = CheckpointPath(f"adapter-{request.adapter_sha256[:32]}", TRAINING, NAME)
    checkpoints = service.context.checkpoints
    if checkpoints.find(path) is None:
        model = _read(service, request)
        content = CheckpointContent(
            base_model=base.name,
            base_sha256=base.base_sha256,
            lora=model.lora,
            with_optimizer=False,
            optimizer_steps=0,
            adapter_sha256=model.adapter_sha256(),
            optimizer_sha256=None,
            optimizer={"type": "adamw", "fixed": {}, "last_step": None},
            restored_from=None,
        )
        checkpoints.save(path, content, lambda folder: model.save(folder, with_optimizer=False))
    return path.uri


def _read(service: Service, request: ImportAdapter) -> LiveModel:
    """Read the adapter through the checks that every checkpoint goes through."""
    try:
        tensors = base64.b64decode(request.safetensors, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid_request(f"safetensors: {error}, expected base64") from error
    folder = Path(tempfile.mkdtemp(dir=service.settings.store, prefix=".import-"))
    try:
        (folder / ADAPTER_FILE).write_bytes(tensors)
        record = checkpoint_record(
            base_model=request.base_model,
            base_sha256=request.base_sha256,
            lora_config=request.lora_config.model_dump(),
            adapter_sha256=request.adapter_sha256,
        )
        write_json(folder / RECORD_FILE, record)
        return service.numerics.load(request.base_model, folder, with_optimizer=False)
    except InputError as error:
        raise invalid_request(f"{error.field}: {error.value}, expected {error.expected}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
