"""The teacher's sequence for self-distillation: another system message, the same tokens after it.

An episode's tokens are S + R, with S the system message up to its end token. The teacher reads
S' + R, where S' holds a solution and feedback before the original policy text. R is not touched,
so position i of the episode is position i - len(S) + len(S') of the teacher's sequence, whatever
tool results lie in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from envs.errors import EnvInputError
from envs.protocols import Turn
from envs.rendering import ChatRenderer

TEMPLATE_ID = "sdpo-system-v1"

_SOLUTION = "Correct solution:"
_FEEDBACK = "The following is feedback from your unsuccessful earlier attempt:"
_CLOSING = "Correctly solve the original question."

OverLength = Literal["drop_solution", "zero_advantage"]


@dataclass(frozen=True, slots=True)
class TeacherSequence:
    """What to score for one episode.

    Attributes:
        tokens: S' + R.
        shift: add it to a position of the episode to get the position here.
        prefix_tokens: length of S'.
        solution_shown: whether a sibling's conversation stands in S'.
        solution_dropped: whether one was left out because the sequence was too long.
        feedback_shown: whether feedback stands in S'.
    """

    tokens: tuple[int, ...]
    shift: int
    prefix_tokens: int
    solution_shown: bool
    solution_dropped: bool
    feedback_shown: bool


@runtime_checkable
class TeacherSource(Protocol):
    """An environment that knows how a teacher's sequence is written."""

    def teacher_sequence(
        self,
        tokens: Sequence[int],
        *,
        system_tokens: int,
        solution: Sequence[Turn] | None,
        feedback: str | None,
        max_tokens: int,
        over_length: OverLength,
    ) -> TeacherSequence | None:
        """Return what the teacher scores for one episode; see `teacher_sequence`."""
        ...


def teacher_system(system: str, *, solution: str | None, feedback: str | None) -> str:
    """Return the teacher's system message: solution, feedback and closing line, then the policy.

    Without both it is the original policy text, unchanged.
    """
    if not solution and not feedback:
        return system
    blocks = [f"{_SOLUTION}\n{solution}"] if solution else []
    blocks += [f"{_FEEDBACK}\n{feedback}"] if feedback else []
    return "\n\n".join([*blocks, _CLOSING, system])


def solution_text(turns: Sequence[Turn]) -> str:
    """Return a sibling's conversation as text, one message after the other."""
    return "\n".join(f"{turn.role}: {turn.content}" for turn in turns)


def teacher_sequence(
    tokens: Sequence[int],
    *,
    system_tokens: int,
    system: str,
    solution: str | None,
    feedback: str | None,
    renderer: ChatRenderer,
    max_tokens: int,
    over_length: OverLength,
) -> TeacherSequence | None:
    """Return the teacher's sequence of one episode, or None where there is none.

    None means that the sequence does not fit `max_tokens`, even without the solution where
    `over_length` is `drop_solution`, or that nothing but the solution was to be shown: such an
    episode gets zero advantages, and is counted.

    Args:
        tokens: the episode's tokens.
        system_tokens: length of S, as the episode's info says.
        system: the original policy text.
        solution: a sibling's conversation, if one is good enough; never the attempt itself.
        feedback: the judge's words on the attempt.
        renderer: of the policy model.
        max_tokens: longest sequence that can be scored.
        over_length: what happens to a longer one.

    Raises:
        EnvInputError: if the episode does not start with the system message.
    """
    if list(tokens[:system_tokens]) != _system_message(system, renderer):
        raise EnvInputError(
            "episode", f"{system_tokens} first tokens", "the system message they are said to be"
        )
    shown, rest = solution, tuple(tokens[system_tokens:])
    prefix = _system_message(teacher_system(system, solution=shown, feedback=feedback), renderer)
    if len(prefix) + len(rest) > max_tokens and shown and over_length == "drop_solution":
        shown = None
        prefix = _system_message(teacher_system(system, solution=None, feedback=feedback), renderer)
    nothing_shown = bool(solution or feedback) and not (shown or feedback)
    if nothing_shown or len(prefix) + len(rest) > max_tokens:
        return None
    return TeacherSequence(
        tokens=(*prefix, *rest),
        shift=len(prefix) - system_tokens,
        prefix_tokens=len(prefix),
        solution_shown=bool(shown),
        solution_dropped=bool(solution) and not shown,
        feedback_shown=bool(feedback),
    )


def _system_message(text: str, renderer: ChatRenderer) -> list[int]:
    """Tokens of a system message up to and including its end token."""
    prompt = renderer.prompt([{"role": "system", "content": text}])
    stop = renderer.stop_tokens()[0]
    if prompt.count(stop) != 1:
        expected = "one that ends a system message with its stop token, once"
        raise EnvInputError("renderer", renderer.name, expected)
    return list(prompt[: renderer.system_tokens(prompt)])


class SystemTeacher:
    """Writes teachers' sequences for conversations that start with one system message.

    A base class of environments.

    Attributes:
        system: the system message's text.
    """

    system: str
    _renderer: ChatRenderer

    def teacher_sequence(
        self,
        tokens: Sequence[int],
        *,
        system_tokens: int,
        solution: Sequence[Turn] | None,
        feedback: str | None,
        max_tokens: int,
        over_length: OverLength,
    ) -> TeacherSequence | None:
        """Return what the teacher scores for one episode; see `teacher_sequence`."""
        return teacher_sequence(
            tokens,
            system_tokens=system_tokens,
            system=self.system,
            solution=None if solution is None else solution_text(solution),
            feedback=feedback,
            renderer=self._renderer,
            max_tokens=max_tokens,
            over_length=over_length,
        )
