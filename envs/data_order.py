"""The order in which training tasks are visited: a function of seed and step alone."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs.errors import EnvInputError

GENERATOR = "numpy.random.default_rng(seed).permutation(n); later epochs default_rng([seed, epoch])"
"""The stated generator, as recorded with a run."""


def epoch_order(n: int, *, seed: int, epoch: int = 0) -> list[int]:
    """Return a permutation of range(n).

    Epoch 0 is `numpy.random.default_rng(seed).permutation(n)`, which is also what
    `datasets.Dataset.shuffle(seed=seed)` gives; epoch e > 0 is seeded with `[seed, e]`.
    """
    rng = np.random.default_rng(seed if epoch == 0 else [seed, epoch])
    return [int(index) for index in rng.permutation(n)]


def batch_ids(ids: Sequence[str], *, seed: int, step: int, groups: int) -> list[str]:
    """Return the `groups` distinct ids of one rollout step.

    An epoch has `len(ids) // groups` batches; the ids left over at its end are skipped, so that
    no batch holds an id twice and every batch has the same number of groups.

    Raises:
        EnvInputError: if there are fewer ids than groups, or the step is negative.
    """
    if not 1 <= groups <= len(ids):
        raise EnvInputError("groups", groups, f"1 to {len(ids)}, the number of training tasks")
    if step < 0:
        raise EnvInputError("step", step, "at least 0")
    epoch, batch = divmod(step, len(ids) // groups)
    order = epoch_order(len(ids), seed=seed, epoch=epoch)
    return [ids[index] for index in order[batch * groups : (batch + 1) * groups]]


def order_record(ids: Sequence[str], *, seed: int) -> dict[str, Any]:
    """Describe the order for the record: generator, seed, size, and the SHA-256 of epoch 0.

    The digest is over the ids of epoch 0 in order, each followed by a newline, in UTF-8.
    """
    order = epoch_order(len(ids), seed=seed)
    text = "".join(f"{ids[index]}\n" for index in order)
    return {
        "generator": GENERATOR,
        "seed": seed,
        "n": len(ids),
        "epoch_0_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def check_disjoint(train: Sequence[str], held_out: Sequence[str]) -> None:
    """Refuse splits that repeat or share a key.

    Args:
        train: one key per training task; a key says what counts as the same task.
        held_out: one key per held-out task.

    Raises:
        EnvInputError: naming the first key found in both.
    """
    shared = sorted(set(train) & set(held_out))
    if shared:
        raise EnvInputError(
            "held-out tasks", shared[0], f"none of the training tasks ({len(shared)} shared)"
        )
