"""GSM8K: two graders and where they disagree, the data, and the training order."""

import asyncio
import json

import numpy as np
import pytest
from tinker_cookbook.recipes.math_rl.math_env import MathEnv

from envs.errors import EnvInputError
from envs.gsm8k import Gsm8kEnvironment, Gsm8kSettings, boxed_answer, correct_numeric
from envs.gsm8k_data import load_gsm8k
from envs.protocols import Environment, EpisodeSettings
from envs.registry import make_environment

REPLIES = [
    # reply, reference, correct_boxed, correct_numeric
    # -- both right
    (r"\boxed{18}", "18", 1, 1),
    (r"She pays 9 * 2 = \boxed{18} dollars.", "18", 1, 1),
    (r"$\boxed{18}$", "18", 1, 1),
    (r"\boxed{ 18 }", "18", 1, 1),
    (r"\boxed{18.0}", "18", 1, 1),
    (r"\boxed{18.}", "18", 1, 1),
    (r"\boxed{$18}", "18", 1, 1),
    (r"\boxed{\$18}", "18", 1, 1),
    (r"\boxed{18\%}", "18", 1, 1),
    (r"\boxed{1,450,000}", "1450000", 1, 1),
    (r"\boxed{1450000}", "1450000", 1, 1),
    (r"\boxed{1{,}450{,}000}", "1450000", 1, 1),
    (r"\boxed{18\text{ dollars}}", "18", 1, 1),
    (r"\boxed{-5}", "-5", 1, 1),
    (r"\boxed{0}", "0", 1, 1),
    (r"\boxed{018}", "18", 1, 1),
    # -- both wrong
    (r"\boxed{19}", "18", 0, 0),
    (r"\boxed{}", "18", 0, 0),
    ("", "18", 0, 0),
    ("no idea", "18", 0, 0),
    (r"\boxed{eighteen}", "18", 0, 0),
    (r"\boxed{\frac{18}{1}}", "18", 0, 0),
    (r"\boxed{-18}", "18", 0, 0),
    (r"\boxed{1.45 million}", "1450000", 0, 0),
    (r"\boxed{2\times 9}", "18", 0, 0),
    # -- only the training grader takes the last box or reads past odd text
    (r"\boxed{5} no, \boxed{18}", "18", 1, 0),
    (r"\boxed{18} no, \boxed{5}", "18", 0, 1),
    (r"\boxed 18", "18", 1, 1),
    (r"\boxed{1.8e1}", "18", 1, 0),
    # -- accepted by the training grader though it should not be
    (r"\boxed{1 8}", "18", 1, 1),
    (r"\boxed{x=18}", "18", 1, 1),
    # -- only the evaluation grader forgives the form
    ("The answer is 18.", "18", 0, 1),
    ("The answer is 18", "18", 0, 1),
    ("answer: $18", "18", 0, 1),
    ("#### 18", "18", 0, 1),
    ("####18", "18", 0, 1),
    ("#### $1,450,000", "1450000", 0, 1),
    ("#### 18.0", "18", 0, 1),
    ("It costs **$18**.", "18", 0, 1),
    ("9 * 2 = 18", "18", 0, 1),
    ("She has 18 left over", "18", 0, 1),
    (r"\boxed{18 dollars}", "18", 0, 1),
    (r"\boxed{18 apples}", "18", 0, 1),
    (r"\boxed{total = 18}", "18", 0, 1),
    (r"\boxed{**18**}", "18", 0, 1),
    (r"\boxed{18", "18", 0, 1),
    (r"bad } \boxed{18}", "18", 0, 1),
    (r"\boxed{18}}", "18", 0, 1),
    # -- accepted by the evaluation grader though it should not be
    (r"\boxed{18 or 19}", "18", 0, 1),
    (r"\boxed{36/2}", "36", 0, 1),
    (r"\boxed{\frac{36}{2}}", "362", 0, 1),
    (r"\boxed{10-3}", "10", 0, 1),
    (r"\boxed{3,4}", "34", 0, 1),
    ("Between 5 and 18", "18", 0, 1),
    # -- the unicode minus is no minus: wrong for -3, and read as +3
    (r"\boxed{−3}", "-3", 0, 0),
    (r"\boxed{−3}", "3", 0, 1),
    # -- the answer that is used is the last number, or the first ####
    ("#### 7 then #### 18", "7", 0, 1),
    ("It was 18 in 2020", "18", 0, 0),
    # -- text around the box
    ("Question: what? \\boxed{18}\n\nQuestion: next", "18", 1, 1),
    ("\\boxed{18}" + " and so on" * 100, "18", 1, 1),
    ("{" * 300 + r"\boxed{18}", "18", 1, 1),
    (r"<think>\boxed{5}</think> \boxed{18}", "18", 1, 0),
    # -- extreme text has a grade, too
    ("9" * 30_000, "18", 0, 0),
    (r"\boxed{" + "9" * 30_000 + "}", "18", 0, 0),
    (r"\boxed{9**9**9}", "18", 0, 0),
    (r"\boxed{nan}", "18", 0, 0),
    (r"\boxed{inf}", "18", 0, 0),
    ("\ud83d" + r"\boxed{18}", "18", 1, 1),
]


