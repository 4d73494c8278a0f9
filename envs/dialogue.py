"""Play one conversation of several turns with tools, token for token as it was sampled.

The next prompt is always the previous prompt, the sampled tokens as they are, and the newly
rendered message: history is never rendered again, so one sequence per episode can be trained on.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

from envs.conversation import (
    DIMENSIONS,
    Judge,
    Judgement,
    Transcript,
    User,
    UserReply,
    World,
    clipped,
    storable,
)
from envs.errors import EnvInputError, EnvServiceError
from envs.outcomes import counted
from envs.protocols import Episode, EpisodeSettings, SampledSequence, Sampler, Turn
from envs.rendering import ChatRenderer
from envs.token_log import TokenLog
from envs.tool_calls import MAX_TURN_CHARS, ParsedTurn, parse_turn
from envs.xml_calls import ParameterTypes

FINISHED = ("user_stop", "tool_stop")
"""Stop reasons of a conversation that came to its end; every other one is a cut."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything one episode is played with.

    Attributes:
        item_id: the task.
        system: first message: policy and tools.
        world: state behind the tools, private to the episode.
        user: who plays the user, private to the episode.
        judge: who scores the transcript.
        reward_of: the training reward from the native reward and the judgement.
        native_metric: name under which the native reward is evaluated.
        xml_types: parameter types by tool, where the model writes calls in XML form.
    """

    item_id: str
    system: str
    world: World
    user: User
    judge: Judge
    reward_of: Callable[[float, Judgement], float]
    native_metric: str
    xml_types: ParameterTypes | None = None


@dataclass(slots=True)
class _Play:
    """What has happened so far."""

    log: TokenLog = field(default_factory=TokenLog)
    turns: list[Turn] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    parse_failures: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    ignored_calls: int = 0
    simulator_attempts: int = 0
    outcomes: list[str] = field(default_factory=list)
    stop_reason: str = ""

    def heard(self, reply: UserReply) -> UserReply:
        """Count what the user's message took."""
        self.simulator_attempts += reply.attempts
        self.outcomes += reply.problems
        return reply

    def shows(self, text: str, renderer: ChatRenderer) -> None:
        """Count a message that names a special token."""
        if renderer.plain(text) != text:
            self.outcomes.append("special_token")


def turn_seed(seed: int, turn: int) -> int:
    """Return the sampling seed of one turn, in [0, 2**31), from the episode's seed."""
    found = hashlib.sha256(f"{seed}:{turn}".encode()).digest()
    return int.from_bytes(found[:4], "big") % 2**31


async def play(
    scene: Scene,
    sampler: Sampler,
    *,
    renderer: ChatRenderer,
    settings: EpisodeSettings,
    seed: int,
) -> Episode:
    """Play a conversation to its end or to a limit, and grade it.

    Stop reasons: `user_stop` (the user is done), `tool_stop` (a tool such as the transfer to a
    human ended it), `max_turns`, `turn_length` (a turn was cut at `max_tokens`; it is not acted
    on), `max_seq_len`, `user_failed` (a served user gave no answer after its retries). Only the
    first two have a native reward other than 0. A conversation whose user or judge failed is not
    graded: `graded` is false and its reward is NaN, so that no one takes it for a score.

    What cannot be used of a turn, a user's message or a judgement has one outcome each and is
    counted in `info["outcomes"]`; see `envs.outcomes`.

    Raises:
        EnvInputError: if the first prompt does not fit `max_seq_len`, or the conversation does
            not and the policy for that is `fail`.
    """
    play_, failure = _Play(), None
    try:
        await _converse(scene, play_, sampler, renderer=renderer, settings=settings, seed=seed)
        if play_.stop_reason == "max_seq_len":
            settings.refuse_cut(scene.item_id)
        native = scene.world.reward(play_.said) if play_.stop_reason in FINISHED else 0.0
        judgement = await scene.judge.judge(Transcript(scene.system, tuple(play_.turns)))
        play_.outcomes += judgement.problems
    except EnvServiceError as error:
        failure, native = error, 0.0
        play_.outcomes += error.problems
        judgement = Judgement(scores=dict.fromkeys(DIMENSIONS, nan), rationale="")
        if error.partner == "simulator":
            play_.stop_reason = "user_failed"
            play_.simulator_attempts += error.attempts
        else:
            judgement = replace(judgement, attempts=error.attempts)
    return _episode(scene, play_, native, judgement, failure, renderer=renderer)


