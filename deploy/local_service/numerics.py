"""The numeric core behind the service: torch models in the form that `live` asks for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from deploy.local_service import requests
from deploy.local_service.adapter import LoraConfig
from deploy.local_service.base_model import DTYPES, BaseModel
from deploy.local_service.checkpoint import load_checkpoint
from deploy.local_service.decoding import DecodeBatch
from deploy.local_service.kv_cache import DecodeMemory, PrefixCache
from deploy.local_service.live import BaseFacts, SampleTask
from deploy.local_service.model_files import read_model_files
from deploy.local_service.model_store import resolve
from deploy.local_service.optimizer import AdamWConfig
from deploy.local_service.repeatability import find_differences
from deploy.local_service.sample_bridge import core_request
from deploy.local_service.sampler_weights import SamplerWeights
from deploy.local_service.settings import ServiceSettings
from deploy.local_service.training import TrainableModel, TrainingDatum
from deploy.local_service.wire import Array, WireDatum
from evidence.errors import InputError

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)

_MERGED_TRAINERS = 2
"""Live models whose merged weights are kept: each is a copy as large as the base model."""


def _differences(name: str, base: BaseModel) -> tuple[str, ...]:
    """Measure what repeatable results rest on, and warn where it does not hold on this machine."""
    found = tuple(find_differences(base))
    for what in found:
        logger.warning("%s: results may not repeat bit for bit on this machine: %s", name, what)
    return found


def _in_passing_thread(work: Callable[[], ResultT]) -> ResultT:
    """Compute in a thread that ends with it, and with it the worker threads that torch gave it.

    OpenMP keeps workers for every thread that ever computed. As soon as there are more of them
    than processors, it lets all of them sleep between two operations instead of spinning, and
    every token of the engine's thread takes half as long again.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(work).result()


class Trainable(TrainableModel):
    """A trainable model that can give its merged weights back."""

    def forget_weights(self) -> None:
        """Drop the merged copy; it is made anew when it is needed."""
        self._weights = None


class MergedModels:
    """The live models that used their merged weights last; others give theirs back."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._models: list[Trainable] = []

    def touch(self, model: Trainable) -> None:
        """Note that a model is about to use its merged weights."""
        self._models = [other for other in self._models if other is not model] + [model]
        while len(self._models) > self._limit:
            self._models.pop(0).forget_weights()


class TorchModel:
    """One adapter in training, in the form that `live` asks for."""

    def __init__(self, model: Trainable, merged: MergedModels) -> None:
        self._model = model
        self._merged = merged

    @property
    def lora(self) -> dict[str, Any]:
        """Shape and seed of the adapter."""
        return asdict(self._model.lora_config)

    @property
    def optimizer_steps(self) -> int:
        """Steps in the optimizer's state."""
        return self._model.optimizer.steps

    def forward_backward(
        self,
        data_D: Sequence[WireDatum],
        *,
        loss_fn: str,
        config: Mapping[str, Any],
        backward: bool,
    ) -> tuple[list[Array], dict[str, float]]:
        """Return per-datum log-probabilities and the metrics; add to the gradient if asked."""
        data = [
            TrainingDatum(
                datum.tokens,
                {name: torch.from_numpy(value) for name, value in datum.inputs.items()},
            )
            for datum in data_D
        ]
        self._merged.touch(self._model)
        run = self._model.forward_backward if backward else self._model.forward
        logprobs_D, metrics = run(data, loss_fn, config)
        return [logprobs.numpy() for logprobs in logprobs_D], metrics

    def optim_step(self, params: requests.AdamParams) -> dict[str, float]:
        """Take one AdamW step and clear the gradient; return its metrics."""
        return self._model.optim_step(AdamWConfig(**params.model_dump()))

    def discard_gradient(self) -> None:
        """Clear the gradient without a step."""
        self._model.discard_gradient()

    def adapter_sha256(self) -> str:
        """Digest of the adapter's tensors."""
        return self._model.adapter_sha256()

    def optimizer_sha256(self) -> str:
        """Digest of the optimizer's moments and step count."""
        return self._model.optimizer_state().sha256

    def save(self, folder: Path, *, with_optimizer: bool) -> None:
        """Write the adapter, and the optimizer's state if asked, into an existing folder."""
        self._model.save(folder, with_optimizer=with_optimizer)

    def sampling_weights(self) -> SamplerWeights:
        """Return the weights as they are now; they do not move with training."""
        self._merged.touch(self._model)
        return self._model.weights


