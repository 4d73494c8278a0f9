"""The adapter on the real tau-bench: its traps one by one, and what reference actions earn.

The package is not a dependency and not in this repository, so these tests skip where
`GATED_RL_TAU_BENCH` names no checkout: on laptops and in CI. The stand-in of `test_tau_retail` runs
everywhere.
"""

import asyncio
import copy
import json
import os
import time
from pathlib import Path

import pytest

from envs.protocols import EpisodeSettings
from envs.registry import make_environment
from envs.tau_package import FOLDER_VARIABLE, PINNED_SHA256, package_sha256
from envs.tau_retail import TauWorld
from tests.envs.tau_stand_in import forget_package

FOLDER = os.environ.get(FOLDER_VARIABLE)
pytestmark = pytest.mark.skipif(
    not FOLDER, reason=f"{FOLDER_VARIABLE} names no checkout of tau-bench (CI has none either)"
)
SETTINGS = EpisodeSettings(max_tokens=4_000, max_turns=12)


@pytest.fixture(scope="module")
def env(request):
    """All 115 test tasks, over the byte tokenizer."""
    tokenizer = request.getfixturevalue("tokenizer")
    forget_package()
    yield make_environment(
        "tau_retail", {"eval_tasks": 115}, tokenizer=tokenizer, renderer="qwen3_instruct"
    )
    forget_package()


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_files_are_the_pinned_ones(env):
    assert package_sha256(Path(FOLDER) / "tau_bench") == PINNED_SHA256
    assert env.data_digests == {"tau_bench": PINNED_SHA256}
    assert env.data_order["source"].endswith("@59a200c6d575d595120f1cb70fea53cef0632f6b")


def test_training_tasks_are_the_known_ones(env):
    """The first 80 of the 500 after Python's shuffle with seed 0; none of them is a test task."""
    numbers = [int(item_id[-3:]) for item_id in env.train_ids]

    assert numbers[:10] == [419, 459, 130, 431, 370, 26, 201, 56, 366, 108]
    assert (len(numbers), len(set(numbers))) == (80, 80)


def test_system_message_holds_wiki_and_tools_and_no_task(env):
    """16 tools; the rules that the package loads are not shown, as its own agent does not."""
    tasks = env._package.tasks["train"] + env._package.tasks["test"]

    assert env._package.wiki in env.system
    assert env.system.count('"type": "function"') == 16
    assert not any(task.instruction in env.system for task in tasks)


def solved_by(env, actions_of, said_of):
    """Indices of the test tasks whose final database and outputs earn the reward."""
    found = []
    for index, task in enumerate(env._package.tasks["test"]):
        world = TauWorld(env._package, "test", index)
        for action in actions_of(task):
            world.call(action.name, action.kwargs)
        if world.reward(said_of(task)) == 1.0:
            found.append(index)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_reference_actions_with_all_outputs_solve_every_task(env):
    assert len(solved_by(env, lambda task: task.actions, lambda task: task.outputs)) == 115


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_reference_actions_without_outputs_solve_78_tasks(env):
    """35 of them are among the first 60."""
    found = solved_by(env, lambda task: task.actions, lambda task: [])

    assert (len(found), sum(index < 60 for index in found)) == (78, 35)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_doing_nothing_solves_seven_tasks(env):
    found = solved_by(env, lambda task: [], lambda task: [])

    assert found == [10, 12, 25, 50, 57, 65, 106]


def oracle(task):
    """Turns of an agent that knows the reference: one message, its actions, one closing line."""
    actions = [call(action.name, **action.kwargs) for action in task.actions]
    return [*actions, f"All done: {', '.join(task.outputs)}."]


def test_whole_episodes_earn_what_their_actions_earn(env, scripted):
    """Through tokens, parser, tools and a user that leaves: tasks 0, 1, 5 and 24 are solved."""
    for index in (0, 1, 5, 24):
        sampler = scripted(oracle(env._package.tasks["test"][index]))

        found = asyncio.run(
            env.run_episode(f"tau-test-{index:03d}", sampler, settings=SETTINGS, seed=1)
        )

        assert (found.native_reward, found.stop_reason) == (1.0, "user_stop")
        assert found.parse_failures == 0


