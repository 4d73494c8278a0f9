"""The embedded shop: every task can be solved, nothing is solved by doing nothing, rules hold."""

import asyncio

import pytest

from envs.conversation import DIMENSIONS, Judgement, Transcript
from envs.errors import EnvInputError
from envs.protocols import Environment, EpisodeSettings, Turn
from envs.registry import make_environment
from envs.retail.data import database_sha256, fresh_database
from envs.retail.rule_judge import RuleJudge
from envs.retail.scripted_agent import ScriptedPolicy, call_text, ideal_turns
from envs.retail.scripted_user import ScriptedUser
from envs.retail.tasks import build_tasks
from envs.retail.tools import SIGNATURES, TRANSFER, WRITES, Shop

SETTINGS = EpisodeSettings(max_tokens=200, max_turns=8)
TRAIN, HELD_OUT = build_tasks()
JUDGE = RuleJudge(writes=WRITES, transfer=TRANSFER)


@pytest.fixture(scope="module")
def env(tokenizer):
    return make_environment("retail", {}, tokenizer=tokenizer, renderer="qwen3_instruct")


def play(env, renderer, item_id, texts, settings=SETTINGS):
    policy = ScriptedPolicy(texts, renderer)
    return asyncio.run(env.run_episode(item_id, policy, settings=settings, seed=3))


def task_of(kind):
    return next(task for task in TRAIN if task.kind == kind)


def test_environment_satisfies_the_protocol(env):
    assert isinstance(env, Environment)


def test_split_has_enough_tasks_of_disjoint_users():
    """34 and 20 users with three orders each."""
    assert (len(TRAIN), len(HELD_OUT)) == (102, 60)
    assert not {task.email for task in TRAIN} & {task.email for task in HELD_OUT}
    assert not {task.opening for task in TRAIN} & {task.opening for task in HELD_OUT}
    assert len({task.task_id for task in (*TRAIN, *HELD_OUT)}) == 162


def test_every_kind_of_wish_is_in_both_splits():
    kinds = {"cancel", "city", "change", "return", "exchange", "refused"}

    assert {task.kind for task in TRAIN} == {task.kind for task in HELD_OUT} == kinds


@pytest.mark.parametrize("task", [*TRAIN[::6], *HELD_OUT[::6]], ids=lambda task: task.task_id)
def test_ideal_agent_solves_the_task_with_full_marks(env, renderer, task):
    found = play(env, renderer, task.task_id, ideal_turns(task, seed=1))

    assert (found.native_reward, found.reward, found.correct) == (1.0, 1.0, True)
    assert found.stop_reason == ("tool_stop" if task.kind == "refused" else "user_stop")
    assert (found.parse_failures, found.tool_errors, found.truncated) == (0, 0, False)


def test_every_task_is_reached_by_its_right_call_and_none_by_nothing():
    start = database_sha256(fresh_database())

    for task in (*TRAIN, *HELD_OUT):
        shop = Shop(fresh_database())
        assert all(shop.call(*action).error is None for action in task.actions)
        assert database_sha256(shop.database) == task.goal_sha256 != start


@pytest.mark.parametrize("kind", ["cancel", "return"])
def test_idle_or_rash_agents_do_not_solve_a_task(env, renderer, kind):
    task = task_of(kind)

    idle = play(env, renderer, task.task_id, ["Hello."] * 8)
    rash = play(env, renderer, task.task_id, [call_text("transfer", {"summary": "x"})])

    assert (idle.native_reward, idle.stop_reason) == (0.0, "user_stop")
    assert (rash.native_reward, rash.stop_reason) == (0.0, "tool_stop")


def test_right_call_without_asking_solves_the_task_at_a_lower_composite(env, renderer):
    """Tool use 1; the order was named by the user: grounded; nothing was asked: (1 + 1 + 0) / 3."""
    task = task_of("return")

    found = play(env, renderer, task.task_id, [call_text(*task.actions[0]), "Done."])

    assert found.native_reward == 1.0
    assert found.reward == pytest.approx(2 / 3)
    assert "Ask for a yes" in found.info["rationale"]


def test_gold_is_never_in_what_a_model_sees(env, renderer):
    """Neither the right call nor its digest stands in the tokens unless the policy wrote it."""
    for task in TRAIN[:20]:
        found = play(env, renderer, task.task_id, ["Hello."] * 8)
        text = renderer.decode(found.tokens)
        assert task.goal_sha256 not in text
        assert task.actions[0][0] + '"' not in text


def test_episodes_do_not_share_state(env, renderer):
    """The same order can be cancelled in two episodes at once."""
    task = task_of("cancel")

    async def both():
        return await asyncio.gather(
            *(
                env.run_episode(
                    task.task_id,
                    ScriptedPolicy(ideal_turns(task, seed=seed), renderer),
                    settings=SETTINGS,
                    seed=seed,
                )
                for seed in range(3)
            )
        )

    assert [episode.native_reward for episode in asyncio.run(both())] == [1.0, 1.0, 1.0]


