"""Choose a few held-out episodes of the base model and of each arm, and read what was said.

Only `evaluations` and `evaluation_turns` are read, so that single answers, which have no turns,
are not among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evidence.canonical import stored_facts
from evidence.run import Run
from evidence.transcripts_shown import HELD_OUT, MAX_ARMS, Transcript, message_of
from evidence.values import as_list, as_mapping

RULE = (
    "For the base model and the final evaluation of each arm: the first held-out item by its id, "
    "the one with the highest and the one with the lowest score of the first criterion's metric. "
    "Ties go to the first id."
)
FINAL = "final"
BASE = "base"


def read_held_out(run: Run) -> Iterator[Transcript]:
    """The chosen episodes: the base model's, then the arms' by name."""
    keys = [(str(arm), str(label)) for arm, label in run.keys("evaluation_turns")]
    arms = [key for key in sorted(keys) if key[1] == FINAL][:MAX_ARMS]
    for key in [*((BASE, BASE) for _ in range((BASE, BASE) in keys)), *arms]:
        yield from _of_evaluation(run, key)


def _of_evaluation(run: Run, key: tuple[str, str]) -> Iterator[Transcript]:
    scored: dict[str, dict[str, Any]] = {}
    for row in run.read_table("evaluations", key=key):
        found = scored.setdefault(row["item_id"], {"row": row, "scores": {}})
        found["scores"][row["metric"]] = row["value"]
    said: dict[str, list[Mapping[str, Any]]] = {}
    for row in run.read_table("evaluation_turns", key=key):
        said.setdefault(row["item_id"], []).append(row)
    metric = _metric(run)
    for item, why in sorted(_choose(scored, metric).items()):
        yield _transcript(key, why, scored[item], said.get(item, []))


def _metric(run: Run) -> str | None:
    """The metric that the decision rule names first."""
    criteria = as_list(as_mapping(run.spec.get("decision_rule")).get("criteria"))
    found = as_mapping(criteria[0]).get("metric") if criteria else None
    return found if isinstance(found, str) else None


def _choose(scored: Mapping[str, Mapping[str, Any]], metric: str | None) -> dict[str, list[str]]:
    """Ids of the chosen items, with the reasons."""
    items = sorted(scored)
    chosen: dict[str, list[str]] = {items[0]: ["first"]} if items else {}
    values = {
        item: scored[item]["scores"][metric] for item in items if metric in scored[item]["scores"]
    }
    if values:
        best, worst = max(values.values()), min(values.values())
        for value, why in ((best, f"highest {metric}"), (worst, f"lowest {metric}")):
            item = next(item for item, found in values.items() if found == value)
            chosen.setdefault(item, []).append(why)
    return chosen


def _transcript(
    key: tuple[str, str],
    why: Sequence[str],
    scored: Mapping[str, Any],
    said: Sequence[Mapping[str, Any]],
) -> Transcript:
    row = scored["row"]
    facts = {
        "item_id": row["item_id"],
        "turns": sum(message["role"] == "assistant" for message in said),
        "stop_reason": row["stop_reason"],
    }
    return Transcript(
        key=(key[0], HELD_OUT, key[1]),
        why=tuple(why),
        rollout=facts,
        info={
            "metrics": scored["scores"],
            "info": stored_facts(row.get("info_json"), where="evaluations.info_json"),
        },
        teacher={},
        messages=tuple(message_of(message) for message in said),
    )
