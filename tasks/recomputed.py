"""Recomputed log-probabilities as a run keeps them; neither a service nor its client library.

One file a rollout step holds the trainer's score of every target of every stored sequence, prompts
included, in key order: what losses with a recomputed anchor compare with, in every pass and replay.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from evidence.errors import InputError
from evidence.run import Run
from evidence.store import encode_segment

Integers = NDArray[np.int64]
Correction = TypeVar("Correction")
_PLACE = ("group", "sample", "position")


def correction_for(loss: Mapping[str, Any], planned: Correction | None) -> Correction | None:
    """The rollout correction of an arm with that loss; DPPO's own ratio is one already."""
    return None if loss["kind"] == "dppo" else planned


def reads_recomputed(loss: Mapping[str, Any] | None, correction: object) -> bool:
    """Whether a loss, or the rollout correction of its arm, reads recomputed log-probabilities."""
    recomputes = loss is not None and loss.get("anchor") == "recompute"
    return recomputes or correction is not None


def recomputed_path(arm: str, phase: str, step: int) -> str:
    """Where the scores of a rollout step lie within a run."""
    return f"recomputed/{encode_segment(arm, field='arm')}/{phase}/{step:06d}.npy"


def read_recomputed(run: Run, arm: str, phase: str, step: int) -> NDArray[np.float32] | None:
    """The scores of a rollout step as they were written, nats; None where none were kept."""
    path = recomputed_path(arm, phase, step)
    if not run.store.exists(path):
        return None
    found: NDArray[np.float32] = np.load(io.BytesIO(run.read_bytes(path)), allow_pickle=False)
    return found


def write_recomputed(
    run: Run, arm: str, phase: str, step: int, logprobs_K: NDArray[np.float32]
) -> None:
    """Keep the scores of a rollout step, [K] nats, in key order."""
    sink = io.BytesIO()
    np.save(sink, logprobs_K, allow_pickle=False)
    run.write_bytes(recomputed_path(arm, phase, step), sink.getvalue())


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Scores of a batch with the place of each target.

    Attributes:
        places_K: [K, 3] group, sample and position, in key order.
        logprobs_K: [K] nats.
    """

    places_K: Integers
    logprobs_K: NDArray[np.float64]

    @classmethod
    def of_step(cls, run: Run, arm: str, phase: str, step: int) -> Recomputed | None:
        """Read the scores of a rollout step; None where none were kept.

        Raises:
            InputError: if they are not one for each target of the stored batch.
        """
        scores, key = read_recomputed(run, arm, phase, step), (arm, phase, step)
        if scores is None or not run.has_table("tokens", key=key):
            return None
        table = run.read_arrow("tokens", key=key)
        columns = [table.column(name).to_numpy() for name in _PLACE]
        places = np.stack(columns, axis=1).astype(np.int64)
        targets = places[places[:, 2] > 0]
        if scores.shape != (len(targets),):
            expected = f"one score for each of {len(targets)} targets"
            raise InputError(recomputed_path(arm, phase, step), scores.shape, expected)
        return cls(targets, scores.astype(np.float64))

    def at(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.float64] | None:
        """The scores of tokens by their place; None if one is no target of the batch."""
        wanted = np.stack([columns[name] for name in _PLACE], axis=1).astype(np.int64)
        sizes = np.maximum(self.places_K.max(axis=0, initial=0), wanted.max(axis=0, initial=0)) + 1
        known, asked = (_flat(places, sizes) for places in (self.places_K, wanted))
        index = np.minimum(np.searchsorted(known, asked), len(known) - 1)
        if not len(known) or not np.array_equal(known[index], asked):
            return None
        return self.logprobs_K[index]


def _flat(places: Integers, sizes: Integers) -> Integers:
    """One number for each place, in the order of the places."""
    found: Integers = (places[:, 0] * sizes[1] + places[:, 1]) * sizes[2] + places[:, 2]
    return found
