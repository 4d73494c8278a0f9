"""Tokens and log-probabilities depend on request and weights alone, bit for bit.

The same requests are run alone, all together, and in shuffled order and changing company with a
prefix cache that hits. The last test runs all others again in a process with two threads.
"""

import os
import random
import subprocess
import sys

import pytest
import torch

from deploy.local_service import matrices
from deploy.local_service.adapter import LoraConfig
from deploy.local_service.base_model import BaseModel
from deploy.local_service.kv_cache import PrefixCache
from deploy.local_service.model_store import SMOLLM2, TINY, resolve
from deploy.local_service.repeatability import find_differences
from deploy.local_service.sample_request import PromptScoring, SampleRequest
from deploy.local_service.scoring import ScoreRequest, score
from deploy.local_service.token_choice import Choice
from deploy.local_service.training import TrainableModel, TrainingDatum
from tests.deploy.sampled import generate

THREADS = int(os.environ.get("GATED_RL_TEST_THREADS", "1"))


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return BaseModel.load(resolve(TINY, cache_dir=tmp_path_factory.mktemp("cache")).folder)


def adapted(base, seed):
    """A model whose adapter changes something."""
    model = TrainableModel(base, LoraConfig(rank=3, seed=seed))
    noise = torch.randn(model.adapter.flat.shape, generator=torch.Generator().manual_seed(seed))
    model.adapter.flat.add_(0.05 * noise)
    return model