def test_registry_takes_the_native_reward_for_training(tokenizer, renderer):
    env = make_environment(
        "retail", {"reward": "native"}, tokenizer=tokenizer, renderer="qwen3_instruct"
    )

    found = play(env, renderer, TRAIN[0].task_id, ["Hello."] * 8)

    assert (found.reward, found.metrics["composite_rubric_score"]) == (0.0, pytest.approx(1 / 3))
    with pytest.raises(EnvInputError, match=r"settings.reward is 'best'"):
        make_environment(
            "retail", {"reward": "best"}, tokenizer=tokenizer, renderer="qwen3_instruct"
        )


def test_prompt_leaves_room(env, tokenizer):
    """The system text has 201 tokens with SmolLM2's tokenizer; 1,000 bytes bound it here."""
    assert len(env.system) < 1000


def test_canaries_agree(env):
    assert [canary.ok for canary in env.canaries()] == [True, True]


def test_provenance_holds_the_judge_and_the_data(env):
    found = env.evaluator_provenance(settings=SETTINGS, item_ids=env.eval_ids[:1])

    assert "RuleJudge" in found["parser"]
    assert found["items"]["data_sha256"] == dict(env.data_digests)


ORDER = fresh_database()["orders"]
PENDING = next(
    order
    for order, row in ORDER.items()
    if row["status"] == "pending" and "bag" not in row["items"]
)
DELIVERED = next(
    order
    for order, row in ORDER.items()
    if row["status"] == "delivered" and "bag" not in row["items"]
)


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("fly", {}, "unknown tool fly"),
        ("find_user", {}, "find_user needs email"),
        ("find_user", {"email": ""}, "find_user needs email"),
        ("find_user", {"email": 3}, "find_user needs email"),
        ("find_user", {"email": "amy@mail.com", "x": "y"}, "find_user takes no x"),
        ("find_user", {"email": "nobody@mail.com"}, "no user with this email"),
        ("find_user", {"email": "\ud83d"}, "no user with this email"),
        ("get_order", {"order_id": "W1"}, "no order W1"),
        ("get_product", {"item": "car"}, "no product car"),
        (
            "cancel_order",
            {"order_id": PENDING, "reason": "bored"},
            "reason must be one of mistake, late, unwanted",
        ),
        (
            "cancel_order",
            {"order_id": DELIVERED, "reason": "late"},
            f"order {DELIVERED} is delivered, not pending",
        ),
        (
            "change_city",
            {"order_id": PENDING, "city": "Mars"},
            "city must be one of Rome, Oslo, Lima, Cairo, Paris, Delhi",
        ),
        (
            "change_item",
            {"order_id": PENDING, "old_item": "car", "new_item": "mug"},
            "no car in this order",
        ),
        (
            "change_item",
            {"order_id": PENDING, "old_item": ORDER[PENDING]["items"][0], "new_item": "car"},
            "no product car",
        ),
        (
            "change_item",
            {"order_id": PENDING, "old_item": ORDER[PENDING]["items"][0], "new_item": "tent"},
            "tent cannot be given",
        ),
        ("return_order", {"order_id": PENDING}, f"order {PENDING} is pending, not delivered"),
        (
            "exchange_item",
            {"order_id": PENDING, "old_item": "mug", "new_item": "fan"},
            f"order {PENDING} is pending, not delivered",
        ),
        ("transfer", {"summary": ""}, "transfer needs summary"),
    ],
)
def test_tools_check_their_arguments(name, arguments, error):
    """A refused call says why and changes nothing."""
    shop = Shop(fresh_database())

    found = shop.call(name, arguments)

    assert (found.error, found.ends) == (error, False)
    assert found.text == f"Error: {error}."
    assert shop.database == fresh_database()


def test_there_are_nine_tools_and_each_works():
    calls = {
        "find_user": {"email": "amy@mail.com"},
        "get_order": {"order_id": PENDING},
        "get_product": {"item": "mug"},
        "cancel_order": {"order_id": PENDING, "reason": "late"},
        "change_city": {"order_id": PENDING, "city": "Oslo"},
        "change_item": {
            "order_id": PENDING,
            "old_item": ORDER[PENDING]["items"][0],
            "new_item": "bag",
        },
        "return_order": {"order_id": DELIVERED},
        "exchange_item": {
            "order_id": DELIVERED,
            "old_item": ORDER[DELIVERED]["items"][0],
            "new_item": "bag",
        },
        "transfer": {"summary": "help"},
    }

    assert set(calls) == set(SIGNATURES)
    for name, arguments in calls.items():
        found = Shop(fresh_database()).call(name, arguments)
        assert found.error is None, name
        assert found.ends == (name == "transfer")


