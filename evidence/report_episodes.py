"""The report's tables about episodes: scores, how they ended, and input that could not be used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evidence.report_text import number
from evidence.values import as_mapping

_PARTNERS = {"judge": "Judge", "simulator": "User simulator"}


@dataclass(frozen=True, slots=True)
class EpisodeTable:
    """A table of texts: one column for each evaluation or phase of an arm.

    Attributes:
        title: what is shown.
        heads: names of the columns, without that of the first.
        rows: the name of the row and its cells.
        reading: one sentence on how to read it.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    reading: str


def episode_tables(
    found: Sequence[Mapping[str, Any]], failed: Mapping[str, int]
) -> list[EpisodeTable]:
    """Return the tables for the rows of `metrics-episodes.jsonl`; those without content are left out.

    Args:
        found: the rows.
        failed: how often a simulator or judge gave no usable answer at all, by partner.
    """
    if not any(as_mapping(row.get("outcomes")) for row in found):
        return []
    found = sorted(found, key=_order)
    heads = tuple(_head(row) for row in found)
    made = (
        EpisodeTable(
            "Mean scores by evaluation and phase",
            heads,
            tuple(_counts(found, "scores", missing="")),
            "Each of the judge's dimensions is in [0, 1]; higher is better.",
        ),
        EpisodeTable(
            "How episodes ended",
            heads,
            (_line("episodes", found), *_counts(found, "ended_by", missing="0")),
            "Episodes that a limit ended are graded as unfinished.",
        ),
        EpisodeTable(
            "Input that could not be used as it was",
            heads,
            tuple(_counts(found, "outcomes", missing="0")),
            "Counts by kind: each kind has one defined outcome and none is scored by guesswork.",
        ),
        EpisodeTable(
            "Answers of judge and user simulator",
            heads,
            tuple(_partner_lines(found)),
            "An unusable answer is asked for again and is never a score. Shares are of the answers "
            "in episodes that were kept; those of a partner that failed in all its attempts are "
            "in what follows alone. " + _failures(failed),
        ),
    )
    return [table for table in made if table.rows]


def _order(row: Mapping[str, Any]) -> tuple[bool, bool, str, str]:
    """The base model's evaluation, the arms' evaluations, then what was sampled on the way."""
    arm, sampled = str(row.get("arm")), row.get("phase") != "eval"
    return (sampled, arm != row.get("label"), str(row.get("phase")), arm)


def _head(row: Mapping[str, Any]) -> str:
    where = row.get("label") if row.get("phase") == "eval" else row.get("phase")
    arm = str(row.get("arm"))
    return arm if arm == where else f"{arm}, {where}"


def _counts(
    found: Sequence[Mapping[str, Any]], name: str, *, missing: str
) -> Iterable[tuple[str, ...]]:
    """One line for each key of a mapping column."""
    keys = sorted({key for row in found for key in as_mapping(row.get(name))})
    for key in keys:
        values = [as_mapping(row.get(name)) for row in found]
        cells = (number(value[key]) if key in value else missing for value in values)
        yield (key.replace("_", " "), *cells)


def _line(name: str, found: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return (name.replace("_", " "), *(number(row.get(name)) for row in found))


def _partner_lines(found: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, ...]]:
    for partner, words in _PARTNERS.items():
        if not any(row.get(f"{partner}_answers") for row in found):
            continue
        for what, name in (
            ("answers", f"{partner}_answers"),
            ("unusable answers", f"{partner}_unusable"),
            ("share of usable answers", f"{partner}_parse_rate"),
        ):
            yield (f"{words}: {what}", *(number(row.get(name)) for row in found))


def _failures(failed: Mapping[str, int]) -> str:
    if not failed:
        return "None of them failed in all its attempts."
    counted = ", ".join(f"{partner} {count} times" for partner, count in sorted(failed.items()))
    return f"Failed in all attempts, which closes the attempt of the run: {counted}."
