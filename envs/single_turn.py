"""A single-turn task as an episode of one turn, graded by a cookbook `ProblemEnv`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tinker_cookbook.rl.problem_env import ProblemEnv

from envs.errors import EnvInputError
from envs.protocols import Episode, EpisodeSettings, Item, SampledSequence, Sampler, Turn
from envs.rendering import ChatRenderer

MAX_GRADED_CHARS = 50_000
"""Longer replies are wrong without being read: the graders' time grows with the square."""


class Grade(NamedTuple):
    """What a single-turn grader said about one reply."""

    reward: float
    correct: bool
    format_ok: bool
    extracted: str | None
    metrics: Mapping[str, float]


Grader = Callable[[str, bool], Grade]
"""Takes the reply's text and whether it ended with a stop token."""


@dataclass(frozen=True, slots=True)
class ProblemGrade:
    """The cookbook's own rule for a `ProblemEnv`.

    `format_ok` = ended with the stop token and `check_format`; reward =
    correct + format_coef * (format_ok - 1), so 1.0, 0.9, 0.0 or -0.1 with the default 0.1.
    A right answer that was cut at the length limit counts as correct.
    """

    correct: bool
    format_ok: bool
    reward: float


def grade_problem(env: ProblemEnv, text: str, *, stopped: bool) -> ProblemGrade:
    """Grade a reply as `ProblemEnv.step` does, without its logging."""
    readable = len(text) <= MAX_GRADED_CHARS
    correct = readable and bool(env.check_answer(text))
    format_ok = readable and stopped and bool(env.check_format(text))
    return ProblemGrade(
        correct=correct,
        format_ok=format_ok,
        reward=float(correct) + env.format_coef * (float(format_ok) - 1.0),
    )


async def run_single_turn(
    item: Item,
    sampler: Sampler,
    *,
    renderer: ChatRenderer,
    grader: Grader,
    settings: EpisodeSettings,
    seed: int,
) -> Episode:
    """Sample one reply to the item's prompt and grade it.

    Raises:
        EnvInputError: if the prompt leaves no room for a token within `max_seq_len`, the reply
            is cut there and the policy for that is `fail`, or the sampler returns something other
            than one sequence of at most `max_tokens` tokens.
    """
    max_tokens = _room(item, settings)
    sequences = await sampler.sample(
        item.prompt_tokens,
        num_samples=1,
        max_tokens=max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        seed=seed,
        stop=renderer.stop_tokens(),
    )
    if len(sequences) != 1 or len(sequences[0].tokens) > max_tokens:
        got = [len(sequence.tokens) for sequence in sequences]
        raise EnvInputError("sampled sequences", got, f"one of at most {max_tokens} tokens")
    if sequences[0].stop_reason == "length" and max_tokens < settings.max_tokens:
        settings.refuse_cut(item.item_id)
    return _episode(item, sequences[0], renderer=renderer, grader=grader)


def _room(item: Item, settings: EpisodeSettings) -> int:
    """New tokens that fit behind the prompt."""
    if settings.max_seq_len is None:
        return settings.max_tokens
    room = settings.max_seq_len - len(item.prompt_tokens)
    if room < 1:
        raise EnvInputError(
            f"prompt of item {item.item_id}",
            f"{len(item.prompt_tokens)} tokens",
            f"fewer than max_seq_len {settings.max_seq_len}",
        )
    return min(room, settings.max_tokens)


def _episode(
    item: Item, reply: SampledSequence, *, renderer: ChatRenderer, grader: Grader
) -> Episode:
    """Put prompt, sampled tokens and grade together."""
    parsed = renderer.parse(reply.tokens)
    grade = grader(parsed.text, parsed.stopped)
    prompt, total = len(item.prompt_tokens), len(item.prompt_tokens) + len(reply.tokens)
    return Episode(
        item_id=item.item_id,
        tokens=(*item.prompt_tokens, *reply.tokens),
        loss_mask=(False,) * prompt + (True,) * (total - prompt),
        sampling_logprobs=(None,) * prompt + tuple(float(value) for value in reply.logprobs),
        turn_of_token=(0,) * total,
        reward=grade.reward,
        native_reward=float(grade.correct),
        correct=grade.correct,
        format_ok=grade.format_ok,
        extracted=grade.extracted,
        metrics=grade.metrics,
        stop_reason=reply.stop_reason,
        truncated=reply.stop_reason == "length",
        text=parsed.text,
        turns=(
            Turn(
                turn=0,
                role="assistant",
                content=parsed.text,
                token_start=prompt,
                token_end=total,
                stop_reason=reply.stop_reason,
            ),
        ),
        parse_failures=1 if grade.extracted is None else 0,
    )
