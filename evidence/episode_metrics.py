"""What became of the episodes of each phase and evaluation, counted from the stored tables.

One row for each phase of each arm, from `rollouts`, and one for each evaluation, from
`evaluations`. Environments that hold conversations put what was wrong with turns, users' messages
and judgements into the episodes' facts, under the names that they document.

A partner's answers are those of the episodes that were kept. One that gave no usable answer in all
its attempts ends the attempt of the run, and its episode is played again: those answers are in no
table. The ledger counts them for the whole run, without the arm, so they are in no arm's share; an
activation pilot, which has the run to itself, counts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from evidence.canonical import stored_facts
from evidence.run import Run
from evidence.values import as_mapping

PARTNERS = ("judge", "simulator")
FAILED = "partner_failed"
"""Event of the ledger: a partner gave no usable answer in all its attempts."""
FLAGS = ("questionable_reference", "solved_by_nothing")
"""Known troubles of tasks; an evaluation's scores are also given without such tasks."""
_NOT_UNUSABLE = frozenset({"no_call", "tag_in_text"})
"""Outcomes of turns that were used as they were."""


@dataclass(slots=True)
class _Tally:
    """Counts over episodes."""

    episodes: int = 0
    ended_by: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    scores: dict[str, list[float]] = field(default_factory=dict)
    numbers: Counter[str] = field(default_factory=Counter)

    def add(self, stop_reason: str, info: Mapping[str, Any]) -> None:
        """Count one episode."""
        self.episodes += 1
        self.ended_by[stop_reason] += 1
        for kind, count in as_mapping(info.get("outcomes")).items():
            self.outcomes[str(kind)] += int(count)
        for partner in PARTNERS:
            self.answers[partner] += int(info.get(f"{partner}_attempts") or 0)

    def score(self, metric: str, value: float) -> None:
        """Take one score."""
        self.scores.setdefault(metric, []).append(value)

    def to_record(self) -> dict[str, Any]:
        """Return the counts, and the share of partners' answers that could be used."""
        record: dict[str, Any] = {
            "episodes": self.episodes,
            "ended_by": dict(sorted(self.ended_by.items())),
            "outcomes": dict(sorted(self.outcomes.items())),
            **dict(sorted(self.numbers.items())),
        }
        for partner in PARTNERS:
            asked = self.answers[partner]
            bad = sum(n for kind, n in self.outcomes.items() if kind.startswith(f"{partner}_"))
            record[f"{partner}_answers"] = asked
            record[f"{partner}_unusable"] = bad
            record[f"{partner}_parse_rate"] = (asked - bad) / asked if asked else None
        record["scores"] = {name: fmean(found) for name, found in sorted(self.scores.items())}
        return record


def episode_metrics(run: Run) -> list[dict[str, Any]]:
    """Return one row for each arm and phase, then one for each arm and evaluation."""
    phases = dict.fromkeys((str(arm), str(phase)) for arm, phase, _ in run.keys("rollouts"))
    rows = [_of_phase(run, arm, phase) for arm, phase in sorted(phases)]
    return rows + [evaluation_metrics(run, str(a), str(b)) for a, b in run.keys("evaluations")]


def headline(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of one row that are posted beside an arm's scores.

    Judge and simulator appear where one was asked, and unusable turns where outcomes are counted.
    The shares' names say whose answers they are of: an activation gate's rate counts more.
    """
    found = {
        f"{partner}_parse_rate_of_kept_episodes": row[f"{partner}_parse_rate"]
        for partner in PARTNERS
        if row[f"{partner}_parse_rate"] is not None
    }
    if row["outcomes"]:
        found["unusable_turns"] = float(unusable_turns(row["outcomes"]))
    return found


def unusable_turns(outcomes: Mapping[str, int]) -> int:
    """Return how many outcomes are of the policy's turns that could not be used as they were."""
    partners = tuple(f"{partner}_" for partner in PARTNERS)
    return sum(
        count
        for kind, count in outcomes.items()
        if kind not in _NOT_UNUSABLE and not kind.startswith(partners)
    )


def _of_phase(run: Run, arm: str, phase: str) -> dict[str, Any]:
    tally = _Tally()
    for key in run.keys("rollouts", prefix=(arm, phase)):
        for row in run.read_table("rollouts", key=key):
            facts = stored_facts(row["info_json"], where="info_json")
            tally.add(row["stop_reason"], as_mapping(facts.get("info")))
            for metric, value in as_mapping(facts.get("metrics")).items():
                tally.score(str(metric), float(value))
            tally.numbers["truncated"] += int(row["truncated"])
            for name in ("parse_failures", "tool_calls", "tool_errors"):
                tally.numbers[name] += int(row[name])
    return {"arm": arm, "phase": phase, "label": None, **tally.to_record()}


def evaluation_metrics(run: Run, arm: str, label: str) -> dict[str, Any]:
    """Return the row of one evaluation; where tasks have known troubles, also scores without them."""
    tally = _Tally()
    rows = run.read_table("evaluations", key=(arm, label))
    flagged: set[str] = set()
    for row in _first_of_each_item(rows):
        facts = stored_facts(row["info_json"], where="info_json")
        tally.add(row["stop_reason"], facts)
        if any(facts.get(flag) is True for flag in FLAGS):
            flagged.add(row["item_id"])
    for row in rows:
        tally.score(row["metric"], row["value"])
        if flagged and row["item_id"] not in flagged:
            tally.score(f"{row['metric']}_without_flagged_tasks", row["value"])
    record = {"flagged_tasks": len(flagged), **tally.to_record()}
    return {"arm": arm, "phase": "eval", "label": label, **record}


def _first_of_each_item(rows: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """One row per item: an item has a row for every metric, with the same facts."""
    found: dict[tuple[str, int], Mapping[str, Any]] = {}
    for row in rows:
        found.setdefault((row["item_id"], row["seed"]), row)
    return found.values()