class TorchSampling:
    """A batch of sampling requests, in the form that `live` asks for."""

    def __init__(self, batch: DecodeBatch) -> None:
        self._batch = batch

    def add(self, tasks: Sequence[SampleTask]) -> None:
        """Take requests on; each one's `finish` is called as soon as it is done."""
        self._batch.add([core_request(task) for task in tasks])

    def step(self) -> bool:
        """Add one token to each sequence; say whether anything is left to do."""
        if not self._batch.idle:
            self._batch.step()
        return not self._batch.idle


class TorchNumerics:
    """Base models on the CPU, and everything made from them."""

    def __init__(self, settings: ServiceSettings) -> None:
        """Set torch's threads for the whole process.

        Args:
            settings: dtype, threads, cache folder and batch size.
        """
        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._dtype = DTYPES[settings.dtype]
        self._bases: dict[str, tuple[BaseModel, BaseFacts]] = {}
        self._loading = threading.Lock()
        self._prefixes = PrefixCache()
        self._decode_memory = DecodeMemory()
        self._merged = MergedModels(limit=_MERGED_TRAINERS)

    def load_base(self, name: str) -> BaseFacts:
        """Load a base model, or return the facts of a loaded one.

        Raises:
            InputError: if it can be had from no source.
        """
        with self._loading:
            if name not in self._bases:
                self._bases[name] = _in_passing_thread(lambda: self._load(name))
            return self._bases[name][1]

    def _load(self, name: str) -> tuple[BaseModel, BaseFacts]:
        files = resolve(name, cache_dir=self._settings.cache_dir)
        base = BaseModel.load(files.folder, dtype=self._dtype)
        facts = BaseFacts(
            name=name,
            base_sha256=base.sha256,
            source=read_model_files(files.folder, verify=False).source,
            tokenizer_id=str(files.folder),
            architecture="llama",
            dtype=self._settings.dtype,
            vocab_size=base.vocab_size,
            context_length=base.max_positions,
            not_repeatable=_differences(name, base),
        )
        return base, facts

    def _base(self, name: str) -> BaseModel:
        if name not in self._bases:
            raise InputError("base_model", name, "a model that was loaded")
        return self._bases[name][0]

    def create(self, base_model: str, config: requests.LoraConfig) -> TorchModel:
        """Make a fresh adapter over a loaded base."""
        lora = LoraConfig(
            rank=config.rank,
            seed=config.seed,
            train_attn=config.train_attn,
            train_mlp=config.train_mlp,
            train_unembed=config.train_unembed,
        )
        return TorchModel(Trainable(self._base(base_model), lora), self._merged)

    def load(self, base_model: str, folder: Path, *, with_optimizer: bool) -> TorchModel:
        """Make an adapter, and its optimizer if asked, from a checkpoint's folder.

        Raises:
            InputError: if the files are not those that were written.
        """
        base = self._base(base_model)
        model = Trainable.from_checkpoint(base, folder, with_optimizer=with_optimizer)
        return TorchModel(cast(Trainable, model), self._merged)

    def sampling_weights(self, base_model: str, folder: Path | None) -> SamplerWeights:
        """Return a base model's weights, or those with a checkpoint's adapter merged."""
        base = self._base(base_model)
        if folder is None:
            return SamplerWeights.of_base(base)
        if not folder.is_dir():
            raise FileNotFoundError(folder)
        adapter, _ = load_checkpoint(folder, base=base, with_optimizer=False)
        return SamplerWeights.adapted(base, adapter)

    def sampling(self, weights: SamplerWeights) -> TorchSampling:
        """Return an empty batch; all batches share the prefix cache and the memory for decoding."""
        batch = DecodeBatch(
            weights,
            cache=self._prefixes,
            memory=self._decode_memory,
            max_rows=self._settings.max_rows,
        )
        return TorchSampling(batch)

    def versions(self) -> dict[str, str]:
        """Name the libraries that computing depends on, and the threads they use."""
        return {
            "torch": torch.__version__,
            "tinker": version("tinker"),
            "torch_threads": str(torch.get_num_threads()),
            "cpu": torch.backends.cpu.get_cpu_capability(),
        }
