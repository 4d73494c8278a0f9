"""Run directories as a diagnostic leaves them, made from arrays: no service, no training.

Everything is consistent by construction; a planted cause changes what was measured, and the rest
follows from it as it would have in a real run.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evidence.execution import ExecutionFile
from evidence.run import Run
from evidence.spec import Spec
from losses.diagnostics import minibatch_diagnostics
from losses.inputs import LossInputs
from losses.objective import batch_loss
from losses.registry import make_loss
from tasks.arms import arm_plans
from tasks.diagnostics import diagnostic_settings, update_columns
from tasks.frozen_batch import freeze
from tests.flows import tiny_spec

ARM, PHASE = "dppo", "diagnostic"
PROMPT = 3
DPPO = tiny_spec.DPPO | {"delta_low": 0.15, "delta_high": 0.15}


@dataclass
class Plant:
    """What a recorded diagnostic is made of; the defaults are a sound, inactive one."""

    groups: int = 8
    group_size: int = 4
    minibatches: int = 8
    epochs: int = 2
    tokens: int = 12
    seed: int = 0
    loss: dict[str, Any] = field(default_factory=lambda: dict(DPPO))
    applied_loss: dict[str, Any] | None = None
    """What decided in truth, where that is not the registered loss."""
    learning_rate: float = 1e-4
    temperature: float = 1.0
    drift_nats: float = 0.1
    """Standard deviation of what 16 updates do to a log-probability."""
    equal_rewards: bool = False
    truncated: bool = False
    trainer_shift: int = 0
    sampler_nats: float = 0.0
    """Standard deviation of what other weights do to the sampler's values."""
    tempered: bool = False
    bfloat16: bool = False
    updates: int = 16
    rescored: bool = True
    anchor_nats: float | None = None
    """How far the recomputed log-probabilities lie above the sampler's; None for no such file."""
    planned: int | None = 16
    """Updates that the diagnostic was to make; None for a run that is no diagnostic."""
    other_loss: dict[str, Any] | None = None
    """Loss of the other arm, which is then the treatment."""


@dataclass
class Batch:
    """One batch: per sequence its length, reward, and per token its base log-probability."""

    lengths: NDArray[np.int64]
    rewards: NDArray[np.float64]
    base: list[NDArray[np.float64]]
    direction: list[NDArray[np.float64]]


def make_batch(plant: Plant) -> Batch:
    random = np.random.Generator(np.random.PCG64(plant.seed))
    count = plant.groups * plant.group_size
    rewards = random.integers(0, 2, count).astype(np.float64)
    rewards[:: plant.group_size] = 0.0
    rewards[1 :: plant.group_size] = 1.0
    if plant.equal_rewards or plant.truncated:
        rewards[:] = 0.0
    shape = (count, plant.tokens)
    return Batch(
        lengths=np.full(count, plant.tokens),
        rewards=rewards,
        base=list(np.log(random.uniform(0.05, 0.95, shape))),
        direction=list(random.standard_normal(shape)),
    )


