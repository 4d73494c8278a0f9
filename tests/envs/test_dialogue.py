"""Conversations: token-exact sequences, one outcome for every turn, limits, failures."""

import asyncio
import itertools
import math
from dataclasses import dataclass, field

import pytest

from envs.conversation import Judgement, ToolResult, UserReply, storable
from envs.dialogue import Scene, play, turn_seed
from envs.errors import EnvInputError, EnvServiceError
from envs.protocols import EpisodeSettings, SampledSequence
from envs.rendering import make_renderer

SCORES = {"invalid_tool_use": 1.0, "ungrounded_claims": 0.5, "upfront_clarification": 0.0}
CALL = '<tool_call>{"name": "look", "arguments": {"q": "a"}}</tool_call>'


@dataclass
class FakeWorld:
    calls: list = field(default_factory=list)

    def call(self, name, arguments):
        self.calls.append((name, dict(arguments)))
        if name == "end":
            return ToolResult("bye", ends=True)
        if name != "look":
            return ToolResult("Error: unknown tool.", error="unknown tool")
        return ToolResult("seen")

    def reward(self, said):
        return 1.0


@dataclass
class FakeUser:
    replies: list

    async def first(self):
        return UserReply("Hi", stops=False)

    async def reply(self, agent_text):
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return UserReply(reply, stops="###STOP###" in reply)


class FakeJudge:
    def __init__(self, error=None):
        self.error, self.seen = error, []

    async def judge(self, transcript):
        self.seen.append(transcript)
        if self.error is not None:
            raise self.error
        return Judgement(scores=SCORES, rationale="Because.")


def scene(replies=(), judge=None, world=None):
    return Scene(
        item_id="t",
        system="Be brief.",
        world=world or FakeWorld(),
        user=FakeUser(list(replies)),
        judge=judge or FakeJudge(),
        reward_of=lambda native, judgement: judgement.composite,
        native_metric="task_reward",
    )


def run(played, sampler, renderer, **settings):
    settings = EpisodeSettings(**({"max_tokens": 500, "max_turns": 6} | settings))
    return asyncio.run(play(played, sampler, renderer=renderer, settings=settings, seed=5))


def test_sequence_is_prompt_and_sampled_tokens_as_they_were(renderer, scripted):
    """Two words, a call, and a goodbye: the text of all tokens is the conversation as rendered."""
    sampler = scripted(["Email?", f"One moment. {CALL}", "Bye"])

    found = run(scene(["a@b.c", "###STOP###"]), sampler, renderer)

    assert renderer.decode(found.tokens) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nEmail?<|im_end|>\n"
        "<|im_start|>user\na@b.c<|im_end|>\n"
        f"<|im_start|>assistant\nOne moment. {CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nseen\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nBye<|im_end|>"
    )
    assert found.stop_reason == "user_stop"
    assert found.reward == pytest.approx(0.5)
    assert found.metrics["task_reward"] == 1.0
    sampled = [token for token, mask in zip(found.tokens, found.loss_mask, strict=True) if mask]
    assert renderer.decode(sampled) == f"Email?<|im_end|>One moment. {CALL}<|im_end|>Bye<|im_end|>"


def test_every_prompt_extends_what_was_sampled_before(renderer, scripted):
    """Prompt n + 1 starts with prompt n and its sampled tokens, whatever they look like."""
    odd = [
        "  \n Email?\n\n",
        f"x{CALL}{CALL}",
        '<tool_call>{"name":"look","arguments":{}}',
        "é漢🙂",
        "end",
    ]
    sampler = scripted(odd)

    found = run(scene(["a", "b", "###STOP###"]), sampler, renderer)

    prompts = [request["prompt_tokens"] for request in sampler.requests]
    assert len(prompts) == 5
    for earlier, later in itertools.pairwise(prompts):
        assert later[: len(earlier)] == earlier
    assert found.tokens[: len(prompts[-1])] == prompts[-1]


def test_turn_columns_name_the_agent_turn_of_every_token(renderer, scripted):
    found = run(scene(["a", "###STOP###"]), scripted(["1", "2"]), renderer)

    pairs = set(zip(found.turn_of_token, found.loss_mask, strict=True))
    assert pairs == {(0, False), (0, True), (1, False), (1, True)}
    assert found.agent_turns == 2
    for turn in found.turns:
        if turn.role == "assistant":
            assert all(found.loss_mask[turn.token_start : turn.token_end])


def test_turns_have_seeds_of_their_own(renderer, scripted):
    sampler = scripted(["1", "2"])

    run(scene(["a", "###STOP###"]), sampler, renderer)

    assert [request["seed"] for request in sampler.requests] == [turn_seed(5, 0), turn_seed(5, 1)]
    assert turn_seed(5, 0) != turn_seed(5, 1) != turn_seed(6, 1)


