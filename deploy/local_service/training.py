"""One adapter in training: forward, forward and backward, optimizer steps, checkpoints.

Log-probabilities come from the same products and attention as in sampling, with the adapter merged
in the same way: for equal weights they have the same bits as a sampler's. Every datum's
log-probabilities depend on the datum and the weights alone; the gradient, a sum over data, depends
on the whole request, and equal requests give equal bits at one number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deploy.local_service.adapter import Adapter, LoraConfig
from deploy.local_service.adapter_gradient import AdapterGradient
from deploy.local_service.base_model import BaseModel
from deploy.local_service.builtin_losses import BuiltinLoss, find_loss, settings
from deploy.local_service.checkpoint import load_checkpoint, save_checkpoint
from deploy.local_service.kernels import ROW_QUANTUM
from deploy.local_service.loss_head import LossHead, Targets
from deploy.local_service.optimizer import AdamW, AdamWConfig
from deploy.local_service.packing import Group, PackedSequence, pack, row_batches
from deploy.local_service.sampler_weights import SamplerWeights
from deploy.local_service.transformer import PackedAttention, hidden_rows, multiply_frozen
from evidence.errors import InputError

TRAIN_ROWS = 1024
"""Tokens computed at once with a gradient, about 1.7 MB of activations each.

A single sequence with more has its layers computed twice, so that memory stays bounded.
"""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingDatum:
    """One sequence and what the loss needs for it."""

    tokens: Sequence[int]
    inputs: Mapping[str, Tensor]
    """``target_tokens`` [T] or [T, K] int64 for T tokens; other entries of the same shape."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What the optimizer is and where it stands."""

    type: str
    steps: int
    last_config: AdamWConfig | None
    """Settings of the last step; None before any step."""
    sha256: str


class TrainableModel:
    """A base model with one adapter, the adapter's gradient and its optimizer."""

    def __init__(self, base: BaseModel, lora_config: LoraConfig) -> None:
        """Make a fresh adapter, which changes nothing yet."""
        self.base = base
        self.adapter = Adapter(base.shape, lora_config)
        self.optimizer = AdamW(len(self.adapter.flat))
        self._weights: SamplerWeights | None = None

    @property
    def lora_config(self) -> LoraConfig:
        """Shape and seed of the adapter; the seed is never None here."""
        return self.adapter.config

    @property
    def weights(self) -> SamplerWeights:
        """The weights as they are now; the object stays valid when training goes on."""
        if self._weights is None:
            with torch.no_grad():
                self._weights = SamplerWeights.adapted(self.base, self.adapter)
        return self._weights

    def forget_weights(self) -> None:
        """Give the memory of `weights` back; they are made anew when they are needed."""
        self._weights = None

    def forward(
        self,
        data: Sequence[TrainingDatum],
        loss_fn: str = "cross_entropy",
        config: Mapping[str, float] | None = None,
    ) -> tuple[list[Tensor], dict[str, float]]:
        """Return what `forward_backward` returns, and leave the gradient as it is."""
        return self._run(data, loss_fn, config, backward=False)

    def forward_backward(
        self,
        data: Sequence[TrainingDatum],
        loss_fn: str,
        config: Mapping[str, float] | None = None,
    ) -> tuple[list[Tensor], dict[str, float]]:
        """Add the gradient of a summed loss to the adapter's gradient.

        Args:
            data: the sequences.
            loss_fn: a name in `builtin_losses.LOSSES`.
            config: changed settings of the loss.

        Returns:
            Per datum the log-probability of every target token, in the shape of its
            ``target_tokens``, whatever the weights and advantages are; and the metrics, with
            ``loss:sum``.

        Raises:
            InputError: if the data or the loss are not valid, or a loss is not finite; the
                gradient has not changed then.
        """
        return self._run(data, loss_fn, config, backward=True)

    def _run(
        self,
        data: Sequence[TrainingDatum],
        loss_fn: str,
        config: Mapping[str, float] | None,
        *,
        backward: bool,
    ) -> tuple[list[Tensor], dict[str, float]]:
        loss = find_loss(loss_fn)
        chosen = settings(loss, config)
        inputs = [check_datum(d, loss, self.base, where=f"data[{n}]") for n, d in enumerate(data)]
        gradient = AdapterGradient(self.adapter) if backward else None
        head = LossHead(self.weights.head, loss=loss.function, config=chosen, gradient=gradient)
        logprobs: dict[int, Tensor] = {}
        total = 0.0
        sequences = [PackedSequence(datum.tokens) for datum in data]
        for groups in row_batches(sequences, max_rows=TRAIN_ROWS):
            members = [n for group in groups for n in group.members]
            picked = [inputs[n] for n in members]
            pieces, value = self._micro_batch(sequences, groups, picked, loss, head, gradient)
            logprobs.update(zip(members, pieces, strict=True))
            total += value
        if gradient is not None:
            gradient.complete()
        return [logprobs[n] for n in range(len(data))], {"loss:sum": total}

    def _micro_batch(
        self,
        sequences: Sequence[PackedSequence],
        groups: Sequence[Group],
        inputs: Sequence[Mapping[str, Tensor]],
        loss: BuiltinLoss,
        head: LossHead,
        gradient: AdapterGradient | None,
    ) -> tuple[list[Tensor], float]:
        """Compute some groups; return each member's log-probabilities and the summed loss."""
        packing = pack(sequences, groups=groups, heads_per_kv=self.base.shape.heads_per_kv)
        with torch.set_grad_enabled(gradient is not None):
            hidden = hidden_rows(
                self.weights,
                packing.tokens_N,
                packing.positions_N,
                attend=PackedAttention(packing),
                multiply=multiply_frozen if gradient is None else gradient.multiply,
                recompute=gradient is not None and len(packing.tokens_N) > TRAIN_ROWS + ROW_QUANTUM,
            )
        with torch.no_grad():
            targets = Targets.of(packing.rows_S, inputs, loss.inputs)
            result = head.run(hidden.detach(), targets)
        if result.hidden_gradient is not None:
            torch.autograd.backward(hidden, result.hidden_gradient)
        sizes = [datum["target_tokens"].numel() for datum in inputs]
        pieces = torch.split(result.logprobs_M, sizes)
        shaped = [p.view(d["target_tokens"].shape) for p, d in zip(pieces, inputs, strict=True)]
        return shaped, result.loss

    def optim_step(self, config: AdamWConfig) -> dict[str, float]:
        """Take one AdamW step with the gradient at hand, or with a zero one, and clear it.

        Raises:
            InputError: if the gradient is not finite; it is cleared, and nothing else changes.
        """
        try:
            metrics = self.optimizer.step(self.adapter.flat, self.adapter.gradient, config)
        finally:
            self.adapter.clear_gradient()
        self.forget_weights()
        return metrics | {"steps": float(self.optimizer.steps)}

    def discard_gradient(self) -> None:
        """Clear the gradient without a step."""
        self.adapter.clear_gradient()

    def adapter_sha256(self) -> str:
        """Return the digest of the adapter."""
        return self.adapter.sha256()

    def optimizer_state(self) -> OptimizerState:
        """Return family, step count, last settings and digest of the optimizer."""
        optimizer = self.optimizer
        return OptimizerState("adamw", optimizer.steps, optimizer.last_config, optimizer.sha256())

    def save(self, folder: Path, *, with_optimizer: bool) -> None:
        """Write a checkpoint into a folder (see `checkpoint.save_checkpoint`)."""
        save_checkpoint(
            folder,
            base=self.base,
            adapter=self.adapter,
            optimizer=self.optimizer if with_optimizer else None,
        )

    def load(self, folder: Path, *, with_optimizer: bool) -> None:
        """Take adapter, and optimizer state or a fresh optimizer, from a checkpoint.

        The gradient at hand is dropped. Nothing changes if the checkpoint cannot be used (see
        `checkpoint.load_checkpoint`).
        """
        self.adapter, self.optimizer = load_checkpoint(
            folder, base=self.base, with_optimizer=with_optimizer
        )
        self._weights = None

    @classmethod
    def from_checkpoint(
        cls, base: BaseModel, folder: Path, *, with_optimizer: bool
    ) -> TrainableModel:
        """Make a model from a checkpoint, its LoRA shape included."""
        model = cls.__new__(cls)
        model.base = base
        model.load(folder, with_optimizer=with_optimizer)
        return model


