"""A served model that answers prompts of ours: the part that user simulators and judges share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tinker_cookbook.exceptions import RendererError

from envs.conversation import storable
from envs.dialogue import turn_seed
from envs.errors import EnvInputError, EnvServiceError
from envs.protocols import SampledSequence, Sampler
from envs.rendering import ChatRenderer, make_renderer

T = TypeVar("T")

RETRY_TEMPERATURE = 0.5
"""Lowest temperature of an attempt after the first."""


class AnswerError(ValueError):
    """An answer that cannot be used.

    Args:
        problem: what is wrong, by a name of `envs.outcomes` without the role before it.
        reason: the same in words.
    """

    def __init__(self, problem: str, reason: str) -> None:
        self.problem, self.reason = problem, reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Answer:
    """A usable answer: what was read from it, its text, and what was wrong with earlier ones.

    `failures` has it in words, `problems` by the names of `envs.outcomes`.
    """

    value: Any
    text: str
    failures: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def attempts(self) -> int:
        """How often the model was asked."""
        return len(self.failures) + 1


@dataclass(frozen=True, slots=True)
class Partner:
    """A frozen served model with pinned prompt and decoding.

    Attributes:
        role: `simulator` or `judge`, for messages.
        model: its name on the service.
        prompt_template: id of its prompt.
        sampler: reaches it.
        renderer: turns messages into its tokens; a date that it prints is pinned.
        temperature: 0 for greedy.
        max_tokens: new tokens per answer.
        max_attempts: answers asked for before it counts as a failure.
        seed: of its sampling; attempt n of request m uses a seed derived from all three.
        retries_before: attempts after a first one that earlier rounds have used up. A round that
            failed and is asked again goes on with new seeds, instead of failing the same way.
        on_failure: told of a round that failed, before the error is raised.
    """

    role: str
    model: str
    prompt_template: str
    sampler: Sampler
    renderer: ChatRenderer
    temperature: float
    max_tokens: int
    max_attempts: int = 3
    seed: int = 0
    retries_before: int = 0
    on_failure: Callable[[EnvServiceError], None] | None = None

    async def ask(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        read: Callable[[str], T],
        request: int = 0,
    ) -> Answer:
        """Ask until an answer can be read.

        The first attempt uses the planned temperature. Asking a greedy model again would bring the
        same answer again, so later attempts sample at 0.5 at least.

        Args:
            messages: the prompt.
            read: returns what the answer says, or raises `AnswerError`.
            request: number of the request within its conversation.

        Raises:
            EnvServiceError: after `max_attempts` unusable answers.
        """
        prompt = self.renderer.prompt(messages)
        failures: list[AnswerError] = []
        for attempt in self._attempts():
            (reply,) = await self.sampler.sample(
                prompt,
                num_samples=1,
                max_tokens=self.max_tokens,
                temperature=self.temperature
                if attempt == 0
                else max(self.temperature, RETRY_TEMPERATURE),
                top_p=1.0,
                top_k=-1,
                seed=turn_seed(turn_seed(self.seed, request), attempt),
                stop=self.renderer.stop_tokens(),
            )
            try:
                text = self._text(reply)
                return Answer(read(text), text, *self._told(failures))
            except AnswerError as error:
                failures.append(error)
        words, problems = self._told(failures)
        failure = EnvServiceError(self.role, "; ".join(words), self.max_attempts, problems)
        if self.on_failure is not None:
            self.on_failure(failure)
        raise failure

    def _attempts(self) -> list[int]:
        """Numbers of this round's attempts; the planned one comes first in every round."""
        if self.max_attempts == 1:
            return [self.retries_before]
        again = range(1 + self.retries_before, self.max_attempts + self.retries_before)
        return [0, *again]

    def _told(self, failures: Sequence[AnswerError]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What was wrong, in words and by name."""
        words = tuple(str(error) for error in failures)
        return words, tuple(f"{self.role}_{error.problem}" for error in failures)

    def _text(self, reply: SampledSequence) -> str:
        """The final text of an answer, reasoning left out.

        A service may leave out the stop token at which it stopped; the renderer needs it to tell
        the parts of an answer apart.
        """
        tokens, stop = list(reply.tokens), self.renderer.stop_tokens()
        if reply.stop_reason == "stop" and not (tokens and tokens[-1] in stop):
            tokens.append(stop[0])
        try:
            parsed = self.renderer.parse(tokens)
        except RendererError as error:
            raise AnswerError("unreadable", f"unreadable tokens ({error})") from error
        if not parsed.stopped:
            if reply.stop_reason == "length":
                raise AnswerError("cut", "cut at the length limit")
            raise AnswerError("unreadable", "unreadable tokens (no end of the answer)")
        return storable(parsed.text)

    def provenance(self) -> dict[str, Any]:
        """What determines its answers, as plain JSON data."""
        return {
            "role": self.role,
            "model": self.model,
            "prompt_template": self.prompt_template,
            "renderer": self.renderer.name,
            "current_date": getattr(self.renderer.renderer, "current_date", None),
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "max_attempts": self.max_attempts,
        }


def make_partner(
    role: str,
    settings: Mapping[str, Any],
    *,
    sampler: Sampler,
    tokenizer: Any,
    seed: int = 0,
    failed_rounds: int = 0,
    on_failure: Callable[[EnvServiceError], None] | None = None,
) -> Partner:
    """Build a partner from the `simulator` or `judge` section of an execution file.

    A renderer that prints today's date would change the prompt every day, so it is given the
    section's `current_date`.

    Args:
        role: `simulator` or `judge`.
        settings: the section, of kind `served`.
        sampler: reaches the model.
        tokenizer: of the model.
        seed: of its sampling.
        failed_rounds: how often it has failed all its attempts; see `Partner.retries_before`.
        on_failure: told of every further time.

    Raises:
        EnvInputError: if the renderer is unknown, or prints a date and none is given.
    """
    if settings.get("kind") != "served":
        raise EnvInputError(f"{role}.kind", settings.get("kind"), "served")
    renderer = make_renderer(str(settings["renderer"]), tokenizer)
    prints_date = getattr(renderer.renderer, "use_system_prompt", False)
    if prints_date and hasattr(renderer.renderer, "current_date"):
        if settings.get("current_date") is None:
            raise EnvInputError(
                f"{role}.current_date", None, "a date such as 2026-01-31: this renderer prints one"
            )
        renderer.renderer.current_date = str(settings["current_date"])
    max_attempts = int(settings.get("max_attempts", 3))
    return Partner(
        role=role,
        model=str(settings["model"]),
        prompt_template=str(settings["prompt_template"]),
        sampler=sampler,
        renderer=renderer,
        temperature=float(settings["temperature"]),
        max_tokens=int(settings["max_tokens"]),
        max_attempts=max_attempts,
        seed=seed,
        retries_before=failed_rounds * max(1, max_attempts - 1),
        on_failure=on_failure,
    )