async def _converse(
    scene: Scene,
    played: _Play,
    sampler: Sampler,
    *,
    renderer: ChatRenderer,
    settings: EpisodeSettings,
    seed: int,
) -> None:
    """Alternate between policy and world until something ends the conversation."""
    opening = storable(played.heard(await scene.user.first()).text)
    played.shows(opening, renderer)
    messages = [
        {"role": "system", "content": scene.system},
        {"role": "user", "content": opening},
    ]
    bounds = played.log.observe(renderer.prompt(messages), turn=0)
    played.turns.append(_observed(0, "user", opening, bounds))
    turn = 0
    while not played.stop_reason:
        if turn == settings.max_turns:
            played.stop_reason = "max_turns"
            return
        room = _room(played.log, settings, scene.item_id)
        if room < 1:
            played.stop_reason = "max_seq_len"
            return
        limit = min(room, settings.max_tokens)
        (reply,) = await sampler.sample(
            played.log.tokens,
            num_samples=1,
            max_tokens=limit,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=turn_seed(seed, turn),
            stop=renderer.stop_tokens(),
        )
        await _take_turn(scene, played, reply, turn=turn, renderer=renderer, settings=settings)
        if reply.stop_reason == "length" and limit < settings.max_tokens:
            played.stop_reason = "max_seq_len"
        turn += 1


async def _take_turn(
    scene: Scene,
    played: _Play,
    reply: SampledSequence,
    *,
    turn: int,
    renderer: ChatRenderer,
    settings: EpisodeSettings,
) -> None:
    """Record a sampled turn, act on it, and append what the world or the user says to it."""
    bounds = played.log.sample(reply.tokens, reply.logprobs, turn=turn)
    written = renderer.turn_text(reply.tokens)
    text = storable(written)
    cut = reply.stop_reason == "length"
    parsed = parse_turn(text, xml_types=scene.xml_types)
    played.outcomes += _outcomes(parsed, cut=cut, escaped=text != written)
    played.turns.append(_said(turn, text, parsed, reply.stop_reason, bounds))
    if cut or parsed.kind == "malformed":
        played.parse_failures += 1
    if cut:
        played.stop_reason = "turn_length"
        return
    observation = await _respond(scene, played, parsed)
    _end_turn(played, reply, renderer)
    played.shows(observation["content"], renderer)
    following = [] if played.stop_reason else renderer.continuation(observation)
    if settings.max_seq_len is not None and len(played.log) + len(following) > settings.max_seq_len:
        played.stop_reason = played.stop_reason or "max_seq_len"
        following = []
    bounds = played.log.observe(following, turn=turn + 1)
    played.turns.append(
        _observed(
            turn + (0 if played.stop_reason else 1),
            observation["role"],
            observation["content"],
            bounds,
            tool_name=observation.get("tool_name"),
            tool_error=observation.get("tool_error"),
        )
    )


def _outcomes(parsed: ParsedTurn, *, cut: bool, escaped: bool) -> list[str]:
    """What is worth counting about a turn as it was written; see `envs.outcomes`."""
    found = ["lone_surrogate"] if escaped else []
    if cut:
        return [*found, "cut"]
    if parsed.problem is not None:
        return [*found, parsed.problem]
    if parsed.kind == "message":
        return [*found, "no_call"]
    tags = ["tag_in_text"] if parsed.tag_in_text else []
    return [*found, *tags, *["second_call"] * parsed.extra_calls]


def _said(
    turn: int, text: str, parsed: ParsedTurn, stop_reason: str, bounds: tuple[int, int]
) -> Turn:
    """A turn of the policy. Its tokens hold it whole, whatever is clipped from the text."""
    cut = stop_reason == "length"
    called = None if cut else parsed.name
    return Turn(
        turn=turn,
        role="assistant",
        content=clipped(text, MAX_TURN_CHARS),
        token_start=bounds[0],
        token_end=bounds[1],
        tool_name=called,
        tool_args=None if called is None else _json(parsed.arguments),
        tool_error="cut" if cut else parsed.problem,
        stop_reason=stop_reason,
    )


