"""The addition environment: split, prompt, grading and token layout."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv

from envs.arithmetic import ArithmeticEnvironment, ArithmeticSettings, split_pairs
from envs.errors import EnvInputError
from envs.protocols import Environment, EpisodeSettings
from envs.registry import make_environment

SETTINGS = EpisodeSettings(max_tokens=8)


@pytest.fixture
def env(renderer):
    """Operands 0 to 9, 40 held-out pairs."""
    return ArithmeticEnvironment(ArithmeticSettings(), renderer=renderer, seed=0)


def play(env, item_id, sampler, settings=SETTINGS, seed=7):
    return asyncio.run(env.run_episode(item_id, sampler, settings=settings, seed=seed))


def test_environment_satisfies_the_protocol(env):
    assert isinstance(env, Environment)


def test_split_covers_every_pair_but_the_example():
    """100 ordered pairs less 4+5 and 5+4 is 98; 40 are held out."""
    train, held_out = split_pairs(ArithmeticSettings())

    assert (len(train), len(held_out)) == (58, 40)
    assert len({*train, *held_out}) == 98
    assert not {(4, 5), (5, 4)} & {*train, *held_out}


@pytest.mark.parametrize("held_out", [1, 2, 39, 40, 41])
@pytest.mark.parametrize("split_seed", [0, 1])
def test_split_never_trains_on_a_held_out_pair_in_either_order(held_out, split_seed):
    train, test = split_pairs(ArithmeticSettings(held_out=held_out, split_seed=split_seed))

    assert len(test) == held_out
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in test}


def test_split_depends_on_its_own_seed_and_not_on_the_order_seed(renderer):
    one = ArithmeticEnvironment(ArithmeticSettings(), renderer=renderer, seed=0)
    two = ArithmeticEnvironment(ArithmeticSettings(), renderer=renderer, seed=1)
    other = ArithmeticEnvironment(ArithmeticSettings(split_seed=1), renderer=renderer, seed=0)

    assert one.eval_ids == two.eval_ids
    assert one.eval_ids != other.eval_ids
    assert one.train_batch(0, 8) != two.train_batch(0, 8)


def test_split_refuses_to_hold_out_everything():
    """0 and 1 give four ordered pairs; none would be left."""
    with pytest.raises(EnvInputError, match=r"held_out is 4; expected fewer than the 4 pairs"):
        split_pairs(ArithmeticSettings(operand_max=1, held_out=4))


def test_prompt_is_chatml_with_system_message_example_and_question(env, renderer):
    item = env.item("3+4") if "3+4" in env.train_ids else env.item(env.train_ids[0])
    x, y = item.info["x"], item.info["y"]

    assert renderer.decode(item.prompt_tokens) == (
        "<|im_start|>system\nReply with one number.<|im_end|>\n"
        "<|im_start|>user\nWhat is 4 + 5?<|im_end|>\n"
        "<|im_start|>assistant\n9<|im_end|>\n"
        f"<|im_start|>user\nWhat is {x} + {y}?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert item.reference == str(x + y)


def test_prompt_equals_the_tokenizers_own_chat_template(env, tokenizer):
    """The renderer adds nothing to and drops nothing from the model's template."""
    item = env.item(env.eval_ids[0])
    messages = [
        {"role": "system", "content": "Reply with one number."},
        {"role": "user", "content": "What is 4 + 5?"},
        {"role": "assistant", "content": "9"},
        {"role": "user", "content": f"What is {item.info['x']} + {item.info['y']}?"},
    ]

    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    assert list(item.prompt_tokens) == tokenizer.encode(text, add_special_tokens=False)


def test_episode_keeps_tokens_and_logprobs_as_sampled(env, scripted):
    """The reply "17" and the stop token: three trained tokens behind the prompt."""
    item = env.item(env.eval_ids[0])
    sampler = scripted(["17"])

    found = play(env, item.item_id, sampler)

    start = len(item.prompt_tokens)
    assert found.tokens == (*item.prompt_tokens, 3 + ord("1"), 3 + ord("7"), 2)
    assert found.loss_mask == (False,) * start + (True, True, True)
    assert found.sampling_logprobs == (None,) * start + (-0.5, -0.25, -0.125)
    assert set(found.turn_of_token) == {0}
    assert (found.turns[0].token_start, found.turns[0].token_end) == (start, start + 3)
    assert (found.text, found.stop_reason, found.truncated) == ("17", "stop", False)


def test_episode_asks_once_with_its_seed_and_stop_token(env, scripted):
    sampler = scripted(["1"])

    play(env, env.eval_ids[0], sampler, EpisodeSettings(max_tokens=5, temperature=0.7), seed=11)

    (request,) = sampler.requests
    assert request["prompt_tokens"] == env.item(env.eval_ids[0]).prompt_tokens
    assert (request["num_samples"], request["max_tokens"], request["seed"]) == (1, 5, 11)
    assert (request["temperature"], request["top_p"], request["top_k"]) == (0.7, 1.0, -1)
    assert request["stop"] == [2]


