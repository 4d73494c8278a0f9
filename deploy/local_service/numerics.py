"""The numeric core behind the service: torch models in the form that `live` asks for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

from deploy.local_service import requests
from deploy.local_service.base_model import DTYPES, BaseModel
from deploy.local_service.kv_cache import PrefixCache
from deploy.local_service.live import BaseFacts, LiveModel, SampleTask
from deploy.local_service.model_files import read_model_files
from deploy.local_service.model_store import resolve
from deploy.local_service.sample_bridge import core_request
from deploy.local_service.sampler_weights import SamplerWeights
from deploy.local_service.sampling import generate
from deploy.local_service.settings import ServiceSettings
from evidence.errors import InputError


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

    def load_base(self, name: str) -> BaseFacts:
        """Load a base model, or return the facts of a loaded one.

        Raises:
            InputError: if it can be had from no source.
        """
        with self._loading:
            if name not in self._bases:
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
                )
                self._bases[name] = (base, facts)
            return self._bases[name][1]

    def _base(self, name: str) -> BaseModel:
        if name not in self._bases:
            raise InputError("base_model", name, "a model that was loaded")
        return self._bases[name][0]

    def create(self, base_model: str, config: requests.LoraConfig) -> LiveModel:
        """Make a fresh adapter over a loaded base."""
        raise NotImplementedError

    def load(self, base_model: str, folder: Path, *, with_optimizer: bool) -> LiveModel:
        """Make an adapter, and its optimizer if asked, from a checkpoint's folder."""
        raise NotImplementedError

    def sampling_weights(self, base_model: str, folder: Path | None) -> SamplerWeights:
        """Return a base model's weights, or those with a checkpoint's adapter merged."""
        base = self._base(base_model)
        if folder is None:
            return SamplerWeights.of_base(base)
        raise NotImplementedError

    def generate(
        self,
        weights: SamplerWeights,
        tasks: list[SampleTask],
        admit: Callable[[], list[SampleTask]],
    ) -> None:
        """Sample all tasks, and those that `admit` adds between two tokens."""
        generate(
            weights,
            [core_request(task) for task in tasks],
            admit=lambda: [core_request(task) for task in admit()],
            cache=self._prefixes,
            max_rows=self._settings.max_rows,
        )

    def versions(self) -> dict[str, str]:
        """Name the libraries that computing depends on, and the threads they use."""
        return {
            "torch": torch.__version__,
            "tinker": version("tinker"),
            "torch_threads": str(torch.get_num_threads()),
            "cpu": torch.backends.cpu.get_cpu_capability(),
        }
