"""Served users and judges: strict reading, retries, failures that never become scores."""

import asyncio
import json
import time
from dataclasses import replace

import pytest

from envs.conversation import DIMENSIONS, Transcript
from envs.errors import EnvInputError, EnvServiceError
from envs.protocols import SampledSequence, Turn
from envs.rendering import ParsedReply, make_renderer
from envs.served import AnswerError, Partner, make_partner
from envs.served_judge import ServedJudge, judge_prompt, read_judgement
from envs.served_user import ServedUser, read_user_message

GOOD = {
    "invalid_tool_use": 1,
    "ungrounded_claims": 0.5,
    "upfront_clarification": 0.0,
    "rationale": "Ask first.",
}
SETTINGS = {
    "kind": "served",
    "model": "m",
    "prompt_template": "t",
    "renderer": "qwen3_instruct",
    "temperature": 0.0,
    "max_tokens": 64,
    "max_attempts": 3,
}


def partner(renderer, sampler, role="judge"):
    return Partner(
        role=role,
        model="m",
        prompt_template="t",
        sampler=sampler,
        renderer=renderer,
        temperature=0.0,
        max_tokens=64,
    )


def test_judgement_is_read_and_averaged(renderer, scripted):
    judge = ServedJudge(partner(renderer, scripted([json.dumps(GOOD)])))

    found = asyncio.run(judge.judge(Transcript("p", ())))

    assert [found.scores[name] for name in DIMENSIONS] == [1.0, 0.5, 0.0]
    assert (found.composite, found.rationale, found.attempts) == (0.5, "Ask first.", 1)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(GOOD),
        f"  {json.dumps(GOOD, indent=2)}\n",
        f"```json\n{json.dumps(GOOD)}\n```",
        f"```\n{json.dumps(GOOD)}\n```",
    ],
)
def test_plain_and_fenced_json_are_read(text):
    assert read_judgement(text)[1] == "Ask first."


def test_answer_of_nothing_but_lines_is_refused_at_once():
    """A model that runs into repetition writes newlines to the end."""
    started = time.perf_counter()

    with pytest.raises(AnswerError):
        read_judgement("```" + "\n" * 19_990)

    assert time.perf_counter() - started < 1.0


def without(name):
    return json.dumps({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("The agent did well.", "not one JSON object"),
        ("", "not one JSON object"),
        (f"Here it is: {json.dumps(GOOD)}", "not one JSON object"),
        (json.dumps(GOOD) * 2, "not one JSON object"),
        (json.dumps([GOOD]), "not one JSON object"),
        ("[" * 5000, "not one JSON object"),
        (without("ungrounded_claims"), "ungrounded_claims is missing"),
        (without("rationale"), "rationale is not a text"),
        (json.dumps(GOOD | {"politeness": 1.0}), "politeness is no dimension of the rubric"),
        (json.dumps(GOOD | {"invalid_tool_use": 1.2}), r"invalid_tool_use is outside \[0, 1\]"),
        (json.dumps(GOOD | {"invalid_tool_use": -0.1}), r"invalid_tool_use is outside \[0, 1\]"),
        (
            json.dumps(GOOD | {"invalid_tool_use": float("nan")}),
            "not one JSON object",
        ),
        (json.dumps(GOOD | {"invalid_tool_use": 10**400}), r"invalid_tool_use is outside \[0, 1\]"),
        (json.dumps(GOOD | {"invalid_tool_use": "1.0"}), "invalid_tool_use is not a number"),
        (json.dumps(GOOD | {"invalid_tool_use": True}), "invalid_tool_use is not a number"),
        (json.dumps(GOOD | {"invalid_tool_use": None}), "invalid_tool_use is not a number"),
        (json.dumps(GOOD | {"rationale": ["x"]}), "rationale is not a text"),
        (json.dumps(GOOD | {"rationale": "  "}), "rationale is not a text"),
        ("x" * 30_000, "an answer of 30000 characters"),
    ],
)
def test_anything_else_is_no_judgement(text, problem):
    with pytest.raises(AnswerError, match=problem):
        read_judgement(text)


