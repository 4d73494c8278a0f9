"""What a warm start is trained on: demonstrations of audited training tasks, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.data_order import epoch_order
from envs.protocols import Environment, Episode
from evidence.canonical import digest
from evidence.errors import InputError
from evidence.run_settings import WarmStart
from tasks.datums import TrainedSequence
from tasks.sequences import sampled_sequence


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """The demonstrations of a warm start.

    Attributes:
        episodes: as they were played, in the order in which they were generated.
        sequences: their tokens; the agent's own are the trained ones.
        sha256: digest of item ids, tokens and masks.
    """

    episodes: Sequence[Episode]
    sequences: Sequence[TrainedSequence]
    sha256: str

    def rows(self) -> list[dict[str, Any]]:
        """One row per demonstration, for the record."""
        return [
            {"item_id": episode.item_id, "tokens": len(episode.tokens), "text": episode.text}
            for episode in self.episodes
        ]


async def make_demonstrations(environment: Environment, settings: WarmStart) -> Demonstrations:
    """Generate the demonstrations of a warm start; the same ones every time.

    Raises:
        InputError: if the environment has no demonstrator, or a demonstration is not of a training
            task whose label the environment's audit accepts.
    """
    demonstrate = getattr(environment, "demonstrations", None)
    if demonstrate is None:
        expected = "null, or an environment that can generate demonstrations"
        raise InputError("warm_start", f"demonstrations of {environment.name}", expected)
    episodes: list[Episode] = await demonstrate(settings.demonstrations, seed=settings.seed)
    _check_audited(environment, episodes)
    sequences = [
        sampled_sequence(episode, group=index, sample=0, advantage=0.0)
        for index, episode in enumerate(episodes)
    ]
    rows = [
        [episode.item_id, list(episode.tokens), [int(trained) for trained in episode.loss_mask]]
        for episode in episodes
    ]
    return Demonstrations(episodes=episodes, sequences=sequences, sha256=digest(rows))


def _check_audited(environment: Environment, episodes: Sequence[Episode]) -> None:
    """Refuse a demonstration of a task that the generation audit does not cover."""
    audited = accepted_tasks(environment)
    for episode in episodes:
        item_id = episode.item_id
        if item_id not in environment.train_ids or item_id in environment.eval_ids:
            raise InputError("demonstration", item_id, "one of a training task")
        if audited is not None and item_id not in audited:
            raise InputError("demonstration", item_id, "one of a task that the audit accepted")


def accepted_tasks(environment: Environment) -> set[str] | None:
    """Ids of the generated tasks that were accepted; None where no task is generated."""
    offered = getattr(environment, "generation_report", None)
    report: Mapping[str, Any] = (offered() if callable(offered) else None) or {}
    rows = report.get("tasks")
    if rows is None:
        return None
    return {str(row["item_id"]) for row in rows if row["disposition"] == "accepted"}


def epoch_batches(settings: WarmStart, epoch: int) -> list[list[int]]:
    """Places of the demonstrations of every optimizer step of an epoch, from 0.

    Every demonstration occurs once an epoch; the last batch may be smaller.
    """
    count, size = settings.demonstrations, settings.batch_size
    order = epoch_order(count, seed=settings.seed, epoch=epoch)
    return [order[start : start + size] for start in range(0, count, size)]


def loss_tokens(sequences: Sequence[TrainedSequence]) -> int:
    """How many targets are trained on."""
    return int(np.sum([sequence.loss_tokens for sequence in sequences]))