@pytest.mark.parametrize(
    ("reply", "problem", "answer"),
    [
        (
            "<tool_call>{]</tool_call>",
            "bad_json",
            "Error: the text after <tool_call> is not valid JSON.",
        ),
        ("", "empty", "Error: the reply was empty."),
        (
            "<function=look>",
            "unknown_form",
            "Error: this form of call is not known here.",
        ),
        ("x" * 100_001, "too_long", "Error: the reply has more than 100000 characters."),
    ],
)
def test_unreadable_turn_is_answered_with_an_error_and_counted(
    renderer, scripted, reply, problem, answer
):
    """Nothing is executed, the user is not asked, and the conversation goes on."""
    world = FakeWorld()

    found = run(
        scene(["###STOP###"], world=world),
        scripted([reply, "Sorry."]),
        renderer,
        max_tokens=200_000,
    )

    assert world.calls == []
    assert found.parse_failures == 1
    assert (found.turns[1].tool_error, found.turns[2].role, found.turns[2].content) == (
        problem,
        "tool",
        answer,
    )
    assert found.stop_reason == "user_stop"


def test_unknown_tool_and_second_call_are_counted(renderer, scripted):
    world = FakeWorld()
    two = CALL + '<tool_call>{"name": "write", "arguments": {}}</tool_call>'
    unknown = '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'

    found = run(scene(["###STOP###"], world=world), scripted([two, unknown, "Bye"]), renderer)

    assert world.calls == [("look", {"q": "a"}), ("fly", {})]
    assert (found.tool_calls, found.tool_errors, found.info["ignored_calls"]) == (2, 1, 1)
    assert found.turns[2].content == "seen\nError: one call per turn; 1 more not executed."
    assert found.turns[4].tool_error == "unknown tool"


def test_close_tag_inside_a_string_reaches_the_tool(renderer, scripted):
    world = FakeWorld()
    reply = '<tool_call>{"name": "look", "arguments": {"q": "a </tool_call> b"}}</tool_call>'

    run(scene(["###STOP###"], world=world), scripted([reply, "Bye"]), renderer)

    assert world.calls == [("look", {"q": "a </tool_call> b"})]


def test_call_with_a_lone_surrogate_is_not_executed(renderer, scripted):
    """No database hash and no tokenizer takes half a character pair, so no tool gets one."""
    world = FakeWorld()
    reply = '<tool_call>{"name": "look", "arguments": {"q": "\\udc00"}}</tool_call>'

    found = run(scene(["###STOP###"], world=world), scripted([reply, "Bye"]), renderer)

    assert world.calls == []
    assert (found.turns[1].tool_error, found.turns[1].content) == ("bad_text", reply)
    assert found.info["outcomes"] == {"bad_text": 1, "no_call": 1}


def test_lone_surrogate_in_a_turn_is_an_escape_for_everyone(renderer, scripted, monkeypatch):
    """A tokenizer that decodes to half a pair: user, judge and tables get the escape."""
    monkeypatch.setattr(type(renderer), "turn_text", lambda self, tokens: "a\ud83d")
    played = scene(["###STOP###"])
    heard = []
    played.user.reply = lambda text: heard.append(text) or FakeUser(["###STOP###"]).reply(text)

    found = run(played, scripted(["x"]), renderer)

    assert heard == ["a\\ud83d"]
    assert found.turns[1].content == "a\\ud83d"
    assert found.info["outcomes"] == {"lone_surrogate": 1, "no_call": 1}
    assert storable("a\ud83d") == "a\\ud83d"


def test_tool_that_ends_the_conversation_ends_it_graded(renderer, scripted):
    reply = '<tool_call>{"name": "end", "arguments": {}}</tool_call>'

    found = run(scene(), scripted([reply]), renderer)

    assert (found.stop_reason, found.truncated, found.native_reward) == ("tool_stop", False, 1.0)
    assert found.loss_mask[-1]


def test_turn_cap_is_graded_as_unfinished(renderer, scripted):
    """The task reward is 0 whatever the world looks like; the judge still scores."""
    found = run(scene(["a", "b"]), scripted(["1", "2"]), renderer, max_turns=2)

    assert (found.stop_reason, found.truncated, found.native_reward) == ("max_turns", True, 0.0)
    assert found.reward == pytest.approx(0.5)


def test_cut_turn_is_not_acted_on(renderer, scripted):
    world = FakeWorld()

    found = run(scene(world=world), scripted([(CALL, "length")]), renderer)

    assert (found.stop_reason, found.truncated, found.parse_failures) == ("turn_length", True, 1)
    assert world.calls == []
    assert found.turns[-1].tool_error == "cut"