def check_datum(
    datum: TrainingDatum, loss: BuiltinLoss, base: BaseModel, *, where: str
) -> dict[str, Tensor]:
    """Return a datum's loss inputs, with weights of 1 where the loss wants some and has none.

    Raises:
        InputError: naming what is missing, of another shape, out of range or not finite.
    """
    count = len(datum.tokens)
    if not 1 <= count <= base.max_positions:
        raise InputError(f"{where}.model_input", count, f"1 to {base.max_positions} tokens")
    _check_tokens(torch.as_tensor(datum.tokens), base, where=f"{where}.model_input")
    targets = datum.inputs.get("target_tokens")
    if targets is None or targets.ndim not in (1, 2) or targets.shape[0] != count:
        found = None if targets is None else list(targets.shape)
        raise InputError(f"{where}.target_tokens", found, f"shape [{count}] or [{count}, K]")
    _check_tokens(targets, base, where=f"{where}.target_tokens")
    found_inputs = {"target_tokens": targets}
    for name in loss.inputs:
        value = datum.inputs.get(name)
        if value is None and name == "weights":
            value = torch.ones(targets.shape)
        if value is None or value.shape != targets.shape:
            found = None if value is None else list(value.shape)
            raise InputError(f"{where}.{name}", found, f"shape {list(targets.shape)}")
        if not bool(value.isfinite().all()):
            wrong = float(value[~value.isfinite()][0])
            raise InputError(f"{where}.{name}", wrong, "finite numbers")
        found_inputs[name] = value
    return found_inputs


def _check_tokens(tokens: Tensor, base: BaseModel, *, where: str) -> None:
    if tokens.dtype != torch.int64:
        raise InputError(where, str(tokens.dtype), "int64 tokens")
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < base.vocab_size:
        worst = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
        raise InputError(where, worst, f"tokens from 0 to {base.vocab_size - 1}")