def test_scripted_user_answers_by_its_rules():
    """Email once, yes to a request, the wish otherwise, and leaves after three idle messages."""
    task = task_of("cancel")
    shop = Shop(fresh_database())
    user = ScriptedUser(task, shop)

    async def talk(texts):
        return [(await user.reply(text)) for text in texts]

    first = asyncio.run(user.first())
    replies = asyncio.run(talk(["Your email?", "Your email again?", "Shall I?", "Hm."]))

    assert first.text == task.opening
    assert [reply.text for reply in replies] == [
        f"My email is {task.email}",
        task.opening,
        "Yes.",
        "I give up. ###STOP###",
    ]
    assert [reply.stops for reply in replies] == [False, False, False, True]


def test_scripted_user_leaves_once_the_order_is_as_wished():
    task = task_of("city")
    shop = Shop(fresh_database())
    shop.call(*task.actions[0])

    reply = asyncio.run(ScriptedUser(task, shop).reply("What is your email?"))

    assert reply.stops
    assert reply.text == "Thank you. ###STOP###"


def judged(*turns, policy=""):
    return asyncio.run(JUDGE.judge(Transcript(policy, tuple(turns))))


def said(text, **facts):
    return Turn(
        turn=0,
        role=facts.pop("role", "assistant"),
        content=text,
        token_start=0,
        token_end=0,
        **facts,
    )


def test_judge_scores_silence():
    """No call: 0. No claim: 1. Nothing asked: 0."""
    found = judged(said("I want it.", role="user"))

    assert [found.scores[name] for name in DIMENSIONS] == [0.0, 1.0, 0.0]
    assert found.composite == pytest.approx(1 / 3)
    assert found.rationale == (
        "No tool was used. Ask for the email before you look anything up. "
        "Ask for a yes before you change anything."
    )


def test_judge_counts_failed_and_unreadable_calls():
    """Three attempts, one failed and one unreadable: 1 - 2/3."""
    found = judged(
        said("call", tool_name="get_order"),
        said("ok", role="tool", tool_name="get_order"),
        said("call", tool_name="get_order"),
        said("Error", role="tool", tool_name="get_order", tool_error="no order W1"),
        said("<tool_call>", tool_error="bad_json"),
        said("Error", role="tool", tool_error="bad_json"),
    )

    assert found.scores["invalid_tool_use"] == pytest.approx(1 / 3)
    assert "The call of get_order failed: no order W1." in found.rationale
    assert "A turn could not be read (bad_json)." in found.rationale


def test_judge_counts_claims_nobody_had_made():
    """W5 was named by the user; $9 and a@b.c by no one: 1 - 2/3. The policy counts as seen."""
    found = judged(
        said("Order W5 please", role="user"),
        said("Order W5 costs $9, a@b.c"),
        said("It was $9", role="user"),
        policy="e.g. W1",
    )

    assert found.scores["ungrounded_claims"] == pytest.approx(1 / 3)
    assert "Nobody had named $9." in found.rationale


@pytest.mark.parametrize(
    ("texts", "score"),
    [
        (["Your email?", "Shall I cancel? Say yes."], 1.0),
        (["Your email?"], 0.5),
        (["Do you confirm?"], 0.5),
        ([], 0.0),
    ],
)
def test_judge_wants_questions_before_the_first_change(texts, score):
    """What is asked after the change does not count."""
    change = said("call", tool_name="cancel_order")
    late = said("Your email? Do you confirm?")

    found = judged(*(said(text) for text in texts), change, late)

    assert found.scores["upfront_clarification"] == score


def test_judge_takes_no_broken_call_for_a_question():
    """Nobody but the model saw it, whatever words are in it."""
    broken = said('<tool_call>{"email": "Do you confirm?"', tool_error="unclosed")

    found = judged(broken, said("call", tool_name="cancel_order"))

    assert found.scores["upfront_clarification"] == 0.0
    assert "Ask for the email" in found.rationale


@pytest.mark.parametrize(
    ("scores", "composite"),
    [
        ((1.0, 0.7, 0.7), 0.8),
        ((0.7, 0.8, 0.9), 0.8),
        ((0.9, 0.8, 0.7), 0.8),
        ((0.9, 0.9, 0.6), 0.8),
        ((1.0, 1.0, 0.5), 0.833333333333),
    ],
)
def test_composite_is_the_decimal_mean_whatever_the_order(scores, composite):
    found = Judgement(dict(zip(DIMENSIONS, scores, strict=True)), "Fine.")

    assert found.composite == composite


def test_transfer_needs_no_yes():
    found = judged(said("Your email?"), said("call", tool_name="transfer"))

    assert found.scores["upfront_clarification"] == 1.0
