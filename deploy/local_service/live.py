"""Live training models, and what the service needs from the numeric core.

The protocols are all that the rest of the service knows about computing; `numerics` fulfils them
with torch. They keep the HTTP layer testable without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from deploy.local_service.requests import AdamParams, LoraConfig, Sample
from deploy.local_service.runs import RunRecord
from deploy.local_service.wire import Array, SampleResult, WireDatum


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """What is known about a loaded base model."""

    name: str
    base_sha256: str
    """Digest over the files and where they came from; 64 hexadecimal digits."""
    source: str
    """Where the files came from, in words."""
    tokenizer_id: str
    """Folder of the tokenizer's files."""
    architecture: str
    dtype: str
    vocab_size: int
    context_length: int
    """Tokens of prompt and completion together."""
    not_repeatable: tuple[str, ...] = ()
    """What was found at loading to depend on what else is computed, in words; empty is as it should
    be."""


class LiveModel(Protocol):
    """One adapter with its gradients and its optimizer. Used on the engine's thread alone."""

    @property
    def lora(self) -> dict[str, Any]:
        """Shape and seed of the adapter: rank, alpha, seed, train_attn, train_mlp, train_unembed."""

    @property
    def optimizer_steps(self) -> int:
        """Steps in the optimizer's state."""

    def forward_backward(
        self,
        data_D: Sequence[WireDatum],
        *,
        loss_fn: str,
        config: Mapping[str, Any],
        backward: bool,
    ) -> tuple[list[Array], dict[str, float]]:
        """Return per-datum log-probabilities and the metrics; add to the gradient if asked."""

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Take one AdamW step and clear the gradient; return its metrics."""

    def discard_gradient(self) -> None:
        """Clear the gradient without a step."""

    def adapter_sha256(self) -> str:
        """Digest of the adapter's tensors."""

    def optimizer_sha256(self) -> str:
        """Digest of the optimizer's moments and step count."""

    def save(self, folder: Path, *, with_optimizer: bool) -> None:
        """Write the adapter, and the optimizer's state if asked, into an existing folder."""

    def sampling_weights(self) -> Any:
        """Return the weights as they are now, to sample from; they do not move with training."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleTask:
    """One sampling request for the core."""

    request: Sample
    prompt: tuple[int, ...]
    targets: Array | None
    """[P - 1, K] int64 target ids of the prompt, -1 for none."""
    finish: Callable[[SampleResult], None]
    cancelled: Callable[[], bool]


class Sampling(Protocol):
    """Sampling requests on one set of weights, computed together token by token."""

    def add(self, tasks: Sequence[SampleTask]) -> None:
        """Take requests on; each one's `finish` is called as soon as it is done."""

    def step(self) -> bool:
        """Add one token to each sequence; say whether anything is left to do."""


class Numerics(Protocol):
    """The numeric core."""

    def load_base(self, name: str) -> BaseFacts:
        """Load a base model, or return the facts of a loaded one. Slow the first time.

        Raises:
            InputError: if it can be had from no source.
        """

    def create(self, base_model: str, config: LoraConfig) -> LiveModel:
        """Make a fresh adapter over a loaded base."""

    def load(self, base_model: str, folder: Path, *, with_optimizer: bool) -> LiveModel:
        """Make an adapter, and its optimizer if asked, from a checkpoint's folder."""

    def sampling_weights(self, base_model: str, folder: Path | None) -> Any:
        """Return weights to sample from: a base, or one with a checkpoint's adapter merged."""

    def sampling(self, weights: Any) -> Sampling:
        """Return an empty batch of sampling requests on these weights."""

    def versions(self) -> dict[str, str]:
        """Name the libraries that computing depends on, with their versions and threads."""


@dataclass(slots=True)
class ModelEntry:
    """One live training run."""

    record: RunRecord
    fixed: dict[str, float]
    """Optimizer hyperparameters that the client fixed when it made the model."""
    model: LiveModel | None = None
    """None until the creation that is queued for it has run."""
    last_seq_id: int = 0
    """Highest accepted request number; creation is number 0."""
    last_request_at: str = ""
    last_step: dict[str, float] | None = None
    """Hyperparameters of the last optimizer step."""
    restored_from: str | None = None
    restored_optimizer: bool = False
    restores: int = 0
    """Checkpoints loaded into this model."""
    broken_gradient: str | None = None
    """Why the gradient at hand is incomplete; the next step is refused then."""
    published: list[str] = field(default_factory=list)
    """Folders of the samplers published without a checkpoint, oldest first."""

    @property
    def model_id(self) -> str:
        """The run's id."""
        return self.record.model_id

    def live(self) -> LiveModel:
        """Return the model.

        Raises:
            RuntimeError: if it was never created (an operation ran after a failed creation).
        """
        if self.model is None:
            raise RuntimeError(f"model {self.model_id}: was not created")
        return self.model

    def optimizer_report(self) -> dict[str, Any]:
        """Return family, full configuration and step count of the optimizer.

        A hyperparameter is that of the last step, or before any step the one the client fixed, or
        None: nothing is in force then.
        """
        in_force = self.fixed | (self.last_step or {})
        return {
            "type": "adamw",
            **{name: in_force.get(name) for name in AdamParams.model_fields},
            "steps": None if self.model is None else self.model.optimizer_steps,
            "fixed": sorted(self.fixed),
        }
