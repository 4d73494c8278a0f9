"""Sentinel tokens read back: optimizer drift kept apart from a sampler that disagrees."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from losses.mismatch import Gap, gap
from tasks.stored_updates import StoredArm

Floats = NDArray[np.float64]


def scorings(stored: StoredArm) -> dict[int, dict[str, Floats]]:
    """The sentinels' columns by how many updates were done, in order."""
    found = {}
    for key in stored.run.keys("sentinels", prefix=(stored.arm, stored.phase)):
        table = stored.run.read_arrow("sentinels", key=key)
        found[int(key[2])] = {
            name: np.asarray(
                table.column(name).combine_chunks().to_numpy(zero_copy_only=False), dtype=np.float64
            )
            for name in ("trainer_logprob", "sampling_logprob", "rescored_logprob")
        }
    return dict(sorted(found.items()))


def sentinel_figures(stored: StoredArm) -> dict[str, Any]:
    """Figures under the record's names: q90 and largest |difference of probabilities|."""
    scored = scorings(stored)
    if 0 not in scored:
        return {}
    start = scored[0]
    figures = {"sentinel_tokens": len(start["trainer_logprob"])}
    figures |= _named(
        "sentinel_init_vs_sampler", gap(start["trainer_logprob"], start["sampling_logprob"])
    )
    for done, columns in scored.items():
        if done:
            name = f"sentinel_after_u{done}_vs_init"
            figures |= _named(name, gap(columns["trainer_logprob"], start["trainer_logprob"]))
    return figures


def _named(prefix: str, found: Gap | None) -> dict[str, Any]:
    if found is None:
        return {}
    return {
        f"{prefix}_absdp_q90": found.probability_q90,
        f"{prefix}_absdp_max": found.probability_max,
    }


def rescored_gaps(stored: StoredArm) -> dict[str, float] | None:
    """The sentinels three ways before any update: returned, rescored by the sampler, trainer's.

    Returns:
        0.9 quantiles of the absolute differences, nats; None where they were not rescored.
    """
    start = scorings(stored).get(0)
    if start is None or np.isnan(start["rescored_logprob"]).any():
        return None
    pairs = {
        "returned_to_rescored": ("sampling_logprob", "rescored_logprob"),
        "rescored_to_trainer": ("rescored_logprob", "trainer_logprob"),
        "returned_to_trainer": ("sampling_logprob", "trainer_logprob"),
    }
    found = {name: gap(start[one], start[two]) for name, (one, two) in pairs.items()}
    return {name: one.nats_q90 for name, one in found.items() if one is not None} or None


def movement_nats(stored: StoredArm) -> float | None:
    """Largest change of one token's log-probability by training; None where none can be seen.

    Seen on sentinels, and on tokens that the trainer scored in both passes over a batch.
    """
    changes = []
    scored = scorings(stored)
    if 0 in scored:
        start = scored[0]["trainer_logprob"]
        changes += [
            float(np.abs(columns["trainer_logprob"] - start).max(initial=0.0))
            for done, columns in scored.items()
            if done
        ]
    first = {
        (one.row["step"], one.row["minibatch"]): one.columns["target_logprob"]
        for one in stored.updates
        if one.row["epoch"] == 0
    }
    for one in stored.updates:
        before = first.get((one.row["step"], one.row["minibatch"]))
        after = one.columns["target_logprob"]
        if one.row["epoch"] > 0 and before is not None and before.shape == after.shape:
            moved = np.abs(after.astype(np.float64) - before.astype(np.float64))
            changes.append(float(moved.max(initial=0.0)))
    return max(changes) if changes else None


def within_batches(stored: StoredArm) -> dict[str, dict[str, float]] | None:
    """Sampler against trainer before a batch's first update and after it; None where one is not there.

    The tokens differ, so this tells less than `movement_nats`; it is all that a run of one pass
    without sentinels has.
    """
    per_step = stored.execution.rollout.updates_per_step
    found = {}
    for when, chosen in (
        ("before", [one for one in stored.updates if one.update % per_step == 0]),
        ("after", [one for one in stored.updates if one.update % per_step > 0]),
    ):
        pairs = [
            np.concatenate([np.zeros(0), *(one.columns[name] for one in chosen)])
            for name in ("target_logprob", "sampling_logprob")
        ]
        between = gap(*pairs)
        if between is None:
            return None
        names = ("nats_q50", "nats_q90", "nats_max")
        found[when] = {name: float(getattr(between, name)) for name in names}
    return found