def varied_requests(base, *, prompts, longest, seed=0):
    """Groups that share a beginning, some prompts twice, every kind of setting."""
    rng = random.Random(seed)

    def tokens(n):
        return [rng.randrange(3, base.vocab_size) for _ in range(n)]

    system = tokens(33)
    asked = [system + tokens(rng.randrange(1, longest)) for _ in range(prompts)]
    return [
        SampleRequest(
            prompt=prompt,
            max_tokens=rng.choice([1, 4, 9, 17]),
            num_samples=rng.choice([1, 1, 3]),
            seed=n,
            choice=rng.choice(
                [
                    Choice(),
                    Choice(),
                    Choice(0.0),
                    Choice(0.7),
                    Choice(1.0, 0.9),
                    Choice(1.2, 1.0, 5),
                ]
            ),
            scoring=PromptScoring(topk=2) if n % 4 == 3 else None,
            topk_sampled=2 if n % 5 == 0 else 0,
        )
        for n, prompt in enumerate(asked + asked[: prompts // 2])
    ]


def content(result):
    """Everything a client sees, as comparable values (floats compare by their bits' value)."""
    scores = result.scores
    scored = None if scores is None else (scores.next_logprobs.tolist(), scores.topk_ids.tolist())
    return result.sequences, scored


def shuffled(weights, requests, *, seed):
    """Run in random order, admitted at random times, in small batches, with a shared cache."""
    rng = random.Random(seed)
    order = list(range(len(requests)))
    rng.shuffle(order)
    cache = PrefixCache()
    found = {}
    queue = list(order)
    while queue:
        taken = [queue.pop(0)]

        def admit(taken=taken):
            more = [queue.pop(0) for _ in range(min(len(queue), rng.choice([0, 0, 1, 3])))]
            taken.extend(more)
            return [requests[n] for n in more]

        rows = rng.choice([1, 3, 9, 40])
        results = generate(weights, [requests[taken[0]]], admit=admit, cache=cache, max_rows=rows)
        found.update(zip(taken, results, strict=True))
    hits = sum(result.cache_hit_tokens for result in found.values())
    return [content(found[n]) for n in range(len(requests))], hits


def check_company_changes_nothing(weights, requests, seeds):
    alone = [content(generate(weights, [asked])[0]) for asked in requests]
    together = [content(result) for result in generate(weights, requests)]
    assert together == alone
    hits = 0
    for seed in seeds:
        found, found_in_cache = shuffled(weights, requests, seed=seed)
        assert found == alone
        hits += found_in_cache
    assert hits > 0


def test_company_order_and_cache_change_no_bit(base):
    weights = adapted(base, seed=1).weights
    check_company_changes_nothing(
        weights, varied_requests(base, prompts=8, longest=60), seeds=(1, 2, 3)
    )


def test_company_changes_no_bit_with_plain_products(base, monkeypatch):
    """Where oneDNN does not pack: these products change with 1 to 7 rows, so shapes must be held."""
    monkeypatch.setattr(matrices, "_packs", lambda dtype: False)
    plain = BaseModel.load(base.folder)
    assert find_differences(plain) == []
    weights = adapted(plain, seed=1).weights
    requests = varied_requests(plain, prompts=8, longest=60)
    check_company_changes_nothing(weights, requests, seeds=(1, 2))


def test_long_prompts_change_no_bit(base):
    """Beyond one page of keys (256) and one tile of queries (128)."""
    weights = adapted(base, seed=2).weights
    requests = varied_requests(base, prompts=3, longest=700, seed=5)
    check_company_changes_nothing(weights, requests, seeds=(1, 4))


def test_next_turn_continues_the_cached_first_turn(base):
    weights = adapted(base, seed=3).weights
    cache = PrefixCache()
    first_prompt = list(range(40, 75))
    first = SampleRequest(prompt=first_prompt, max_tokens=30, seed=1, stop=[])
    (turn,) = generate(weights, [first], cache=cache)
    prompt = [*first_prompt, *turn.sequences[0].tokens, 8, 9, 10]
    second = SampleRequest(prompt=prompt, max_tokens=9, seed=2)
    (warm,), (cold,) = generate(weights, [second], cache=cache), generate(weights, [second])
    assert warm.sequences == cold.sequences
    assert warm.cache_hit_tokens == 64  # 35 + 30 tokens, the last without keys: 4 blocks of 16
    assert cold.cache_hit_tokens == 0


def test_cache_tells_weights_apart(base):
    cache = PrefixCache()
    request = SampleRequest(prompt=list(range(40, 80)), max_tokens=5, seed=1)
    for seed in (4, 5):
        weights = adapted(base, seed=seed).weights
        (with_cache,), (without,) = (generate(weights, [request], cache=c) for c in (cache, None))
        assert with_cache.sequences == without.sequences
        assert with_cache.cache_hit_tokens == 0


def test_scores_of_samples_are_the_samples_own(base):
    """Decoding, scoring and the trainer's forward give equal bits."""
    model = adapted(base, seed=6)
    requests = varied_requests(base, prompts=6, longest=80)
    for asked, result in zip(requests, generate(model.weights, requests), strict=True):
        for sequence in result.sequences:
            tokens = [*asked.prompt, *sequence.tokens]
            (scores,) = score(model.weights, [ScoreRequest(tokens)])
            new = scores.next_logprobs[len(asked.prompt) - 1 :]
            assert new.tolist() == list(sequence.logprobs)
            targets = {"target_tokens": torch.tensor(tokens[1:])}
            datum = TrainingDatum(tokens[:-1], targets | {"weights": torch.ones(len(tokens) - 1)})
            (forward,), _ = model.forward([datum])
            (backward,), _ = model.forward_backward([datum], "cross_entropy")
            assert forward.tolist() == scores.next_logprobs.tolist() == backward.tolist()


def training_data(base, *, seed=0):
    rng = random.Random(seed)
    data = []
    for _ in range(3):
        prompt = [rng.randrange(3, base.vocab_size) for _ in range(20)]
        for _ in range(4):
            completion = [rng.randrange(3, base.vocab_size) for _ in range(rng.randrange(1, 40))]
            tokens = prompt + completion
            weights = torch.tensor([0.0] * 19 + [rng.random() for _ in completion])
            targets = torch.tensor(tokens[1:])
            data.append(TrainingDatum(tokens[:-1], {"target_tokens": targets, "weights": weights}))
    return data


def test_datums_logprobs_do_not_depend_on_its_batch(base):
    model = adapted(base, seed=7)
    data = training_data(base)
    together, _ = model.forward_backward(data, "cross_entropy")
    for datum, logprobs in zip(data, together, strict=True):
        (alone,), _ = model.forward_backward([datum], "cross_entropy")
        assert alone.tolist() == logprobs.tolist()


def test_equal_training_requests_give_equal_bits(base):
    digests = set()
    for _ in range(2):
        model = adapted(base, seed=8)
        model.forward_backward(training_data(base), "cross_entropy")
        generate(model.weights, varied_requests(base, prompts=3, longest=20))
        digests.add(model.adapter.gradient.numpy().tobytes())
    assert len(digests) == 1


@pytest.mark.slow
def test_smollm2_company_order_and_cache_change_no_bit():
    base = BaseModel.load(resolve(SMOLLM2).folder)
    assert find_differences(base) == []
    weights = adapted(base, seed=1).weights
    check_company_changes_nothing(weights, varied_requests(base, prompts=4, longest=40), seeds=(1,))


@pytest.mark.skipif(THREADS != 1, reason="is the two-thread run itself")
def test_all_of_this_at_two_threads():
    """In a process of its own: waiting threads must not spin where other work is going on."""
    environment = os.environ | {
        "GATED_RL_TEST_THREADS": "2",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