def test_full_sequence_ends_the_episode(renderer, scripted):
    """The first prompt has 76 tokens; with room for three more the reply is cut there."""
    first = renderer.prompt(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    sampler = scripted([("Ema", "length")])

    found = run(scene(), sampler, renderer, max_seq_len=len(first) + 3)

    assert sampler.requests[0]["max_tokens"] == 3
    assert (found.stop_reason, found.truncated) == ("max_seq_len", True)


def test_sequence_without_room_for_a_turn_ends_before_it(renderer, scripted):
    """The second prompt is longer than the limit: one turn was taken, none is asked for."""
    first = renderer.prompt(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    sampler = scripted(["1"])

    found = run(scene(["long" * 10]), sampler, renderer, max_seq_len=len(first) + 10)

    assert len(sampler.requests) == 1
    assert (found.stop_reason, found.agent_turns) == ("max_seq_len", 1)
    assert len(found.tokens) <= len(first) + 10
    assert found.turns[-1].content == "long" * 10


@pytest.mark.parametrize("replies", [[("Ema", "length")], ["1", "2"]])
def test_sequence_that_does_not_fit_is_an_error_where_the_policy_says_so(
    renderer, scripted, replies
):
    """Cut in a turn, or by what the user says to it."""
    first = renderer.prompt(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )

    with pytest.raises(EnvInputError, match="episode of task t is 'cut at max_seq_len"):
        run(
            scene(["long" * 10]),
            scripted(replies),
            renderer,
            max_seq_len=len(first) + 3,
            max_seq_len_policy="fail",
        )


def test_first_prompt_that_does_not_fit_is_refused(renderer, scripted):
    with pytest.raises(EnvInputError, match="first prompt of task t"):
        run(scene(), scripted([]), renderer, max_seq_len=20)


def test_failed_judge_gives_no_score(renderer, scripted):
    judge = FakeJudge(EnvServiceError("judge", "prose", 3))

    found = run(scene(["###STOP###"], judge=judge), scripted(["Bye"]), renderer)

    assert not found.graded
    assert math.isnan(found.reward)
    assert (found.metrics, found.native_reward, found.correct) == ({}, None, None)
    assert found.info["failure"] == "judge failed after 3 attempts: prose"
    assert found.stop_reason == "user_stop"


def test_failed_user_gives_no_score_and_the_judge_is_not_asked(renderer, scripted):
    judge = FakeJudge()

    found = run(
        scene([EnvServiceError("simulator", "empty", 3)], judge=judge),
        scripted(["Email?"]),
        renderer,
    )

    assert (found.graded, found.stop_reason, judge.seen) == (False, "user_failed", [])


def test_judge_sees_policy_and_turns_and_no_reward(renderer, scripted):
    judge = FakeJudge()

    run(scene(["###STOP###"], judge=judge), scripted(["Bye"]), renderer)

    (transcript,) = judge.seen
    assert transcript.policy == "Be brief."
    assert [turn.role for turn in transcript.turns] == ["user", "assistant", "user"]


def test_end_token_is_added_where_the_service_leaves_it_out(renderer):
    """A service that stops at the token without returning it: the token is there, not trained."""

    class Bare:
        async def sample(self, prompt_tokens, **settings):
            return [SampledSequence(tokens=[3 + ord("a")], logprobs=[-1.0], stop_reason="stop")]

    found = run(scene(["b", "###STOP###"]), Bare(), renderer)

    assert "assistant\na<|im_end|>\n<|im_start|>user\nb<|im_end|>" in renderer.decode(found.tokens)
    assert found.completion_tokens == 2


def test_system_message_is_bounded_for_rescoring(renderer, scripted):
    found = run(scene(["###STOP###"]), scripted(["Bye"]), renderer)

    system = found.tokens[: found.info["system_tokens"]]
    assert renderer.decode(system) == "<|im_start|>system\nBe brief.<|im_end|>"


@pytest.mark.parametrize("name", ["qwen3_instruct", "qwen3_disable_thinking"])
def test_continuation_equals_the_rendered_difference(tokenizer, name):
    """For a canonical history, appending gives what rendering everything would give."""
    renderer = make_renderer(name, tokenizer)
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompt = renderer.prompt(history)
    sampled = [*renderer.encode("Hello"), *renderer.stop_tokens()]

    appended = [*prompt, *sampled, *renderer.continuation({"role": "user", "content": "v"})]

    full = [*history, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "v"}]
    if name == "qwen3_instruct":
        assert appended == list(renderer.prompt(full))
    assert renderer.decode(appended).endswith(renderer.decode(renderer.prompt(full))[-40:])