def rounded(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Values that bfloat16 can hold."""
    narrow = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16).to(torch.float32)
    return narrow.numpy()


def returned(plant: Plant, batch: Batch) -> list[NDArray[np.float32]]:
    """What the sampler returned with each sequence."""
    random = np.random.Generator(np.random.PCG64(plant.seed + 1))
    found = []
    for base in batch.base:
        values = base + plant.sampler_nats * random.standard_normal(base.shape)
        if plant.tempered:
            values = base / plant.temperature - 0.2 + 0.01 * random.standard_normal(base.shape)
        values = np.minimum(values, 0.0)
        found.append(rounded(values) if plant.bfloat16 else values.astype(np.float32))
    return found


def trainer(plant: Plant, batch: Batch, updates: int) -> list[NDArray[np.float32]]:
    """What the trainer scores after some updates."""
    share = plant.drift_nats * updates / 16.0
    if plant.learning_rate == 0 or plant.equal_rewards or plant.truncated:
        share = 0.0
    found = []
    for base, direction in zip(batch.base, batch.direction, strict=True):
        values = np.minimum(base + share * direction, 0.0)
        found.append(np.roll(values, plant.trainer_shift).astype(np.float32))
    return found


def write_run(
    folder: Path, plant: Plant, batch: Batch | None = None, *, freezing: bool = True
) -> Run:
    """Write the run directory of a diagnostic with a planted cause."""
    batch = batch or make_batch(plant)
    run, _, settings = create(folder, plant)
    sampled = returned(plant, batch)
    write_batch(run, plant, batch, sampled)
    if plant.anchor_nats is not None:
        write_recomputed(run, plant, sampled)
    if freezing:
        freeze(run, arm=ARM, phase=PHASE, facts={})
    loss = make_loss(plant.applied_loss or plant.loss)
    for update in range(plant.updates):
        write_update(run, plant, batch, sampled, update, loss=loss, settings=settings)
    if plant.updates == 16:
        write_sentinels(run, plant, batch, sampled)
    return run


def create(folder: Path, plant: Plant) -> tuple[Run, ExecutionFile, Any]:
    document = tiny_spec.spec()
    if plant.planned is not None:
        document["diagnostic"] = {"max_updates": plant.planned}
    raw = tiny_spec.execution(document)
    raw["arms"][ARM]["loss"] = plant.loss
    if plant.other_loss is not None:
        raw["arms"]["grpo"] |= {"loss": plant.other_loss, "role": "treatment"}
        raw["arms"][ARM]["role"] = "baseline"
    raw["rollout"] |= {
        "groups": plant.groups,
        "group_size": plant.group_size,
        "minibatches": plant.minibatches,
        "epochs": plant.epochs,
        "temperature": plant.temperature,
    }
    raw["optimizer"]["learning_rate"] = plant.learning_rate
    run = Run.create(str(folder), run_id="recorded", spec=document, execution=raw)
    execution = ExecutionFile.parse(raw)
    return run, execution, diagnostic_settings(arm_plans(Spec.parse(document), execution))


def advantages(plant: Plant, batch: Batch) -> NDArray[np.float64]:
    by_group = batch.rewards.reshape(-1, plant.group_size)
    return (by_group - by_group.mean(axis=1, keepdims=True)).ravel()


def write_batch(run: Run, plant: Plant, batch: Batch, sampled: list[NDArray[np.float32]]) -> None:
    scores = advantages(plant, batch)
    rows = [
        {
            "group": index // plant.group_size,
            "sample": index % plant.group_size,
            "item_id": f"item-{index // plant.group_size}",
            "policy_version": 0,
            "seed": index,
            "prompt_tokens": PROMPT,
            "completion_tokens": int(length),
            "turns": 1,
            "stop_reason": "length" if plant.truncated else "stop",
            "truncated": plant.truncated,
            "reward": float(batch.rewards[index]),
            "parse_failures": 0,
            "tool_calls": 0,
            "tool_errors": 0,
            "advantage": float(scores[index]),
            "completion_text": "",
            "prompt_sha256": "0" * 64,
        }
        for index, length in enumerate(batch.lengths)
    ]
    run.write_table("rollouts", rows, key=(ARM, PHASE, 0))
    columns: dict[str, list[Any]] = {}
    for index, length in enumerate(batch.lengths.tolist()):
        total = PROMPT + length
        mask = np.arange(total) >= PROMPT
        for name, values in {
            "group": np.full(total, index // plant.group_size),
            "sample": np.full(total, index % plant.group_size),
            "position": np.arange(total),
            "turn": np.zeros(total, dtype=np.int64),
            "token_id": np.arange(total) % 50,
            "loss_mask": mask,
            "sampling_logprob": np.ma.masked_array(
                np.r_[np.zeros(PROMPT, np.float32), sampled[index]], ~mask
            ),
            "advantage": np.ma.masked_array(
                np.where(mask, np.float32(scores[index]), np.float32(0)), ~mask
            ),
        }.items():
            columns.setdefault(name, []).append(values)
    joined = {name: np.ma.concatenate(parts) for name, parts in columns.items()}
    plain = {
        name: values if name in ("sampling_logprob", "advantage") else np.asarray(values)
        for name, values in joined.items()
    }
    run.write_table("tokens", plain, key=(ARM, PHASE, 0))


def recomputed(plant: Plant, sampled: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the trainer scored before the first update."""
    return np.minimum(sampled + np.float32(plant.anchor_nats or 0.0), np.float32(0.0))


def write_recomputed(run: Run, plant: Plant, sampled: list[NDArray[np.float32]]) -> None:
    """One score for each target: those of the prompt mean nothing here."""
    prompt = np.full(PROMPT - 1, -7.0, dtype=np.float32)
    scores = np.concatenate([part for one in sampled for part in (prompt, recomputed(plant, one))])
    sink = io.BytesIO()
    np.save(sink, scores, allow_pickle=False)
    run.write_bytes(f"recomputed/{ARM}/{PHASE}/000000.npy", sink.getvalue())


def write_update(
    run: Run,
    plant: Plant,
    batch: Batch,
    sampled: list[NDArray[np.float32]],
    update: int,
    *,
    loss: Any,
    settings: Any,
) -> None:
    epoch, index = divmod(update, plant.minibatches)
    size = plant.groups // plant.minibatches * plant.group_size
    chosen = range(index * size, (index + 1) * size)
    scores, scored = advantages(plant, batch), trainer(plant, batch, update)
    targets = [torch.from_numpy(scored[one].copy()) for one in chosen]
    inputs = [
        LossInputs(
            sampling_logprobs_T=torch.from_numpy(sampled[one].astype(np.float64)),
            advantages_T=torch.full(
                (int(batch.lengths[one]),), float(np.float32(scores[one])), dtype=torch.float64
            ),
            loss_mask_T=torch.ones(int(batch.lengths[one]), dtype=torch.bool),
            anchor_logprobs_T=None
            if plant.anchor_nats is None
            else torch.from_numpy(recomputed(plant, sampled[one]).astype(np.float64)),
        )
        for one in chosen
    ]
    found = batch_loss(loss, targets, inputs, denominator=1.0)
    columns: dict[str, list[Any]] = {}
    for one, output in zip(chosen, found.outputs_D, strict=True):
        length = int(batch.lengths[one])
        keep = output.keep_T.numpy()
        for name, values in {
            "group": np.full(length, one // plant.group_size),
            "sample": np.full(length, one % plant.group_size),
            "position": np.arange(length) + PROMPT,
            "token_id": (np.arange(length) + PROMPT) % 50,
            "target_logprob": scored[one],
            "sampling_logprob": sampled[one],
            "advantage": np.full(length, np.float32(scores[one])),
            "prob_ratio": output.prob_ratio_T.numpy().astype(np.float64),
            "keep": keep,
            "removed": ~keep & (scores[one] != 0),
        }.items():
            columns.setdefault(name, []).append(values)
    key = (ARM, PHASE, update)
    run.write_table("update_tokens", {k: np.concatenate(v) for k, v in columns.items()}, key=key)
    record = minibatch_diagnostics(targets, inputs, found.outputs_D, settings=settings)
    row = {
        "step": 0,
        "epoch": epoch,
        "minibatch": index,
        "policy_version_before": update,
        "datums": len(targets),
        "loss": float(found.loss),
        "denominator": 1.0,
        "learning_rate": plant.learning_rate,
        "logprob_dtype": "float32",
        **update_columns(record),
    }
    run.write_table("updates", [row], key=key)


def write_sentinels(
    run: Run, plant: Plant, batch: Batch, sampled: list[NDArray[np.float32]]
) -> None:
    """The first sample of every group, after 0, 1, 2, 4, 8 and 16 updates."""
    chosen = range(0, len(batch.lengths), plant.group_size)
    for done in (0, 1, 2, 4, 8, 16):
        scored = trainer(plant, batch, done)
        rows = [
            {
                "group": one // plant.group_size,
                "sample": 0,
                "position": PROMPT + place,
                "token_id": (PROMPT + place) % 50,
                "trainer_logprob": float(scored[one][place]),
                "sampling_logprob": float(sampled[one][place]),
                "rescored_logprob": float(again[place]) if done == 0 and plant.rescored else None,
            }
            for one in chosen
            for again in (_again(plant, batch, sampled, one),)
            for place in range(int(batch.lengths[one]))
        ]
        run.write_table("sentinels", rows, key=(ARM, PHASE, done))


def _again(
    plant: Plant, batch: Batch, sampled: list[NDArray[np.float32]], one: int
) -> NDArray[np.float32]:
    """What the sampler says when asked again: its own weights', never tempered or shifted."""
    return sampled[one] if plant.sampler_nats else batch.base[one].astype(np.float32)
