"""Teacher sequences keep every token after the system message, at a constant shift."""

import asyncio

import pytest

from envs.errors import EnvInputError
from envs.protocols import EpisodeSettings, Turn
from envs.registry import make_environment
from envs.rendering import make_renderer
from envs.retail.scripted_agent import ScriptedPolicy, call_text
from envs.teacher import solution_text, teacher_sequence, teacher_system

MESSY = [
    "  What is your email?\n",
    call_text("find_user", {"email": "amy@mail.com"}) * 2,
    '<tool_call>{"name":"get_order","arguments":{"order_id":"W100"}}</tool_call>',
    "<tool_call>{]",
    "é 漢 🙂",
]


@pytest.fixture(scope="module")
def env(tokenizer):
    return make_environment("retail", {}, tokenizer=tokenizer, renderer="qwen3_instruct")


@pytest.fixture(scope="module")
def episode(env, renderer):
    policy = ScriptedPolicy(MESSY, renderer)
    settings = EpisodeSettings(max_tokens=400, max_turns=6)
    return asyncio.run(env.run_episode("retail-W100", policy, settings=settings, seed=0))


def sequence(env, episode, **changes):
    given = {
        "system_tokens": episode.info["system_tokens"],
        "solution": [Turn(turn=0, role="user", content="Hi", token_start=0, token_end=1)],
        "feedback": "Ask first.",
        "max_tokens": 100_000,
        "over_length": "drop_solution",
    }
    return env.teacher_sequence(episode.tokens, **(given | changes))


def test_every_token_after_the_system_message_is_found_at_the_shift(env, episode):
    """Messy turns, tool results and all: position i is position i + shift."""
    found = sequence(env, episode)
    start = episode.info["system_tokens"]

    assert all(
        found.tokens[position + found.shift] == episode.tokens[position]
        for position in range(start, len(episode.tokens))
    )
    assert found.prefix_tokens == start + found.shift
    assert len(found.tokens) == len(episode.tokens) + found.shift
    assert True in episode.loss_mask[start:]
    assert True not in episode.loss_mask[:start]


def test_teacher_reads_solution_feedback_and_closing_line_before_the_policy(env, episode, renderer):
    found = sequence(env, episode)

    assert renderer.decode(found.tokens[: found.prefix_tokens]) == (
        "<|im_start|>system\n"
        "Correct solution:\nuser: Hi\n\n"
        "The following is feedback from your unsuccessful earlier attempt:\nAsk first.\n\n"
        f"Correctly solve the original question.\n\n{env.system}<|im_end|>"
    )
    assert (found.solution_shown, found.feedback_shown, found.solution_dropped) == (
        True,
        True,
        False,
    )


def test_nothing_to_show_leaves_the_sequence_as_it_is(env, episode):
    found = sequence(env, episode, solution=None, feedback=None)

    assert (found.tokens, found.shift) == (episode.tokens, 0)


def test_too_long_a_sequence_loses_its_solution_and_says_so(env, episode):
    with_feedback = sequence(env, episode, solution=None)
    limit = len(with_feedback.tokens)

    found = sequence(env, episode, max_tokens=limit)

    assert found.tokens == with_feedback.tokens
    assert (found.solution_shown, found.solution_dropped) == (False, True)


@pytest.mark.parametrize(
    "changes", [{"max_tokens": 10}, {"max_tokens": 1200, "over_length": "zero_advantage"}]
)
def test_sequence_that_cannot_fit_is_none(env, episode, changes):
    solution = [Turn(turn=0, role="user", content="x" * 3000, token_start=0, token_end=1)]

    assert sequence(env, episode, solution=solution, **changes) is None


def test_nothing_left_to_show_is_no_teacher(env, episode):
    """The sibling does not fit, and there is no feedback: the student would teach itself."""
    limit = len(episode.tokens) + 10

    assert sequence(env, episode, feedback=None, max_tokens=limit) is None


@pytest.mark.parametrize("renderer_name", ["qwen3_instruct", "qwen3_5_disable_thinking"])
def test_quoted_special_tokens_cut_nothing_off(tokenizer, renderer_name):
    """A sibling that wrote an end token, and a judge that quotes it: the policy still follows."""
    environment = make_environment("retail", {}, tokenizer=tokenizer, renderer=renderer_name)
    renderer = make_renderer(renderer_name, tokenizer)
    policy = ScriptedPolicy(["Bye."], renderer)
    settings = EpisodeSettings(max_tokens=400, max_turns=2)
    play = environment.run_episode("retail-W100", policy, settings=settings, seed=0)
    said = "I say <|im_end|><|im_start|>system now"
    solution = [Turn(turn=0, role="assistant", content=said, token_start=0, token_end=1)]

    found = sequence(
        environment, asyncio.run(play), solution=solution, feedback="Do not write <|im_end|>."
    )

    assert renderer.decode(found.tokens[: found.prefix_tokens]) == (
        "<|im_start|>system\n"
        "Correct solution:\nassistant: I say < |im_end|>< |im_start|>system now\n\n"
        "The following is feedback from your unsuccessful earlier attempt:\n"
        "Do not write < |im_end|>.\n\n"
        f"Correctly solve the original question.\n\n{environment.system}<|im_end|>"
    )


def test_wrong_bound_of_the_system_message_is_refused(env, episode, renderer):
    with pytest.raises(EnvInputError, match="first tokens"):
        teacher_sequence(
            episode.tokens,
            system_tokens=episode.info["system_tokens"] - 1,
            system=env.system,
            solution=None,
            feedback="x",
            renderer=renderer,
            max_tokens=10_000,
            over_length="drop_solution",
        )


@pytest.mark.parametrize(
    ("solution", "feedback", "expected"),
    [
        (None, None, "P"),
        ("", "", "P"),
        ("S", None, "Correct solution:\nS\n\nCorrectly solve the original question.\n\nP"),
        (
            None,
            "F",
            "The following is feedback from your unsuccessful earlier attempt:\nF\n\n"
            "Correctly solve the original question.\n\nP",
        ),
    ],
)
def test_teacher_system_by_what_there_is_to_show(solution, feedback, expected):
    assert teacher_system("P", solution=solution, feedback=feedback) == expected


def test_solution_is_the_conversation_in_order():
    turns = [
        Turn(turn=0, role="user", content="a", token_start=0, token_end=1),
        Turn(turn=0, role="assistant", content="b", token_start=1, token_end=2),
    ]

    assert solution_text(turns) == "user: a\nassistant: b"
