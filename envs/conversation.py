"""The parts of a conversation: the world behind the tools, the user, the judge, the transcript."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any, NamedTuple, Protocol

from envs.protocols import Turn

STOP_TEXT = "###STOP###"
"""What a simulated user writes to end a conversation."""

DIMENSIONS = ("invalid_tool_use", "ungrounded_claims", "upfront_clarification")
"""The rubric. Each score is in [0, 1] and higher is better; the composite is their mean."""


class ToolResult(NamedTuple):
    """What a tool answered.

    `error` is None where it worked; `ends` ends the conversation; `unknown`: there is no such tool.
    """

    text: str
    error: str | None = None
    ends: bool = False
    unknown: bool = False


class UserReply(NamedTuple):
    """What the user says next; with `stops` the conversation is over.

    `attempts` is how often a model was asked for it, 0 where none plays the user; `problems` names
    what was wrong with unusable answers (`envs.outcomes`).
    """

    text: str
    stops: bool
    attempts: int = 0
    problems: tuple[str, ...] = ()


class World(Protocol):
    """The state that tools read and change, private to one episode."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Execute one tool call. Wrong names and arguments are results, not exceptions."""
        ...

    def reward(self, said: Sequence[str]) -> float:
        """Return the native reward, 0 or 1, of a finished conversation.

        Args:
            said: what the agent told the user, message by message.
        """
        ...


class User(Protocol):
    """Whoever plays the user of one episode."""

    async def first(self) -> UserReply:
        """Return the opening message.

        Raises:
            EnvServiceError: if a served user gives none after its retries.
        """
        ...

    async def reply(self, agent_text: str) -> UserReply:
        """Answer a message of the agent.

        Raises:
            EnvServiceError: if a served user gives no answer after its retries.
        """
        ...


@dataclass(frozen=True, slots=True)
class Transcript:
    """A finished conversation as a judge sees it.

    `policy` is what the agent was told; `turns` are the messages after it, in order.
    """

    policy: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Scores by dimension, and the reasons in words.

    `attempts` is how often a model was asked, 0 where none judges; `failures` says in words what
    was wrong with unusable answers, and `problems` by name (`envs.outcomes`).
    """

    scores: Mapping[str, float]
    rationale: str
    attempts: int = 0
    raw: str = ""
    failures: tuple[str, ...] = field(default_factory=tuple)
    problems: tuple[str, ...] = field(default_factory=tuple)

    @property
    def composite(self) -> float:
        """Mean of the three scores, to 12 decimals.

        The mean of (1.0, 0.7, 0.7) is 0.8 - 1e-16 in floating point: it would miss a threshold of
        0.8, and scores with equal means would differ by an order of addition.
        """
        return round(fsum(self.scores[name] for name in DIMENSIONS) / len(DIMENSIONS), 12)


class Judge(Protocol):
    """Whoever scores conversations."""

    async def judge(self, transcript: Transcript) -> Judgement:
        """Score one conversation.

        Raises:
            EnvServiceError: if a served judge gives no valid answer after its retries.
        """
        ...


def clipped(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text, and say how many more there were."""
    more = len(text) - limit
    return text if more <= 0 else f"{text[:limit]} [... {more} more characters]"


def storable(text: str) -> str:
    r"""Return text that every file format can hold: lone surrogates become ``\udXXX`` escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