def test_episodes_side_by_side_share_nothing(env, scripted):
    """Two agents on one task: one changes the order, the other does nothing; twice, interleaved.

    The package's own lists are as before afterwards.
    """
    before = copy.deepcopy([task.model_dump() for task in env._package.tasks["test"]])
    task = env._package.tasks["test"][0]

    async def all_of_them():
        return await asyncio.gather(
            *(
                env.run_episode("tau-test-000", scripted(replies), settings=SETTINGS, seed=n)
                for n, replies in enumerate([oracle(task), ["Bye."]] * 2)
            )
        )

    found = asyncio.run(all_of_them())

    assert [episode.native_reward for episode in found] == [1.0, 0.0, 1.0, 0.0]
    assert [task.model_dump() for task in env._package.tasks["test"]] == before
    first, second = (TauWorld(env._package, "test", 0).env for _ in range(2))
    assert first.data is not second.data
    assert first.data["orders"] is not second.data["orders"]


def test_turn_cap_is_graded_as_unfinished(env, scripted):
    """The reference is carried out in time, but the user has not left at the twelfth turn: 0."""
    task = env._package.tasks["test"][0]
    turns = [call(action.name, **action.kwargs) for action in task.actions]
    turns += [call("think", thought="well")] * (12 - len(turns))

    found = asyncio.run(env.run_episode("tau-test-000", scripted(turns), settings=SETTINGS, seed=1))

    assert (found.native_reward, found.stop_reason, found.agent_turns) == (0.0, "max_turns", 12)
    assert found.truncated


@pytest.mark.parametrize("expression", ["9**9**9", "9 ** 9**9", "(9)**(9)**9", "1+" * 5_000 + "1"])
def test_calculator_cannot_hang_the_process(env, expression):
    started = time.perf_counter()

    found = TauWorld(env._package, "test", 0).call("calculate", {"expression": expression})

    assert found.error is not None
    assert time.perf_counter() - started < 1.0


def test_calculator_calculates(env):
    found = TauWorld(env._package, "test", 0).call("calculate", {"expression": "(2 + 3) * 4.5"})

    assert (found.text, found.error) == ("22.5", None)


@pytest.mark.parametrize("value", [["a"], {"a": [1]}, 10**30, 1e300, None, True, "", "x" * 90_000])
def test_odd_arguments_neither_raise_nor_break_the_grade(env, value):
    """Every tool with the same odd value for every argument; the database can still be hashed."""
    world = TauWorld(env._package, "test", 0)

    for name, types in env._xml_types.items():
        result = world.call(name, dict.fromkeys(types, value))
        assert isinstance(result.text, str)
        assert len(result.text) < 200_000

    assert world.reward([]) in (0.0, 1.0)


def test_lone_surrogates_never_reach_the_database(env, scripted):
    """The package hashes UTF-8, which half a character pair would break after the episode."""
    reply = (
        '<tool_call>{"name": "modify_user_address", "arguments": {"user_id": "yusuf_rossi_9620", '
        '"address1": "\\ud83d", "address2": "", "city": "x", "state": "x", "country": "x", '
        '"zip": "1"}}</tool_call>'
    )

    found = asyncio.run(
        env.run_episode("tau-test-000", scripted([reply, "Bye."]), settings=SETTINGS, seed=1)
    )

    assert (found.native_reward, found.info["outcomes"]) == (0.0, {"bad_text": 1, "no_call": 1})


def test_sequence_limit_ends_the_episode_and_is_counted(env, scripted):
    """Byte tokens: the prompt alone has more than 8,192, so the limit lies just above it."""
    task = env._package.tasks["test"][0]
    opening = len(env.item("tau-test-000").prompt_tokens) + len(task.instruction) + 400
    settings = EpisodeSettings(max_tokens=500, max_turns=12, max_seq_len=opening)

    found = asyncio.run(
        env.run_episode("tau-test-000", scripted(oracle(task)), settings=settings, seed=1)
    )

    assert (found.stop_reason, found.truncated, found.native_reward) == ("max_seq_len", True, 0.0)
    assert len(found.tokens) <= opening


def test_judge_and_user_are_pinned(env):
    """The simulator's prompt is the package's own; canaries and provenance name the data."""
    prompt = env._package.user_prompt("Be Amy.")
    provenance = env.evaluator_provenance(settings=SETTINGS, item_ids=env.eval_ids[:2])

    assert prompt.startswith("You are a user interacting with an agent.\n\nInstruction: Be Amy.")
    assert "###STOP###" in prompt
    assert [canary.ok for canary in env.canaries()] == [True, True]
    assert provenance["items"]["data_sha256"] == {"tau_bench": PINNED_SHA256}