@pytest.fixture
def env(renderer, gsm8k_folder):
    return Gsm8kEnvironment(Gsm8kSettings(), renderer=renderer, seed=0, data_dir=gsm8k_folder)


@pytest.mark.parametrize(("reply", "reference", "boxed", "numeric"), REPLIES)
def test_graders_on_a_table_of_replies(renderer, reply, reference, boxed, numeric):
    answer = boxed_answer(reply)
    problem = MathEnv("q", reference, renderer.renderer)

    assert int(answer is not None and problem.check_answer(reply)) == boxed
    assert int(correct_numeric(reply, reference)) == numeric


@pytest.mark.parametrize(("reply", "reference", "boxed", "numeric"), REPLIES)
def test_environment_grades_as_the_cookbooks_own_env(
    renderer, gsm8k_folder, reply, reference, boxed, numeric
):
    """`accuracy` is the training grader's; its reward is the cookbook's rule with 0.1."""
    answer = json.dumps({"question": "What is it?", "answer": f"#### {reference}"})
    (gsm8k_folder / "test.jsonl").write_text(answer + "\n")
    env = Gsm8kEnvironment(Gsm8kSettings(), renderer=renderer, seed=0, data_dir=gsm8k_folder)

    found = env.grade("test-0000", reply, stopped=True)

    assert found.metrics["accuracy"] == found.metrics["correct_boxed"] == boxed
    assert found.metrics["correct_numeric"] == numeric
    assert found.correct == bool(boxed)
    assert found.reward == pytest.approx(boxed + 0.1 * (found.format_ok - 1))


def test_reply_cut_at_the_limit_is_right_in_training_and_wrong_in_evaluation(env, scripted):
    """Reward 1 + 0.1 * (0 - 1) = 0.9; the evaluation grader gives 0 without a stop token."""
    sampler = scripted([(r"\boxed{18}", "length")])

    found = asyncio.run(
        env.run_episode("test-0000", sampler, settings=EpisodeSettings(max_tokens=64), seed=1)
    )

    assert found.reward == pytest.approx(0.9)
    assert found.metrics == {
        "accuracy": 1.0,
        "correct_boxed": 1.0,
        "correct_numeric": 0.0,
        "format": 0.0,
    }
    assert (found.correct, found.truncated, found.extracted) == (True, True, "18")
    assert found.completion_tokens == len(r"\boxed{18}")


def test_reward_equals_the_cookbooks_own_step(env, renderer):
    cookbook = MathEnv("q", "18", renderer.renderer)
    for reply, stop in (
        (r"\boxed{18}", [2]),
        (r"\boxed{18}", []),
        ("18", [2]),
        (r"\boxed{1}", [2]),
    ):
        tokens = [3 + byte for byte in reply.encode()] + stop

        step = asyncio.run(cookbook.step(tokens))

        parsed = renderer.parse(tokens)
        ours = env.grade("test-0000", parsed.text, stopped=parsed.stopped)
        assert ours.reward == pytest.approx(step.reward)


def test_environment_satisfies_the_protocol(env):
    assert isinstance(env, Environment)