@pytest.mark.parametrize(
    ("reply", "correct", "reward", "extracted"),
    [
        ("{right}", True, 1.0, "{right}"),
        ("{x} + {y} = {right}", True, 1.0, "{right}"),
        ("The answer is {right}.", True, 1.0, "{right}"),
        ("{right}.0", False, 0.0, "0"),
        ("-{right}", False, 0.0, "-{right}"),
        ("{right} not 99", False, 0.0, "99"),
        ("nine", False, 0.0, None),
        ("", False, 0.0, None),
        ("1" * 5000, False, 0.0, "1" * 5000),
        ("7" * 60_000, False, -0.1, None),
    ],
)
def test_grade_of_a_stopped_reply(env, reply, correct, reward, extracted):
    """The last whole number decides; 1 + 0.1 * (1 - 1), 0, or -0.1 for an unreadable reply."""
    item = next(i for i in map(env.item, env.train_ids) if i.info["x"] and i.info["y"] > 1)
    facts = {"x": item.info["x"], "y": item.info["y"], "right": item.reference}

    found = env.grade(item.item_id, reply.format(**facts), stopped=True)

    wanted = extracted.format(**facts) if extracted else None
    assert (found.correct, found.extracted) == (correct, wanted)
    assert found.reward == pytest.approx(reward, abs=1e-12)


def test_right_answer_that_was_cut_is_correct_without_the_format_bonus(env, scripted):
    """1 + 0.1 * (0 - 1) = 0.9, and accuracy stays 1."""
    item = env.item(env.eval_ids[0])

    found = play(env, item.item_id, scripted([(item.reference, "length")]))

    assert found.reward == pytest.approx(0.9)
    assert (found.correct, found.format_ok, found.truncated) == (True, False, True)
    assert found.metrics == {"accuracy": 1.0, "format": 0.0}


@pytest.mark.parametrize("reply", ["7", "3", "no", "The answer is 7", "7\n"])
@pytest.mark.parametrize("stopped", [True, False])
def test_reward_equals_the_cookbooks_own_step(env, renderer, reply, stopped):
    item = next(i for i in map(env.item, env.train_ids) if i.reference == "7")
    cookbook = ArithmeticEnv(item.info["x"], item.info["y"], renderer.renderer)
    tokens = [3 + byte for byte in reply.encode()] + ([2] if stopped else [])

    step = asyncio.run(cookbook.step(tokens))

    parsed = renderer.parse(tokens)
    ours = env.grade(item.item_id, parsed.text, stopped=parsed.stopped)
    assert ours.reward == pytest.approx(step.reward)
    assert ours.metrics == {"accuracy": step.metrics["correct"], "format": step.metrics["format"]}


def test_max_seq_len_shortens_the_reply_and_refuses_an_unfitting_prompt(env, scripted):
    item = env.item(env.eval_ids[0])
    sampler = scripted(["1", "1"])
    length = len(item.prompt_tokens)

    play(env, item.item_id, sampler, EpisodeSettings(max_tokens=8, max_seq_len=length + 3))
    with pytest.raises(EnvInputError, match=f"{length} tokens.*fewer than max_seq_len {length}"):
        play(env, item.item_id, sampler, EpisodeSettings(max_tokens=8, max_seq_len=length))

    assert sampler.requests[0]["max_tokens"] == 3


def test_canaries_agree(env):
    assert [canary.ok for canary in env.canaries()] == [True, True, True, True]


def test_unknown_item_is_refused(env):
    with pytest.raises(EnvInputError, match=r"item_id is '4\+5'"):
        env.item("4+5")


def test_provenance_names_code_prompt_decoding_parser_and_items(env):
    found = env.evaluator_provenance(settings=SETTINGS, item_ids=env.eval_ids[:2])

    assert set(found) == {"code_sha256", "prompt_template", "decoding", "parser", "items"}
    assert len(found["code_sha256"]) == 64
    assert found["items"] == {"ids": list(env.eval_ids[:2])}
    assert found["decoding"]["stop"] == [2]
    assert "Reply with one number." in found["prompt_template"]


def test_registry_reads_settings_and_system_prompt(tokenizer):
    env = make_environment(
        "arithmetic",
        {"operand_max": 3, "held_out": 4},
        tokenizer=tokenizer,
        renderer="qwen3_instruct",
        system_prompt="Add.",
    )

    assert len(env.eval_ids) == 4
    assert "Add." in env.evaluator_provenance(settings=SETTINGS, item_ids=[])["prompt_template"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"operand_max": 0}, "environment.settings.operand_max is 0"),
        ({"operand_max": True}, "environment.settings.operand_max is True"),
        ({"held_out": 40.0}, "environment.settings.held_out is 40.0"),
        ({"format_coef": float("nan")}, "environment.settings.format_coef is nan"),
        ({"operands": 9}, "no such setting of arithmetic"),
    ],
)
def test_registry_refuses_wrong_settings(tokenizer, settings, message):
    with pytest.raises(EnvInputError, match=message):
        make_environment("arithmetic", settings, tokenizer=tokenizer, renderer="qwen3_instruct")


def test_registry_refuses_unknown_environment_and_renderer(tokenizer):
    with pytest.raises(EnvInputError, match=r"environment.name is 'addition'; expected one of"):
        make_environment("addition", {}, tokenizer=tokenizer, renderer="qwen3_instruct")
    with pytest.raises(EnvInputError, match=r"renderer is 'nope'"):
        make_environment("arithmetic", {}, tokenizer=tokenizer, renderer="nope")


def test_prompts_can_be_rendered_from_many_threads(env):
    """Without the lock the shared tokenizer raises "Already borrowed" on most of these."""
    ids = [env.train_ids[n % len(env.train_ids)] for n in range(600)]
    alone = {item_id: env.item(item_id).prompt_tokens for item_id in set(ids)}

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda item_id: env.item(item_id).prompt_tokens, ids))

    assert together == [alone[item_id] for item_id in ids]