def test_bad_answers_are_asked_again_with_other_seeds(renderer, scripted):
    """Greedy first; later attempts sample, since a greedy model would only repeat itself."""
    sampler = scripted(["prose", json.dumps(GOOD)])

    found = asyncio.run(ServedJudge(partner(renderer, sampler)).judge(Transcript("p", ())))

    assert (found.attempts, found.problems) == (2, ("judge_prose",))
    assert found.failures[0].startswith("not one JSON object")
    assert [request["temperature"] for request in sampler.requests] == [0.0, 0.5]
    assert sampler.requests[0]["seed"] != sampler.requests[1]["seed"]
    assert sampler.requests[0]["prompt_tokens"] == sampler.requests[1]["prompt_tokens"]


def test_judge_that_never_answers_is_a_failure_of_the_service(renderer, scripted):
    sampler = scripted(["prose", (json.dumps(GOOD), "length"), "{}"])

    with pytest.raises(EnvServiceError) as caught:
        asyncio.run(ServedJudge(partner(renderer, sampler)).judge(Transcript("p", ())))

    assert str(caught.value) == (
        "judge failed after 3 attempts: not one JSON object (Expecting value: line 1 column 1 "
        "(char 0)); cut at the length limit; invalid_tool_use is missing"
    )
    assert caught.value.problems == ("judge_prose", "judge_cut", "judge_missing_dimension")


class Strips:
    """Answers without the stop token at which the service stopped."""

    def __init__(self, renderer, answers):
        self._renderer, self._answers = renderer, list(answers)

    async def sample(self, prompt_tokens, **settings):
        text, stop_reason = self._answers.pop(0)
        tokens = self._renderer.encode(text)
        return [SampledSequence(tokens, [-0.5] * len(tokens), stop_reason)]


def test_answer_whose_stop_token_the_service_left_out_is_whole(renderer):
    """One that is cut has none either, and says so."""
    sampler = Strips(renderer, [(json.dumps(GOOD)[:-1], "length"), (json.dumps(GOOD), "stop")])

    found = asyncio.run(ServedJudge(partner(renderer, sampler)).judge(Transcript("p", ())))

    assert (found.rationale, found.problems) == ("Ask first.", ("judge_cut",))


def test_reasoning_is_told_from_the_answer_without_the_stop_token(tokenizer, scripted):
    """A renderer that reads nothing but text where it sees no end would show the reasoning."""
    thinking = make_renderer("qwen3", tokenizer)
    sampler = Strips(thinking, [("<think>\nHe is rude.\n</think>\n\nI want it.", "stop")])
    user = ServedUser(partner(thinking, sampler, "simulator"), system="s")

    assert asyncio.run(user.first()).text == "I want it."


class NeverEnds:
    """A renderer that finds no end of an answer, whatever stands there."""

    def prompt(self, messages):
        return (1,)

    def stop_tokens(self):
        return [2]

    def parse(self, tokens):
        return ParsedReply("I want it.", stopped=False)


def test_answer_without_an_end_is_called_cut_only_where_the_service_cut_it(renderer):
    sampler = Strips(renderer, [("I want it.", "length"), *[("I want it.", "stop")] * 2])

    with pytest.raises(EnvServiceError) as caught:
        asyncio.run(ServedUser(partner(NeverEnds(), sampler, "simulator"), system="s").first())

    assert caught.value.problems == (
        "simulator_cut",
        "simulator_unreadable",
        "simulator_unreadable",
    )


def test_round_after_a_failed_one_asks_with_new_seeds(renderer, scripted):
    """A greedy judge fails the same way for ever; the planned first attempt stays the same."""
    rounds = []
    for failed in (0, 1, 2):
        sampler = scripted(["prose"] * 3)
        asked = replace(partner(renderer, sampler), retries_before=2 * failed)
        with pytest.raises(EnvServiceError):
            asyncio.run(ServedJudge(asked).judge(Transcript("p", ())))
        rounds.append([request["seed"] for request in sampler.requests])

    assert len({seeds[0] for seeds in rounds}) == 1
    assert len({seed for seeds in rounds for seed in seeds}) == 1 + 3 * 2


def test_failed_rounds_are_told_to_a_partner(tokenizer, scripted):
    made = make_partner(
        "judge", SETTINGS, sampler=scripted([]), tokenizer=tokenizer, failed_rounds=3
    )

    assert made.retries_before == 6