def test_prompt_holds_the_worked_example_and_the_box_suffix(env, renderer):
    text = renderer.decode(env.item("test-0000").prompt_tokens)

    assert text.startswith("<|im_start|>user\nHow many r's are in strawberry?")
    assert text.endswith(
        "<|im_start|>user\nEggs cost 2 each. What do 9 cost?"
        " Write your answer in \\boxed{} format.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_reference_loses_its_commas(env):
    assert env.item("test-0001").reference == "1450000"


def test_training_order_is_numpys_permutation_of_the_seed(renderer, gsm8k_folder):
    env = Gsm8kEnvironment(Gsm8kSettings(), renderer=renderer, seed=5, data_dir=gsm8k_folder)
    order = np.random.default_rng(5).permutation(6).tolist()

    assert env.train_batch(0, 3) + env.train_batch(1, 3) == [f"train-{n:04d}" for n in order]


def test_training_order_equals_the_cookbooks_shuffle():
    """`datasets` shuffles with the same generator, so batches equal the cookbook's."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"n": n} for n in range(7473)])

    shuffled = [row["n"] for row in rows.shuffle(seed=0).select(range(64)).to_list()]

    assert shuffled == np.random.default_rng(0).permutation(7473)[:64].tolist()


def test_held_out_order_is_the_files(env):
    assert env.eval_ids == ("test-0000", "test-0001")


def test_folder_of_the_environment_variable_is_read(tokenizer, gsm8k_folder, monkeypatch):
    monkeypatch.setenv("GATED_RL_GSM8K", str(gsm8k_folder))

    env = make_environment("gsm8k", {}, tokenizer=tokenizer, renderer="qwen3_instruct")

    assert len(env.train_ids) == 6


def test_digest_covers_questions_and_answers_whatever_the_layout(gsm8k_folder):
    before = load_gsm8k(gsm8k_folder).digests
    path = gsm8k_folder / "test.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]

    path.write_text("\n".join(json.dumps(dict(reversed(row.items()))) for row in rows) + "\n\n")
    same = load_gsm8k(gsm8k_folder).digests
    rows[0]["answer"] = "#### 19"
    path.write_text("\n".join(map(json.dumps, rows)))

    assert same == before
    assert load_gsm8k(gsm8k_folder).digests["test"] != before["test"]


def test_other_data_than_the_settings_name_is_refused(renderer, gsm8k_folder):
    settings = Gsm8kSettings.read({"data_sha256": {"train": "0" * 64}})

    with pytest.raises(
        EnvInputError, match=r"digest of train is '[0-9a-f]{64}' in local folder; expected 0000"
    ):
        Gsm8kEnvironment(settings, renderer=renderer, seed=0, data_dir=gsm8k_folder)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("test.jsonl", "not json\n", "line 1 is 'not json'.*expected a JSON object"),
        ("test.jsonl", '{"question": "q"}\n', "test row 0"),
        ("test.jsonl", '{"question": "q", "answer": "7"}\n', "an answer that ends in ####"),
        ("train.jsonl", "", "rows is 0"),
    ],
)
def test_broken_files_are_named(renderer, gsm8k_folder, name, text, message):
    (gsm8k_folder / name).write_text(text)

    with pytest.raises(EnvInputError, match=message):
        Gsm8kEnvironment(Gsm8kSettings(), renderer=renderer, seed=0, data_dir=gsm8k_folder)


def test_missing_folder_is_named(renderer, tmp_path):
    with pytest.raises(EnvInputError, match=r"GATED_RL_GSM8K is '.*train.jsonl'"):
        Gsm8kEnvironment(Gsm8kSettings(), renderer=renderer, seed=0, data_dir=tmp_path)


def test_question_in_both_splits_is_refused(renderer, gsm8k_folder):
    """Case and punctuation do not make a question another one."""
    row = {"question": "TIM has 3 apples, and buys one; how many", "answer": "#### 4"}
    (gsm8k_folder / "test.jsonl").write_text(json.dumps(row) + "\n")

    with pytest.raises(EnvInputError, match="'tim has 3 apples and buys one how many'"):
        Gsm8kEnvironment(Gsm8kSettings(), renderer=renderer, seed=0, data_dir=gsm8k_folder)


def test_canaries_agree(env):
    assert [canary.ok for canary in env.canaries()] == [True] * 6


def test_provenance_changes_with_prompt_decoding_and_data(renderer, gsm8k_folder):
    """The same environment gives the same provenance; each of the three changes it."""

    def provenance(system_prompt=None, max_tokens=8):
        env = Gsm8kEnvironment(
            Gsm8kSettings(),
            renderer=renderer,
            seed=0,
            system_prompt=system_prompt,
            data_dir=gsm8k_folder,
        )
        settings = EpisodeSettings(max_tokens=max_tokens, temperature=0.0)
        return env.evaluator_provenance(settings=settings, item_ids=env.eval_ids)

    first, again = provenance(), provenance()
    prompt, decoding = provenance("Think."), provenance(max_tokens=9)
    (gsm8k_folder / "test.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n')

    assert first == again
    assert prompt["prompt_template"] != first["prompt_template"]
    assert decoding["decoding"] != first["decoding"]
    assert provenance()["items"] != first["items"]
