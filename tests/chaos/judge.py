"""Whether a run that was disturbed ended like one that was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evidence.run import Run
from tests.chaos.campaign import Story
from tests.chaos.world import World, settle

RESULT_FIELDS = ("status", "verdict", "outcome_reason", "metrics", "decision", "verdict_detail")


@dataclass(frozen=True)
class Judgement:
    """What a comparison with the undisturbed run gave.

    Attributes:
        tables: content tables compared.
        differing: paths of those whose SHA-256 differs, or that only one run has.
        result_differs: fields of the result or the outcome that differ.
        states_differ: arms whose final weights or optimizer differ at the service.
        sampled_again: groups of which a sample was asked for after the group was finished.
        restores: loads of a training state after the first one.
        replayed: updates applied again after a restore.
    """

    tables: int
    differing: tuple[str, ...]
    result_differs: tuple[str, ...]
    states_differ: tuple[str, ...]
    sampled_again: tuple[str, ...]
    restores: int
    replayed: int

    @property
    def equal(self) -> bool:
        """Whether nothing shows what the run went through."""
        wrong = (self.differing, self.result_differs, self.states_differ, self.sampled_again)
        return not any(wrong)


def judge(world: World, disturbed: tuple[Story, str], undisturbed: tuple[Story, str]) -> Judgement:
    """Compare two runs of the same documents, each with its story and its folder."""
    settle(world.environment)
    mine, other = (Run.open(f"{folder}/run") for _, folder in (disturbed, undisturbed))
    loads = [event for event in mine.events("client_opened") if event["restore"] > 0]
    digests, expected = mine.content_digests(), other.content_digests()
    differing = digests.items() ^ expected.items()
    return Judgement(
        tables=len(expected),
        differing=tuple(sorted({path for path, _ in differing})),
        result_differs=(
            *_differing(mine.result() or {}, other.result() or {}, RESULT_FIELDS),
            *_differing(disturbed[0].outcome, undisturbed[0].outcome, ("exit_kind", "reason")),
        ),
        states_differ=_states_differ(world, mine, other),
        sampled_again=_sampled_again(world, mine, disturbed[0].finished),
        restores=len(loads),
        replayed=sum(event["replayed_updates"] for event in loads),
    )


def _differing(mine: Mapping[str, Any], other: Mapping[str, Any], names: Any) -> list[str]:
    return [name for name in names if mine.get(name) != other.get(name)]


def _states_differ(world: World, mine: Run, other: Run) -> tuple[str, ...]:
    """Arms whose last checkpoint has other weights or another optimizer state."""
    states = [
        {
            event["arm"]: _state(world.checkpoint(event["uri"]))
            for event in run.events("checkpoint")
            if event["phase"] == "train"
        }
        for run in (mine, other)
    ]
    arms = states[0].keys() | states[1].keys()
    return tuple(sorted(arm for arm in arms if states[0].get(arm) != states[1].get(arm)))


def _state(checkpoint: Mapping[str, Any]) -> tuple[Any, Any]:
    return checkpoint["adapter_sha256"], checkpoint["optimizer_sha256"]


def _sampled_again(world: World, run: Run, finished: Mapping[str, float]) -> tuple[str, ...]:
    """Groups of which the service was asked for a sample after the group had been kept."""
    place_of_seed = {
        row["seed"]: f"parts/{row['arm']}/{row['phase']}/{row['step']:06d}/{row['group']:06d}.zip"
        for row in run.read_all("rollouts").to_pylist()
    }
    again: Counter[str] = Counter()
    for request in world.requests():
        if request["path"] != "asample":
            continue
        place = place_of_seed.get(request.get("seed"))
        if place in finished and request["at"] > finished[place]:
            again[place] += 1
    return tuple(sorted(again))
