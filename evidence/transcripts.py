"""Choose a few episodes of a run and read them, turn by turn and token by token, from its tables.

The choice is deterministic, and `RULE` states it. Only tables are read: `rollouts`, `tokens`,
`token_texts`, `turns`, and, where a teacher gave advantages, `rescoring` and `teachers`. Episodes
on held-out items come from `evidence.transcripts_held_out`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from evidence.canonical import stored_facts
from evidence.run import Run
from evidence.transcripts_held_out import read_held_out
from evidence.transcripts_shown import (
    MAX_ARMS,
    MAX_CHARS,
    MAX_TOKENS,
    Message,
    Piece,
    Transcript,
    message_of,
)

RULE = (
    "For the first and the last rollout step of each arm: the step's first episode (group 0, "
    "sample 0), the one with the highest and the one with the lowest reward. Ties go to the lowest "
    "group and sample; an episode is shown once."
)
_MAX_PIECE = 200

StepKey = tuple[str, str, int]


def read_transcripts(run: Run) -> list[Transcript]:
    """Return the chosen episodes by arm, step, group and sample, then those on held-out items.

    None if there are no episodes.
    """
    sampled = [found for key in _chosen_steps(run) for found in _of_step(run, key)]
    return [*sampled, *read_held_out(run)]


def _chosen_steps(run: Run) -> list[StepKey]:
    """First and last step of each arm, of training, or of the pilot where nothing was trained."""
    keys = set(run.keys("tokens"))
    both = [key for key in run.keys("rollouts") if key in keys]
    for phase in ("train", "pilot"):
        by_arm: dict[str, list[StepKey]] = {}
        for arm, found, step in both:
            if found == phase:
                by_arm.setdefault(str(arm), []).append((str(arm), phase, int(step)))
        if by_arm:
            chosen = [(steps[0], steps[-1]) for _, steps in sorted(by_arm.items())][:MAX_ARMS]
            return [step for ends in chosen for step in dict.fromkeys(ends)]
    return []


def _of_step(run: Run, key: StepKey) -> Iterator[Transcript]:
    rollouts = {(row["group"], row["sample"]): row for row in run.read_table("rollouts", key=key)}
    why = _choose(rollouts)
    tables = _StepTables(run, key)
    for place in sorted(why):
        row = rollouts[place]
        yield Transcript(
            key=key,
            why=tuple(why[place]),
            rollout=row,
            info=stored_facts(row.get("info_json"), where="rollouts.info_json"),
            teacher=tables.teachers.get(place, {}),
            messages=tuple(tables.messages(place)),
        )


def _choose(
    rollouts: Mapping[tuple[int, int], Mapping[str, Any]],
) -> dict[tuple[int, int], list[str]]:
    """Places of the chosen episodes of one step, with the reasons."""
    places = sorted(rollouts)
    if not places:
        return {}
    best = max(places, key=lambda place: (rollouts[place]["reward"], _earlier(place)))
    worst = min(places, key=lambda place: (rollouts[place]["reward"], place))
    chosen: dict[tuple[int, int], list[str]] = {}
    for place, why in ((places[0], "first"), (best, "highest reward"), (worst, "lowest reward")):
        chosen.setdefault(place, []).append(why)
    return chosen


def _earlier(place: tuple[int, int]) -> tuple[int, int]:
    return (-place[0], -place[1])


class _StepTables:
    """The tables of one rollout step, by episode."""

    def __init__(self, run: Run, key: StepKey) -> None:
        self._columns = {
            name: values.to_pylist()
            for name, values in _columns(run.read_arrow("tokens", key=key)).items()
        }
        self._bounds = _episode_bounds(self._columns)
        self._texts = {row["token_id"]: row for row in _rows(run, "token_texts", key)}
        self._turns: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
        for row in _rows(run, "turns", key):
            self._turns.setdefault((row["group"], row["sample"]), []).append(row)
        self._rescored = {
            (row["group"], row["sample"], row["position"]): row
            for row in _rows(run, "rescoring", key)
        }
        self.teachers = {(row["group"], row["sample"]): row for row in _rows(run, "teachers", key)}

    def messages(self, place: tuple[int, int]) -> Iterator[Message]:
        """The prompt and every message of one episode."""
        start, end = self._bounds.get(place, (0, 0))
        mask = self._columns["loss_mask"][start:end]
        first = mask.index(True) if True in mask else len(mask)
        prompt = "".join(piece.text for piece in self._pieces(place, range(first)))
        yield Message("prompt", 0, prompt[:MAX_CHARS], hidden=max(0, len(prompt) - MAX_CHARS))
        room = MAX_TOKENS
        for row in self._turns.get(place) or [_only_turn(mask)]:
            positions = self._sampled(row, mask)
            shown = positions[:room]
            room -= len(shown)
            yield message_of(
                row,
                pieces=tuple(self._pieces(place, shown)),
                hidden_tokens=len(positions) - len(shown) if positions else None,
            )

    def _sampled(self, row: Mapping[str, Any], mask: Sequence[bool]) -> list[int]:
        """Positions of the policy's own tokens of a message."""
        start, end = row.get("token_start"), row.get("token_end")
        if row["role"] != "assistant" or start is None or end is None:
            return []
        return [position for position in range(start, min(end, len(mask))) if mask[position]]

    def _pieces(self, place: tuple[int, int], positions: Sequence[int]) -> Iterator[Piece]:
        """Tokens as they are shown; those that are parts of one character stand together."""
        together: list[int] = []
        for position in positions:
            if self._partial(place, position) is None:
                yield from self._joined(place, together)
                together = []
                yield self._piece(place, (position,), self._text(place, position))
            else:
                together.append(position)
        yield from self._joined(place, together)

    def _joined(self, place: tuple[int, int], positions: Sequence[int]) -> Iterator[Piece]:
        if positions:
            parts = [self._partial(place, position) or b"" for position in positions]
            text = b"".join(parts).decode("utf-8", "replace")
            yield self._piece(place, tuple(positions), text)

    def _piece(self, place: tuple[int, int], positions: tuple[int, ...], text: str) -> Piece:
        rows = [self._rescored.get((*place, position), {}) for position in positions]
        advantages = [
            self._value("advantage", place, position) if not row else row["advantage"]
            for row, position in zip(rows, positions, strict=True)
        ]
        known = [value for value in advantages if value is not None]
        at = positions[0]
        return Piece(
            text=text[:_MAX_PIECE],
            token_ids=tuple(self._value("token_id", place, position) for position in positions),
            advantage=sum(known) / len(known) if known else None,
            sampling_logprob=self._value("sampling_logprob", place, at),
            teacher_logprob=(rows[0] or {}).get("teacher_logprob")
            if rows[0]
            else self._value("teacher_logprob", place, at),
        )

    def _value(self, column: str, place: tuple[int, int], position: int) -> Any:
        return self._columns[column][self._bounds[place][0] + position]

    def _text(self, place: tuple[int, int], position: int) -> str:
        token = self._value("token_id", place, position)
        found = self._texts.get(token)
        return f"[{token}]" if found is None else str(found["text"])

    def _partial(self, place: tuple[int, int], position: int) -> bytes | None:
        found = self._texts.get(self._value("token_id", place, position))
        text = None if found is None else found.get("partial_hex")
        return None if text is None else bytes.fromhex(text)


def _columns(table: Any) -> dict[str, Any]:
    wanted = ("group", "sample", "token_id", "loss_mask", "sampling_logprob", "advantage")
    return {name: table.column(name) for name in (*wanted, "teacher_logprob")}


def _rows(run: Run, table: str, key: StepKey) -> list[dict[str, Any]]:
    return run.read_table(table, key=key) if run.has_table(table, key=key) else []


def _episode_bounds(columns: Mapping[str, list[Any]]) -> dict[tuple[int, int], tuple[int, int]]:
    """First row and one past the last row of every episode; rows are sorted by episode."""
    places = list(zip(columns["group"], columns["sample"], strict=True))
    starts = [0, *(at for at, (a, b) in enumerate(pairwise(places), 1) if a != b)] if places else []
    return {
        places[start]: (start, end)
        for start, end in zip(starts, [*starts[1:], len(places)], strict=True)
    }


def _only_turn(mask: Sequence[bool]) -> dict[str, Any]:
    """The one message of an episode that kept no messages: its sampled tokens."""
    start = mask.index(True) if True in mask else len(mask)
    return {
        "role": "assistant",
        "turn": 0,
        "content": "",
        "token_start": start,
        "token_end": len(mask),
    }