def test_judge_prompt_holds_policy_and_conversation_and_is_the_same_every_day():
    turns = (
        Turn(turn=0, role="user", content="100% sure?", token_start=0, token_end=1),
        Turn(turn=0, role="assistant", content="Yes.", token_start=1, token_end=2),
        Turn(turn=1, role="tool", content="{}", token_start=2, token_end=3),
    )

    text = judge_prompt(Transcript("Be nice.", turns))

    assert "===== POLICY =====\nBe nice.\n" in text
    assert "USER: 100% sure?\nAGENT: Yes.\nTOOL RESULT: {}\n===== END =====" in text
    assert text == judge_prompt(Transcript("Be nice.", turns))


def test_user_sees_the_conversation_from_its_side(renderer, scripted):
    sampler = scripted(["I want it.", "Yes."])
    user = ServedUser(partner(renderer, sampler, "simulator"), system="You are Amy.")

    async def talk():
        return await user.first(), await user.reply("Sure?")

    first, second = asyncio.run(talk())

    assert (first.text, second.text, second.stops) == ("I want it.", "Yes.", False)
    assert renderer.decode(sampler.requests[1]["prompt_tokens"]) == (
        "<|im_start|>system\nYou are Amy.<|im_end|>\n"
        "<|im_start|>user\nHi! How can I help you today?<|im_end|>\n"
        "<|im_start|>assistant\nI want it.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_user_that_stops_before_the_first_message_is_asked_again(renderer, scripted):
    sampler = scripted(["###STOP###", "I want it."])

    first = asyncio.run(ServedUser(partner(renderer, sampler, "simulator"), system="s").first())

    assert (first.text, first.stops, len(sampler.requests)) == ("I want it.", False, 2)


def test_user_that_only_stops_is_a_failure(renderer, scripted):
    sampler = scripted(["###STOP###"] * 3)

    with pytest.raises(EnvServiceError, match="simulator failed after 3 attempts"):
        asyncio.run(ServedUser(partner(renderer, sampler, "simulator"), system="s").first())


@pytest.mark.parametrize(
    ("text", "opening", "problem"),
    [("", False, "empty"), ("  \n", True, "empty"), ("x" * 9000, False, "9000 characters")],
)
def test_unusable_user_messages(text, opening, problem):
    with pytest.raises(AnswerError, match=problem):
        read_user_message(text, opening=opening)


def test_stop_text_ends_a_conversation_that_has_begun(renderer, scripted):
    sampler = scripted(["I want it.", "Thanks! ###STOP###"])
    user = ServedUser(partner(renderer, sampler, "simulator"), system="s")

    async def talk():
        await user.first()
        return await user.reply("Done.")

    assert asyncio.run(talk()).stops


def test_partner_is_built_from_the_execution_files_section(tokenizer, scripted):
    found = make_partner("judge", SETTINGS, sampler=scripted([]), tokenizer=tokenizer)

    assert found.provenance()["renderer"] == "qwen3_instruct"
    assert (found.max_attempts, found.temperature) == (3, 0.0)


def test_renderer_that_prints_the_date_needs_one(tokenizer, scripted):
    """The judge's prompt must not change overnight."""
    settings = SETTINGS | {"renderer": "gpt_oss_low_reasoning"}

    with pytest.raises(EnvInputError, match=r"judge.current_date is None"):
        make_partner("judge", settings, sampler=scripted([]), tokenizer=tokenizer)
    found = make_partner(
        "judge",
        settings | {"current_date": "2026-01-01"},
        sampler=scripted([]),
        tokenizer=tokenizer,
    )

    assert found.renderer.renderer.current_date == "2026-01-01"
    assert "Current date: 2026-01-01" in found.renderer.decode(
        found.renderer.prompt([{"role": "user", "content": "a"}])
    )


def test_other_kinds_are_not_partners(tokenizer, scripted):
    with pytest.raises(EnvInputError, match=r"judge.kind is 'rules'"):
        make_partner("judge", {"kind": "rules"}, sampler=scripted([]), tokenizer=tokenizer)
