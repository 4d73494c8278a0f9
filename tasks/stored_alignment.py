"""Whether the files of a run agree with each other: hashes, alignment, advantages, versions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from evidence.errors import InputError
from losses.advantages import group_advantages
from losses.errors import LossConfigError, LossInputError
from tasks.frozen_batch import assert_frozen, frozen
from tasks.stored_rescoring import rescored_columns, rescoring_contradictions
from tasks.stored_updates import StoredArm, StoredUpdate

ADVANTAGE_TOLERANCE = 1e-5
Columns: TypeAlias = dict[str, NDArray[Any]]
_JOINED = ("group", "sample", "position", "token_id", "sampling_logprob", "advantage")


def contradictions_of(stored: StoredArm) -> list[str]:
    """Say what does not agree among the files of an arm; empty if everything does."""
    found = [*_hashes(stored), *_advantages(stored)]
    batches: dict[int, Columns] = {}
    for one in stored.updates:
        found += _alignment(stored, one, batches)
    return [*found, *_versions(stored)]


def _hashes(stored: StoredArm) -> Iterator[str]:
    record = frozen(stored.run)
    if record is None or (record["arm"], record["phase"]) != (stored.arm, stored.phase):
        return
    try:
        assert_frozen(stored.run)
    except InputError as error:
        yield f"{error.field} is {error.value}, frozen was another"


def _alignment(stored: StoredArm, one: StoredUpdate, batches: dict[int, Columns]) -> Iterator[str]:
    """Every loss token of an update is a masked token of its minibatch, and the other way round.

    Args:
        stored: the arm.
        one: the update.
        batches: batches that were read already, by rollout step; the step's is added.
    """
    step, index = int(one.row["step"]), int(one.row["minibatch"])
    key = (stored.arm, stored.phase, step)
    if not stored.run.has_table("tokens", key=key):
        yield f"update {one.update}: tokens of rollout step {step} are not there"
        return
    if step not in batches:
        batches[step] = _masked(stored, key)
    expected = _minibatch(stored, batches[step], index)
    for name in _JOINED:
        given, wanted = one.columns[name], expected[name]
        if len(given) != len(wanted):
            yield (
                f"update {one.update}: {len(given)} loss tokens recorded, its minibatch of step "
                f"{step} has {len(wanted)} masked ones"
            )
            return
        different = np.flatnonzero(given != wanted)
        if different.size:
            first = int(different[0])
            yield (
                f"update {one.update}: {name} of {different.size} loss tokens is not that of step "
                f"{step}'s tokens, first at group {expected['group'][first]} sample "
                f"{expected['sample'][first]} position {expected['position'][first]}: "
                f"{given[first]} for {wanted[first]}"
            )
            return


def _masked(stored: StoredArm, key: tuple[Any, ...]) -> Columns:
    """The trained tokens of a batch, in key order."""
    table = stored.run.read_arrow("tokens", key=key)
    mask = np.asarray(table.column("loss_mask").to_numpy(), dtype=bool)
    position = np.asarray(table.column("position").to_numpy())
    columns = {}
    for name in _JOINED:
        values = table.column(name).combine_chunks()
        if values.null_count:
            values = values.fill_null(0.0)
        columns[name] = np.asarray(values.to_numpy(zero_copy_only=False))[mask & (position > 0)]
    if stored.run.has_table("rescoring", key=key):
        columns["advantage"] = rescored_columns(stored.run, key)["advantage"]
    return columns


def _minibatch(stored: StoredArm, batch: Columns, index: int) -> Columns:
    rollout = stored.execution.rollout
    size = rollout.groups // rollout.minibatches
    chosen = (batch["group"] >= index * size) & (batch["group"] < (index + 1) * size)
    return {name: values[chosen] for name, values in batch.items()}


def _advantages(stored: StoredArm) -> Iterator[str]:
    """Advantages follow from the rewards of their group."""
    settings = stored.execution.advantage_of(stored.arm).config
    if settings.get("kind") != "group_mean":
        yield from rescoring_contradictions(stored, settings)
        return
    for step in stored.steps:
        key = (stored.arm, stored.phase, step)
        if not stored.run.has_table("rollouts", key=key):
            yield f"rollouts of step {step} are not there"
            continue
        yield from _spread(stored, step)
        groups = defaultdict(list)
        for row in stored.run.read_table("rollouts", key=key):
            groups[row["group"]].append((row["reward"], row["advantage"]))
        for group, pairs in groups.items():
            problem = _group_problem(settings, pairs)
            if problem:
                yield f"step {step} group {group}: {problem}"


def _spread(stored: StoredArm, step: int) -> Iterator[str]:
    """Every trained token has the advantage of its completion."""
    key = (stored.arm, stored.phase, step)
    if not stored.run.has_table("tokens", key=key):
        return
    table = stored.run.read_arrow("tokens", key=key)
    columns = {
        name: np.asarray(table.column(name).combine_chunks().to_numpy(zero_copy_only=False))
        for name in ("group", "sample", "loss_mask", "advantage")
    }
    by_place = {
        (row["group"], row["sample"]): row["advantage"]
        for row in stored.run.read_table("rollouts", key=key)
    }
    mask = columns["loss_mask"].astype(bool)
    places = zip(columns["group"][mask].tolist(), columns["sample"][mask].tolist(), strict=True)
    expected = np.array([by_place.get(place, np.nan) for place in places])
    different = np.abs(columns["advantage"][mask] - expected.astype(np.float32))
    wrong = int(np.count_nonzero(~(different <= ADVANTAGE_TOLERANCE)))
    if wrong:
        yield f"step {step}: {wrong} trained tokens have not the advantage of their completion"


def _group_problem(settings: Any, pairs: list[tuple[float, float]]) -> str | None:
    rewards = torch.tensor([reward for reward, _ in pairs], dtype=torch.float64)
    try:
        expected = group_advantages(settings, rewards).tolist()
    except (LossConfigError, LossInputError) as error:
        return str(error)
    worst = max(abs(value - recorded) for value, (_, recorded) in zip(expected, pairs, strict=True))
    if worst <= ADVANTAGE_TOLERANCE * max(1.0, max(abs(value) for value in expected)):
        return None
    return f"advantages differ by up to {worst:.4g} from those that its rewards give"


def _versions(stored: StoredArm) -> Iterator[str]:
    """Each batch was sampled by the version that its step begins with, as far as is recorded."""
    per_step = stored.execution.rollout.updates_per_step
    for step in stored.steps:
        key = (stored.arm, stored.phase, step)
        if not stored.run.has_table("rollouts", key=key):
            continue
        table = stored.run.read_arrow("rollouts", key=key)
        versions = set(table.column("policy_version").to_pylist())
        if versions != {step * per_step}:
            yield (
                f"step {step} was sampled by version {sorted(versions)}, expected {step * per_step}"
            )
