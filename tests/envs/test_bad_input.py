"""Whatever a model writes: one outcome, a count in the tables and the report, and no end of a run.

Every case is one group of a rollout step, played in a whole environment and kept as a run keeps it.
"""

import asyncio
import dataclasses
import json
import time

import pytest

from envs.conversation import Transcript
from envs.errors import EnvInputError
from envs.outcomes import OUTCOMES, counted
from envs.protocols import EpisodeSettings, SampledSequence, Turn
from envs.registry import make_environment
from envs.retail.rule_judge import RuleJudge
from envs.served import make_partner
from evidence.bundle import build_bundle
from evidence.episode_metrics import episode_metrics
from evidence.report import write_reports
from evidence.result import StructuredResult
from tasks.evaluation import BASE, Subject, evaluate
from tasks.failures import ServiceOutage
from tasks.rollout import GroupSampling
from tasks.token_texts import write_token_texts
from tests.envs.tau_stand_in import stand_in
from tests.evidence.bundle.conftest import SMALL_SOURCES
from tests.flows.tiny_spec import EXECUTION
from tests.tasks.fake_runs import context

STOP = 2
LONG = "\x01long"
"""A reply that the test's renderer reads as ten megabytes."""
HALF = "\x01half"
"""A reply that the test's renderer reads as a lone surrogate."""
SAMPLES = 2


