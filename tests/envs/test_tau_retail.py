"""The tau-bench adapter, on a small stand-in package with the real one's interfaces."""

import asyncio
import json
import math
import random
import sys

import pytest

from envs.errors import EnvInputError
from envs.protocols import Environment, EpisodeSettings
from envs.registry import make_environment
from envs.served import make_partner
from envs.tau_package import COMMIT
from envs.tau_retail import TauWorld, guarded_expression, parameter_types
from tests.envs.tau_stand_in import forget_package, stand_in

SETTINGS = EpisodeSettings(max_tokens=300, max_turns=12)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder that holds the stand-in package."""
    with stand_in(tmp_path, monkeypatch) as folder:
        yield folder


@pytest.fixture
def env(checkout, tokenizer):
    return make_environment(
        "tau_retail", {}, tokenizer=tokenizer, renderer="qwen3_instruct", data_dir=checkout
    )


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(env, item_id, sampler):
    return asyncio.run(env.run_episode(item_id, sampler, settings=SETTINGS, seed=1))


def test_environment_satisfies_the_protocol(env):
    assert isinstance(env, Environment)


def test_training_tasks_are_the_first_of_pythons_shuffle(env):
    """random.Random(0) over 500 tasks: 419, 459, 130, 431, 370, ..., in this order."""
    order = list(range(500))
    random.Random(0).shuffle(order)

    assert env.train_ids[:5] == tuple(f"tau-train-{n}" for n in (419, 459, 130, 431, 370))
    assert env.train_ids == tuple(f"tau-train-{n:03d}" for n in order[:80])
    assert env.eval_ids == tuple(f"tau-test-{n:03d}" for n in range(60))


def test_batches_walk_through_the_tasks_in_order(env):
    """80 tasks in fours: 20 batches, then from the start."""
    assert env.train_batch(0, 4) + env.train_batch(1, 4) == list(env.train_ids[:8])
    assert env.train_batch(20, 4) == env.train_batch(0, 4)
    with pytest.raises(EnvInputError):
        env.train_batch(0, 81)


def test_system_message_holds_policy_and_tools_and_no_gold(env):
    assert "Be kind." in env.system
    assert '"name": "calculate"' in env.system
    assert "wish" not in env.system


def test_solved_episode_earns_the_packages_reward(env, scripted):
    replies = [call("cancel_pending_order", order_id="#W3"), "Your order is cancelled."]

    found = play(env, "tau-test-003", scripted(replies))

    assert (found.native_reward, found.stop_reason) == (1.0, "user_stop")
    assert found.metrics["tau_bench_task_reward"] == 1.0
    assert found.turns[0].content.endswith("Test wish 3.")


@pytest.mark.parametrize(
    ("said", "reward"), [("It costs 1,234 dollars.", 1.0), ("It is dear.", 0.0)]
)
def test_outputs_must_be_told_to_the_user(env, scripted, said, reward):
    replies = [call("cancel_pending_order", order_id="#W1"), said]

    assert play(env, "tau-test-001", scripted(replies)).native_reward == reward


def test_transfer_ends_and_is_graded(env, scripted):
    found = play(env, "tau-test-003", scripted([call("transfer_to_human_agents", summary="x")]))

    assert (found.native_reward, found.stop_reason) == (0.0, "tool_stop")


def test_unfinished_episode_is_graded_as_tau_bench_grades_it(env, scripted):
    """The order is cancelled, but the twelfth turn ends before the user says goodbye: 0."""
    replies = [
        call("cancel_pending_order", order_id="#W3"),
        *[call("calculate", expression="1")] * 11,
    ]

    found = play(env, "tau-test-003", scripted(replies))

    assert (found.native_reward, found.stop_reason, found.agent_turns) == (0.0, "max_turns", 12)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"expression": "9**9**9"}, "powers are not supported"),
        ({"expression": "9* *9"}, "powers are not supported"),
        ({"expression": "1+" * 101 + "1"}, "expression has more than 200 characters"),
        ({"expression": 9}, "expression must be a text"),
        ({}, "expression must be a text"),
        ({"expression": "(2 + 3) * 4"}, None),
    ],
)
def test_calculator_is_guarded(arguments, problem):
    assert guarded_expression(arguments) == problem


def test_refused_expression_never_reaches_the_package(env):
    found = TauWorld(env._package, "test", 0).call("calculate", {"expression": "9**9**9**9"})

    assert found[:2] == ("Error: powers are not supported", "powers are not supported")


def test_tool_exceptions_and_unknown_tools_are_results(env):
    world = TauWorld(env._package, "test", 0)

    world.call("cancel_pending_order", {"order_id": "#W9"})
    again = world.call("cancel_pending_order", {"order_id": "#W9"})

    assert again.text == "Error: '#W9'"
    assert world.call("fly", {}).text == "Unknown action fly"
    assert "unexpected keyword" in world.call("calculate", {"expression": "1", "x": 2}).text
    assert "multiple values" in world.call("calculate", {"data": {}, "expression": "1"}).text


def test_episodes_share_no_database(env, scripted):
    replies = [call("cancel_pending_order", order_id="#W3"), "Done."]

    async def both():
        return await asyncio.gather(
            *(
                env.run_episode("tau-test-003", scripted(list(replies)), settings=SETTINGS, seed=n)
                for n in range(3)
            )
        )

    assert [episode.native_reward for episode in asyncio.run(both())] == [1.0] * 3


def test_served_user_gets_the_packages_prompt_and_the_judge_its_own(checkout, tokenizer, scripted):
    served = {
        "kind": "served",
        "model": "m",
        "prompt_template": "t",
        "renderer": "qwen3_instruct",
        "temperature": 0.0,
        "max_tokens": 300,
    }
    user = scripted(["Cancel it.", "###STOP###"])
    judge = scripted(["prose"] * 3)
    env = make_environment(
        "tau_retail",
        {},
        tokenizer=tokenizer,
        renderer="qwen3_instruct",
        data_dir=checkout,
        partners={
            "simulator": make_partner("simulator", served, sampler=user, tokenizer=tokenizer),
            "judge": make_partner("judge", served, sampler=judge, tokenizer=tokenizer),
        },
    )

    found = play(env, "tau-test-003", scripted(["Sure."]))

    prompt = bytes(t - 3 for t in user.requests[0]["prompt_tokens"] if t > 2).decode()
    assert "Instruction: Test wish 3." in prompt
    assert not found.graded
    assert math.isnan(found.reward)


def test_known_troubles_of_tasks_are_flags(env, scripted):
    found = play(env, "tau-test-012", scripted(["Bye."]))

    assert found.info["questionable_reference"]
    assert found.info["solved_by_nothing"]
    assert not env.item("tau-test-000").info["solved_by_nothing"]


def test_canaries_agree(env):
    assert [canary.ok for canary in env.canaries()] == [True, True]


def test_other_files_than_the_pinned_ones_are_refused(checkout, tokenizer):
    (checkout / "tau_bench" / "envs" / "retail" / "wiki.md").write_text("Be rude.")

    with pytest.raises(EnvInputError, match=f"files of commit {COMMIT}"):
        make_environment(
            "tau_retail", {}, tokenizer=tokenizer, renderer="qwen3_instruct", data_dir=checkout
        )


def test_missing_package_and_other_commit_are_named(tokenizer, tmp_path, monkeypatch):
    forget_package()
    monkeypatch.setenv("GATED_RL_TAU_BENCH", str(tmp_path))
    make = {"tokenizer": tokenizer, "renderer": "qwen3_instruct"}

    with pytest.raises(EnvInputError, match="No module named 'tau_bench'"):
        make_environment("tau_retail", {}, **make)
    with pytest.raises(EnvInputError, match=r"settings.commit is 'abc'"):
        make_environment("tau_retail", {"commit": "abc"}, **make)


def test_loading_leaves_no_stand_in_for_litellm(env):
    assert "litellm" not in sys.modules


def test_parameter_types_come_from_the_schemas():
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "array"}, "b": {}}}}

    assert parameter_types([tool]) == {"f": {"a": "array", "b": "string"}}
