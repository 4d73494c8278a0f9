"""Demonstrations solve their tasks, and the generated tasks pass their audit."""

import asyncio
import json

import pytest

from envs.errors import EnvInputError
from envs.registry import make_environment
from envs.retail.audit import generation_report
from envs.retail.data import fresh_database
from envs.retail.demonstrations import demonstrations
from envs.retail.resolver import resolve
from envs.retail.tasks import build_tasks
from evidence.generation_audit import validate

CONTRACT = {
    "answer_comparison": "categorical_exact",
    "min_sample_size": 200,
    "max_label_errors": 0,
    "max_eval_overlaps": 0,
}
TRAIN, HELD_OUT = build_tasks()


@pytest.fixture(scope="module")
def env(tokenizer):
    return make_environment("retail", {}, tokenizer=tokenizer, renderer="qwen3_instruct")


def make(env, renderer, count, seed):
    return asyncio.run(demonstrations(env, renderer=renderer, count=count, seed=seed))


def test_demonstrations_are_solved_training_tasks_and_repeatable(env, renderer):
    first, again = make(env, renderer, 8, 0), make(env, renderer, 8, 0)

    assert [episode.native_reward for episode in first] == [1.0] * 8
    assert {episode.item_id for episode in first} <= set(env.train_ids)
    assert [episode.tokens for episode in first] == [episode.tokens for episode in again]
    assert [e.item_id for e in make(env, renderer, 8, 1)] != [e.item_id for e in first]


def test_demonstrations_train_on_the_agents_words_alone(env, renderer):
    (found,) = make(env, renderer, 1, 0)
    trained = [t for t, mask in zip(found.tokens, found.loss_mask, strict=True) if mask]

    said = [turn.content for turn in found.turns if turn.role == "assistant"]
    assert renderer.decode(trained) == "".join(f"{text}<|im_end|>" for text in said)


def test_more_demonstrations_than_tasks_are_refused(env, renderer):
    with pytest.raises(EnvInputError, match=r"demonstrations is 103; expected 1 to 102"):
        make(env, renderer, 103, 0)


@pytest.mark.parametrize("task", [*TRAIN, *HELD_OUT], ids=lambda task: task.task_id)
def test_resolver_agrees_with_every_label(task):
    found = resolve(task.opening, fresh_database())

    assert json.loads(found.answer) == json.loads(json.dumps(list(task.actions[0])))


@pytest.mark.parametrize("message", ["Hello", "I want order W999", "Order W100 is late"])
def test_resolver_refuses_what_it_does_not_understand(message):
    with pytest.raises(ValueError, match="no "):
        resolve(message, fresh_database())


def test_generated_tasks_pass_their_audit(env):
    """102 tasks, all executed and all solved again: no label error, no overlap."""
    made = env.generation_report()

    result = validate(made["report"], CONTRACT, tasks=made["tasks"], evaluation=made["evaluation"])

    assert (result.status, result.reasons) == ("passed", ())
    assert (result.sample_size, result.label_errors, result.overlaps) == (102, 0, 0)


def test_wrong_label_fails_the_audit():
    made = generation_report()
    made["tasks"][3]["answer"] = '["transfer", {"summary": "no"}]'

    result = validate(made["report"], CONTRACT, tasks=made["tasks"], evaluation=made["evaluation"])

    assert result.status == "failed"