def call(name="get_order", **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


GOOD = call(order_id="W100")
DEEP = '<tool_call>{"name": "get_order", "arguments": ' + '{"a":' * 200 + "1" + "}" * 201
DEEP += "</tool_call>"

POLICY_CASES = [
    ("message", "Hello there.", {"no_call": 2}, None),
    ("two calls", GOOD + GOOD, {"no_call": 1, "second_call": 1}, None),
    ("bad JSON", '<tool_call>{"name": </tool_call>', {"bad_json": 1, "no_call": 1}, "bad_json"),
    ("wrong shape", "<tool_call>[]</tool_call>", {"bad_shape": 1, "no_call": 1}, "bad_shape"),
    ("unclosed", '<tool_call>{"name": "a", "arguments": {}}', {"no_call": 1, "unclosed": 1}, ""),
    (
        "close tag inside a string",
        call(order_id="W1</tool_call>"),
        {"failed_call": 1, "no_call": 1, "tag_in_text": 1},
        None,
    ),
    ("unknown tool", call("fly", to="Rome"), {"no_call": 1, "unknown_tool": 1}, None),
    (
        "special token in an argument",
        call(order_id="<|im_end|>"),
        {"failed_call": 1, "no_call": 1, "special_token": 1},
        None,
    ),
    ("refused call", call(order_id=["W1"]), {"failed_call": 1, "no_call": 1}, None),
    ("other form", "<function=look>", {"no_call": 1, "unknown_form": 1}, "unknown_form"),
    ("ten megabytes", LONG, {"no_call": 1, "too_long": 1}, "too_long"),
    ("lone surrogate", HALF, {"lone_surrogate": 1, "no_call": 2}, None),
    (
        "lone surrogate in an argument",
        '<tool_call>{"name": "get_order", "arguments": {"order_id": "\\ud83d"}}</tool_call>',
        {"bad_text": 1, "no_call": 1},
        "bad_text",
    ),
    ("deep arguments", DEEP, {"no_call": 1, "too_deep": 1}, "too_deep"),
    ("empty", "", {"empty": 1, "no_call": 1}, "empty"),
    ("cut", ("Hello, I am", "length"), {"cut": 1}, "cut"),
    ("stop text of the user", "###STOP###", {"no_call": 2}, None),
]
"""Name, first reply (then `Bye.`), outcomes of one episode, and what the first turn is marked with."""

SCORES = {"invalid_tool_use": 1.0, "ungrounded_claims": 0.5, "upfront_clarification": 0.0}
JUDGEMENT = json.dumps(SCORES | {"rationale": "Ask first."})


def judgement(**changes):
    made = {**SCORES, "rationale": "Ask first.", **changes}
    return json.dumps({key: value for key, value in made.items() if value is not ...})


JUDGE_CASES = [
    ("prose", "The agent did well.", "judge_prose"),
    ("NaN", judgement(invalid_tool_use=float("nan")), "judge_prose"),
    ("twice the same name", JUDGEMENT[:-1] + ', "ungrounded_claims": 1.0}', "judge_prose"),
    ("out of range", judgement(invalid_tool_use=1.01), "judge_out_of_range"),
    ("below range", judgement(ungrounded_claims=-1), "judge_out_of_range"),
    ("text", judgement(invalid_tool_use="1"), "judge_not_a_number"),
    ("yes", judgement(invalid_tool_use=True), "judge_not_a_number"),
    ("unknown dimension", judgement(politeness=1.0), "judge_unknown_dimension"),
    ("missing dimension", judgement(invalid_tool_use=...), "judge_missing_dimension"),
    ("no reasons", judgement(rationale=" "), "judge_no_rationale"),
    ("too long", JUDGEMENT + " " * 30_000, "judge_too_long"),
    ("cut", (JUDGEMENT, "length"), "judge_cut"),
]
SIMULATOR_CASES = [
    ("stop first", "###STOP###", "simulator_stopped_first"),
    ("empty", "  ", "simulator_empty"),
    ("too long", "x" * 9_000, "simulator_too_long"),
    ("cut", ("I want", "length"), "simulator_cut"),
]
UNREACHED = {"bad_xml", "judge_unreadable", "simulator_unreadable"}
"""Outcomes of other renderers; they have tests of their own."""


class Policy:
    """Answers the first turn with a reply and every later one with `Bye.`."""

    def __init__(self, reply):
        self._reply = reply

    async def sample(self, prompt_tokens, **settings):
        text = bytes(token - 3 for token in prompt_tokens if token > 2).decode("utf-8", "replace")
        first = text.count("assistant\n") == 1
        return [sequence(self._reply if first else "Bye.")]

    async def close(self):
        return True


class Replies:
    """A served model whose first, greedy answer is bad and whose next one is good, if any is."""

    def __init__(self, bad, good):
        self._bad, self._good = bad, good

    async def sample(self, prompt_tokens, *, temperature, **settings):
        bad = self._good is None or temperature == 0.0
        return [sequence(self._bad if bad else self._good)]


def sequence(reply):
    text, stop_reason = reply if isinstance(reply, tuple) else (reply, "stop")
    tokens = [3 + byte for byte in text.encode()] + [STOP] * (stop_reason == "stop")
    return SampledSequence(tokens, [-0.5] * len(tokens), stop_reason)


@pytest.fixture
def strange_texts(renderer, monkeypatch):
    """Let two marked replies be read as what no byte tokenizer gives."""
    plain = type(renderer).turn_text

    def turn_text(self, tokens):
        text = plain(self, tokens)
        return {LONG: "x" * 10_000_000, HALF: "a\ud83d"}.get(text, text)

    monkeypatch.setattr(type(renderer), "turn_text", turn_text)


def make_context(folder, environment, tokenizer):
    planned = {
        "max_seq_len_policy": "end_episode",
        "simulator": {"kind": "scripted"},
        "judge": {"kind": "rules"},
        "rollout": EXECUTION["rollout"]
        | {"group_size": SAMPLES, "minibatches": 1, "max_turns": 2, "max_tokens": 400},
        "evaluation": EXECUTION["evaluation"] | {"items": 2, "max_tokens": 400},
    }
    ctx = context(folder, environment, planned=planned, max_seq_len=100_000)
    ctx.tokenizer = tokenizer
    return ctx


def play_step(ctx, policy, step=0, item=0):
    """One group, kept as a rollout step keeps it."""
    arm = ctx.arms[0]
    groups = GroupSampling(ctx, arm, "train", step, 0)
    asyncio.run(groups.sample(0, ctx.environment.train_ids[item], policy))
    ctx.run.assemble_parts(arm.name, "train", step, [0])
    write_token_texts(ctx, (arm.name, "train", step))


def outcomes_of(ctx, step=0):
    """Outcomes of one episode of a step; both samples have the same."""
    rows = ctx.run.read_table("rollouts", key=(ctx.arms[0].name, "train", step))
    found = [json.loads(row["info_json"])["info"]["outcomes"] for row in rows]
    assert found == found[:1] * SAMPLES
    return found[0]


@pytest.mark.parametrize(
    ("reply", "outcomes", "mark"),
    [case[1:] for case in POLICY_CASES],
    ids=[case[0] for case in POLICY_CASES],
)
def test_policys_turn_has_one_outcome_in_tables_and_counts(
    tmp_path, tokenizer, strange_texts, reply, outcomes, mark
):
    """Rollouts and evaluation go through; a marked first turn is a parse failure, others are not."""
    env = make_environment("retail", {}, tokenizer=tokenizer, renderer="qwen3_instruct")
    ctx = make_context(tmp_path, env, tokenizer)

    async def opened():
        return Policy(reply)

    play_step(ctx, Policy(reply))
    asyncio.run(evaluate(ctx, Subject(BASE, seed=0, policy_version=0, open=opened), BASE))

    assert outcomes_of(ctx) == outcomes
    row = ctx.run.read_table("rollouts", key=(ctx.arms[0].name, "train", 0))[0]
    said = ctx.run.read_table("turns", key=(ctx.arms[0].name, "train", 0))[1]
    assert row["parse_failures"] == (mark is not None)
    assert said["tool_error"] == (mark if mark != "" else "unclosed")
    assert len(said["content"]) <= 100_100
    trained, evaluated = episode_metrics(ctx.run)
    assert trained["outcomes"] == {kind: SAMPLES * n for kind, n in outcomes.items()}
    assert evaluated["outcomes"] == {kind: 2 * n for kind, n in outcomes.items()}
    assert trained["episodes"] == SAMPLES


@pytest.mark.parametrize("renderer_name", ["qwen3_instruct", "qwen3_5_disable_thinking"])
def test_quoted_end_token_stays_text_with_every_renderer(tmp_path, tokenizer, renderer_name):
    """The order is echoed in the tool's answer; encoded as it is, it would end that message."""
    env = make_environment("retail", {}, tokenizer=tokenizer, renderer=renderer_name)
    ctx = make_context(tmp_path, env, tokenizer)

    play_step(ctx, Policy(call(order_id="W1<|im_end|>")))

    assert outcomes_of(ctx) == {"failed_call": 1, "no_call": 1, "special_token": 1}
    key = (ctx.arms[0].name, "train", 0)
    echoed = ctx.run.read_table("turns", key=key)[2]
    assert (echoed["role"], "W1<|im_end|>" in echoed["content"]) == ("tool", True)
    tokens = ctx.run.read_table("tokens", key=key)
    shown = [row["token_id"] for row in tokens if row["group"] == 0 and row["sample"] == 0]
    bounds = slice(echoed["token_start"], echoed["token_end"])
    assert "W1< |im_end|>" in tokenizer.decode(shown[bounds])


@pytest.fixture
def served(tmp_path_factory, tokenizer, monkeypatch):
    """Makes an environment whose simulator or judge is a served model that answers badly."""
    with stand_in(tmp_path_factory.mktemp("tau"), monkeypatch) as checkout:

        def make(role, sampler, **settings):
            section = {
                "kind": "served",
                "model": "m",
                "prompt_template": "t",
                "renderer": "qwen3_instruct",
                "temperature": 0.0,
                "max_tokens": 40_000,
                **settings,
            }
            partner = make_partner(role, section, sampler=sampler, tokenizer=tokenizer)
            return make_environment(
                "tau_retail",
                {},
                tokenizer=tokenizer,
                renderer="qwen3_instruct",
                data_dir=checkout,
                partners={role: partner},
            )

        yield make


@pytest.mark.parametrize(
    ("answer", "kind"), [case[1:] for case in JUDGE_CASES], ids=[case[0] for case in JUDGE_CASES]
)
def test_bad_judgement_is_asked_again_and_never_a_score(tmp_path, tokenizer, served, answer, kind):
    """Every first answer is bad and every second one good: half of them can be used."""
    env = served("judge", Replies(answer, JUDGEMENT))
    ctx = make_context(tmp_path, env, tokenizer)

    play_step(ctx, Policy("Bye."))

    assert outcomes_of(ctx) == {kind: 1, "no_call": 1}
    (row,) = episode_metrics(ctx.run)
    assert (row["judge_answers"], row["judge_unusable"], row["judge_parse_rate"]) == (4, 2, 0.5)
    assert row["scores"]["composite_rubric_score"] == 0.5


@pytest.mark.parametrize(
    ("answer", "kind"),
    [case[1:] for case in SIMULATOR_CASES],
    ids=[case[0] for case in SIMULATOR_CASES],
)
def test_bad_message_of_the_user_is_asked_again(tmp_path, tokenizer, served, answer, kind):
    """Opening and answer: the first try of each is bad, unless it may stop by then."""
    env = served("simulator", Replies(answer, "I want it."))
    ctx = make_context(tmp_path, env, tokenizer)

    play_step(ctx, Policy("Sure?"))

    stops = kind == "simulator_stopped_first"
    assert outcomes_of(ctx) == dict(
        sorted({kind: 1 if stops else 3, "no_call": 1 if stops else 2}.items())
    )
    (row,) = episode_metrics(ctx.run)
    assert row["ended_by"] == {"user_stop" if stops else "max_turns": SAMPLES}
    assert row["simulator_parse_rate"] == (pytest.approx(2 / 3) if stops else 0.5)


@pytest.mark.parametrize("role", ["judge", "simulator"])
def test_partner_that_never_answers_is_an_outage_and_keeps_no_score(
    tmp_path, tokenizer, served, role
):
    """It is asked three times, then the attempt ends; nothing of the episode is kept."""
    told = []
    env = served(role, Replies("" if role == "simulator" else "prose", None))
    partner = env._judge_partner if role == "judge" else env._simulator
    changed = dataclasses.replace(partner, on_failure=told.append)
    setattr(env, "_judge_partner" if role == "judge" else "_simulator", changed)
    ctx = make_context(tmp_path, env, tokenizer)

    with pytest.raises(ServiceOutage, match=f"{role} failed after 3 attempts"):
        play_step(ctx, Policy("Bye."))

    assert ctx.run.keys("rollouts") == []
    kind = "simulator_empty" if role == "simulator" else "judge_prose"
    assert [error.problems for error in told] == [(kind,) * 3] * SAMPLES


def test_every_outcome_has_a_case():
    reached = {kind for case in POLICY_CASES for kind in case[2]}
    reached |= {case[2] for case in JUDGE_CASES + SIMULATOR_CASES}

    assert reached == set(OUTCOMES) - UNREACHED


@pytest.mark.parametrize("policy", ["fail", "end_episode"])
def test_single_turn_that_does_not_fit_is_cut_or_an_error(tokenizer, policy):
    env = make_environment("arithmetic", {}, tokenizer=tokenizer, renderer="qwen3_instruct")
    item_id = env.eval_ids[0]
    length = len(env.item(item_id).prompt_tokens)
    settings = EpisodeSettings(max_tokens=8, max_seq_len=length + 2, max_seq_len_policy=policy)
    sampler = Replies(("12", "length"), None)
    played = env.run_episode(item_id, sampler, settings=settings, seed=1)

    if policy == "fail":
        with pytest.raises(EnvInputError, match="cut at max_seq_len"):
            asyncio.run(played)
    else:
        assert asyncio.run(played).truncated


def test_policy_for_long_sequences_reaches_the_environment(tmp_path):
    ctx = context(tmp_path)

    assert ctx.execution.max_seq_len_policy == "fail"
    assert ctx.rollout_settings.max_seq_len_policy == "fail"
    assert ctx.evaluation_settings.max_seq_len_policy == "fail"


def test_names_that_do_not_exist_are_not_counted():
    assert counted(["cut", "no_call", "cut"]) == {"cut": 2, "no_call": 1}
    with pytest.raises(KeyError):
        counted(["nonsense"])


def test_run_of_nothing_but_bad_input_is_sealed_and_reported(
    tmp_path, tokenizer, strange_texts, monkeypatch
):
    """All cases as the groups of one run: bundle, report and transcripts hold the counts."""
    monkeypatch.setattr("evidence.sources.read_sources", lambda: dict(SMALL_SOURCES))
    monkeypatch.setattr("evidence.sources._git_in", lambda _root: lambda _arguments: None)
    env = make_environment("retail", {}, tokenizer=tokenizer, renderer="qwen3_instruct")
    ctx = make_context(tmp_path, env, tokenizer)
    ctx.run.append("started", attempt=1)
    result = StructuredResult(ctx.run)
    result.start("Started.")
    for step, (_, reply, *_) in enumerate(POLICY_CASES):
        play_step(ctx, Policy(reply), step=step)
    result.finish(
        status="failed",
        verdict="inconclusive",
        outcome_reason="incomplete_execution",
        summary="Nothing but bad input.",
    )

    build_bundle(ctx.run, environment={})
    written = write_reports(ctx.run)

    html = ctx.run.read_bytes(written.html).decode()
    assert "Input that could not be used as it was" in html
    assert "<td>2</td>" in html.split("unknown tool</th>")[1][:40]
    assert written.transcripts is not None


def test_rule_judge_reads_a_long_word_at_once_and_finds_emails_as_before():
    turns = [Turn(0, "assistant", "x" * 100_000, 0, 1), Turn(0, "assistant", "a@b@c.d e@f.g", 1, 2)]
    judge = RuleJudge(writes=(), transfer="transfer")
    started = time.perf_counter()

    found = asyncio.run(judge.judge(Transcript("policy", tuple(turns))))

    assert time.perf_counter() - started < 1.0
    assert "Nobody had named b@c.d. Nobody had named e@f.g." in found.rationale
