"""What the page of transcripts shows, as plain values, and how much of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_ARMS = 4
MAX_TOKENS = 2_000
"""Sampled tokens of one episode that are shown."""
MAX_CHARS = 6_000
"""Characters of one message that are shown."""

HELD_OUT = "eval"
"""Phase of the episodes on held-out items."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One sampled token as it is shown; several where they share a character.

    Log-probabilities are in nats. `advantage` is None where the token is not trained.
    """

    text: str
    token_ids: tuple[int, ...]
    advantage: float | None
    sampling_logprob: float | None
    teacher_logprob: float | None


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `pieces` are set on the policy's own; `hidden` characters or tokens are cut."""

    role: str
    turn: int
    content: str
    pieces: tuple[Piece, ...] = ()
    hidden: int = 0
    tool_name: str | None = None
    tool_error: str | None = None
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Transcript:
    """One chosen episode.

    Attributes:
        key: arm, phase and step; the evaluation's label in the step's place on held-out items.
        why: why it was chosen.
        rollout: its row of `rollouts`; on held-out items what there is of the same names.
        info: metrics by name, and the environment's facts of it.
        teacher: its row of `teachers`, empty where there is none.
        messages: the prompt where its tokens are kept, then what was said in order.
    """

    key: tuple[str, str, int | str]
    why: tuple[str, ...]
    rollout: Mapping[str, Any]
    info: Mapping[str, Any]
    teacher: Mapping[str, Any]
    messages: tuple[Message, ...]

    @property
    def held_out(self) -> bool:
        """Whether it is of an evaluation: nothing in it was trained on."""
        return self.key[1] == HELD_OUT


def message_of(
    row: Mapping[str, Any], *, pieces: tuple[Piece, ...] = (), hidden_tokens: int | None = None
) -> Message:
    """A row of `turns` or `evaluation_turns` as it is shown.

    Args:
        row: the row.
        pieces: its tokens, where they are shown instead of the text.
        hidden_tokens: how many of its tokens are left out; None where it has none of the policy's.
    """
    content = str(row["content"])
    cut = max(0, len(content) - MAX_CHARS)
    return Message(
        role=str(row["role"]),
        turn=int(row["turn"]),
        content=content[:MAX_CHARS],
        pieces=pieces,
        hidden=cut if hidden_tokens is None else hidden_tokens,
        tool_name=row.get("tool_name"),
        tool_error=row.get("tool_error"),
        stop_reason=row.get("stop_reason"),
    )