async def _respond(scene: Scene, played: _Play, parsed: ParsedTurn) -> dict[str, str]:
    """Act on a turn: run its call, or let the user answer; returns the message that follows."""
    if parsed.kind == "message":
        played.said.append(parsed.text)
        answer = played.heard(await scene.user.reply(parsed.text))
        if answer.stops:
            played.stop_reason = "user_stop"
        return {"role": "user", "content": storable(answer.text)}
    if parsed.kind == "malformed":
        problem = str(parsed.problem)
        content = f"Error: {parsed.explanation}."
        return {"role": "tool", "content": content, "tool_error": problem}
    result = scene.world.call(str(parsed.name), parsed.arguments)
    played.tool_calls += 1
    played.tool_errors += result.error is not None
    played.ignored_calls += parsed.extra_calls
    if result.error is not None:
        played.outcomes.append("unknown_tool" if result.unknown else "failed_call")
    if result.ends:
        played.stop_reason = "tool_stop"
    content = result.text
    if parsed.extra_calls:
        content += f"\nError: one call per turn; {parsed.extra_calls} more not executed."
    observation = {"role": "tool", "content": storable(content), "tool_name": str(parsed.name)}
    if result.error is not None:
        observation["tool_error"] = result.error
    return observation


def _end_turn(played: _Play, reply: SampledSequence, renderer: ChatRenderer) -> None:
    """Put the end token behind a turn if the service stopped there without returning it."""
    stop = renderer.stop_tokens()
    if not reply.tokens or reply.tokens[-1] not in stop:
        played.log.observe(stop[:1], turn=played.turns[-1].turn)


def _room(log: TokenLog, settings: EpisodeSettings, item_id: str) -> int:
    """New tokens that still fit into the sequence."""
    if settings.max_seq_len is None:
        return settings.max_tokens
    room = settings.max_seq_len - len(log)
    if room < 1 and True not in log.loss_mask:
        raise EnvInputError(
            f"first prompt of task {item_id}",
            f"{len(log)} tokens",
            f"fewer than max_seq_len {settings.max_seq_len}",
        )
    return room


def _observed(
    turn: int,
    role: str,
    content: str,
    bounds: tuple[int, int],
    *,
    tool_name: str | None = None,
    tool_error: str | None = None,
) -> Turn:
    return Turn(
        turn=turn,
        role=role,
        content=storable(content),
        token_start=bounds[0],
        token_end=bounds[1],
        tool_name=None if tool_name is None else storable(tool_name),
        tool_error=None if tool_error is None else storable(tool_error),
    )


def _episode(
    scene: Scene,
    played: _Play,
    native: float,
    judgement: Judgement,
    failure: EnvServiceError | None,
    *,
    renderer: ChatRenderer,
) -> Episode:
    """Put tokens, turns and grades together."""
    graded = failure is None
    scores = {name: float(judgement.scores[name]) for name in DIMENSIONS}
    metrics = {
        "composite_rubric_score": judgement.composite,
        scene.native_metric: native if graded else nan,
        **scores,
    }
    system = renderer.system_tokens(played.log.tokens) if played.log.tokens else 0
    return Episode(
        item_id=scene.item_id,
        tokens=tuple(played.log.tokens),
        loss_mask=tuple(played.log.loss_mask),
        sampling_logprobs=tuple(played.log.sampling_logprobs),
        turn_of_token=tuple(played.log.turn_of_token),
        reward=scene.reward_of(native, judgement) if graded else nan,
        native_reward=native if graded else None,
        correct=native == 1.0 if graded else None,
        metrics=metrics if graded else {},
        stop_reason=played.stop_reason,
        truncated=played.stop_reason not in FINISHED,
        graded=graded,
        text="\n".join(turn.content for turn in played.turns if turn.role == "assistant"),
        turns=tuple(played.turns),
        parse_failures=played.parse_failures,
        tool_calls=played.tool_calls,
        tool_errors=played.tool_errors,
        info={
            "system_tokens": system,
            "ignored_calls": played.ignored_calls,
            "rationale": storable(judgement.rationale),
            "judge_attempts": judgement.attempts,
            "judge_failures": list(judgement.failures),
            "simulator_attempts": played.simulator_attempts,
            "outcomes": counted(played.outcomes),
            "failure": None if failure is None else storable(str(failure)),
            "failed_partner": None if failure is None else failure.partner,
        },
    )


def _json(arguments: Mapping[str, Any]) -> str:
    """Arguments as JSON text with sorted keys; non-ASCII characters are escaped."""
    return json.dumps(arguments, sort_keys=True)
