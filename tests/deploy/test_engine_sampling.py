"""What sampling requests get: stop rules, seeds, filters, scores, limits."""

import math
from functools import partial

import pytest
import torch

from deploy.local_service.base_model import BaseModel
from deploy.local_service.decoding import DecodeBatch, StopRule
from deploy.local_service.kv_cache import DecodeMemory, DecodeSlots
from deploy.local_service.model_store import TINY, resolve
from deploy.local_service.sample_request import PromptScoring, SampleRequest
from deploy.local_service.sampler_weights import SamplerWeights
from deploy.local_service.scoring import ScoreRequest, score
from deploy.local_service.token_choice import Choice, choose, row_generator
from evidence.errors import InputError
from tests.deploy.sampled import generate

PROMPT = [1, 120, 113, 2, 13, 1, 100]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return BaseModel.load(resolve(TINY, cache_dir=tmp_path_factory.mktemp("cache")).folder)


@pytest.fixture(scope="module")
def weights(base):
    return SamplerWeights.of_base(base)


def request(**changes):
    return SampleRequest(**({"prompt": PROMPT, "max_tokens": 12, "seed": 7, "stop": []} | changes))


def sample(weights, **changes):
    (result,) = generate(weights, [request(**changes)])
    return result


def test_equal_seeds_give_equal_samples_and_others_do_not(weights):
    first, again, other = (sample(weights, seed=seed) for seed in (7, 7, 8))
    assert first.sequences == again.sequences
    assert first.sequences != other.sequences


def test_samples_of_one_request_differ_and_keep_their_order(weights):
    both = sample(weights, num_samples=2).sequences
    assert both[0].tokens != both[1].tokens
    assert both[0] == sample(weights, num_samples=1).sequences[0]


def test_requests_without_a_seed_differ(weights):
    assert sample(weights, seed=None).sequences != sample(weights, seed=None).sequences


def test_length_ends_a_sequence(weights):
    (sequence,) = sample(weights, max_tokens=5).sequences
    assert (len(sequence.tokens), sequence.stop_reason) == (5, "length")
    assert len(sequence.logprobs) == 5


def test_no_new_token_may_be_asked_for(weights):
    (sequence,) = sample(weights, max_tokens=0).sequences
    assert (sequence.tokens, sequence.stop_reason) == ((), "length")


def test_stop_token_ends_a_sequence_and_is_part_of_it(weights):
    free = sample(weights).sequences[0].tokens
    stopped = sample(weights, stop=[free[4]]).sequences[0]
    assert stopped.tokens == free[: free.index(free[4]) + 1]
    assert stopped.stop_reason == "stop"


def test_end_token_stops_unless_the_stop_list_is_empty(base):
    """Token 2 is the end of a turn; 50 is just another token."""
    rules = {stop: StopRule(request(stop=stop), base) for stop in (None, (50,), ())}
    assert [rules[stop].ends([9, 2]) for stop in (None, (50,), ())] == [True, True, False]
    assert [rules[stop].ends([2, 50]) for stop in (None, (50,), ())] == [False, True, False]


def test_stop_text_may_span_tokens(base):
    """One token per byte: "b½" is three tokens."""
    rule = StopRule(request(stop=["b½"]), base)
    tokens = base.encode("ab½")
    assert [rule.ends(tokens[:n]) for n in (1, 2, 3, 4)] == [False, False, False, True]
    assert not rule.ends(base.encode("b½c"))


def test_single_stop_text_is_accepted(base):
    assert StopRule(request(stop="a"), base).ends(base.encode("xa"))


def test_greedy_takes_the_likeliest_token(weights):
    sequence = sample(weights, choice=Choice(temperature=0.0), topk_sampled=1).sequences[0]
    assert [position[0][0] for position in sequence.topk] == list(sequence.tokens)


def test_logprobs_are_the_models_own_whatever_the_filters(weights):
    choice = Choice(temperature=0.5, top_p=0.7, top_k=20)
    sequence = sample(weights, choice=choice).sequences[0]
    (scores,) = score(weights, [ScoreRequest([*PROMPT, *sequence.tokens])])
    own = scores.next_logprobs[len(PROMPT) - 1 :]
    assert own.tolist() == list(sequence.logprobs)


def test_likeliest_tokens_are_returned_with_each_sampled_one(weights):
    sequence = sample(weights, topk_sampled=259).sequences[0]
    for token, logprob, position in zip(
        sequence.tokens, sequence.logprobs, sequence.topk, strict=True
    ):
        assert dict(position)[token] == logprob
        assert sum(math.exp(value) for _, value in position) == pytest.approx(1.0, abs=1e-5)


def choose_many(logits, choice, count=4000):
    uniforms = [(n + 0.5) / count for n in range(count)]
    tokens, _ = choose(torch.tensor([logits]).repeat(count, 1), [choice] * count, uniforms)
    return torch.bincount(tokens, minlength=len(logits)).tolist()


def test_tokens_come_in_proportion_to_their_probability():
    """Probabilities 1/2, 1/4, 1/4 of 4000 evenly spaced numbers."""
    logits = [math.log(0.5), math.log(0.25), math.log(0.25)]
    assert choose_many(logits, Choice()) == [2000, 1000, 1000]


def test_temperature_sharpens():
    """Squared: 4/6, 1/6, 1/6."""
    logits = [math.log(0.5), math.log(0.25), math.log(0.25)]
    counts = choose_many(logits, Choice(temperature=0.5), count=6000)
    assert counts == pytest.approx([4000, 1000, 1000], abs=1)


def test_top_k_keeps_the_likeliest():
    """Of 0.4, 0.3, 0.2, 0.1 two are left: 4/7 and 3/7."""
    logits = [math.log(p) for p in (0.1, 0.4, 0.3, 0.2)]
    counts = choose_many(logits, Choice(top_k=2), count=700)
    assert counts == pytest.approx([0, 400, 300, 0], abs=1)


@pytest.mark.parametrize(("top_p", "kept"), [(0.35, 1), (0.45, 2), (0.71, 3), (1.0, 4)])
def test_top_p_keeps_the_fewest_that_reach_it(top_p, kept):
    logits = [math.log(p) for p in (0.1, 0.4, 0.3, 0.2)]
    assert sum(count > 0 for count in choose_many(logits, Choice(top_p=top_p))) == kept


def test_impossible_token_is_never_chosen():
    logits = torch.full((3, 300), -torch.inf)
    logits[:, 7] = 0.0
    tokens, logprobs = choose(logits, [Choice()] * 3, [0.0, 0.5, 1 - 2**-53])
    assert tokens.tolist() == [7, 7, 7]
    assert logprobs.tolist() == [0.0, 0.0, 0.0]


def test_random_numbers_depend_on_seed_and_index_alone():
    assert row_generator(3, 1).random() == row_generator(3, 1).random()
    numbers = {row_generator(seed, index).random() for seed in range(3) for index in range(3)}
    assert len(numbers) == 9
    assert row_generator(None, 0).random() != row_generator(None, 0).random()


def test_prompt_is_scored_with_its_samples(weights):
    targets = torch.tensor([[5, -1]] * (len(PROMPT) - 1) + [[-1, 9]])
    scoring = PromptScoring(topk=3, targets=targets)
    result = sample(weights, scoring=scoring)
    (alone,) = score(weights, [ScoreRequest(PROMPT, targets=targets, topk=3)])
    assert result.scores.next_logprobs.tolist() == alone.next_logprobs.tolist()
    assert result.scores.topk_ids.tolist() == alone.topk_ids.tolist()
    found = result.scores.target_logprobs
    assert found.isnan().tolist() == (targets < 0).tolist()
    assert result.sequences == sample(weights).sequences


def test_target_of_the_next_token_has_the_next_tokens_score(weights):
    targets = torch.tensor([*PROMPT[1:], 3])
    (scores,) = score(weights, [ScoreRequest(PROMPT, targets=targets)])
    assert scores.target_logprobs[:-1].tolist() == scores.next_logprobs.tolist()


def test_requests_join_a_running_batch(weights):
    waiting = [[request(seed=n)] for n in range(3)]
    results = generate(weights, [request()], admit=lambda: waiting.pop(0) if waiting else [])
    assert [r.sequences for r in results[1:]] == [
        sample(weights, seed=n).sequences for n in range(3)
    ]


def test_result_is_told_as_soon_as_it_is_there(weights):
    order = []
    requests = [
        request(max_tokens=n, on_done=lambda result, n=n: order.append((n, len(result.sequences))))
        for n in (9, 2, 5)
    ]
    generate(weights, requests)
    assert order == [(2, 1), (5, 1), (9, 1)]


def test_cancelled_request_ends_without_a_result(weights):
    asked = []

    def cancelled():
        asked.append(1)
        return len(asked) > 3

    done = []
    stopped = request(max_tokens=1000, cancelled=cancelled, on_done=done.append)
    results = generate(weights, [stopped, request()])
    assert results[0] is None
    assert done == []
    assert results[1].sequences == sample(weights).sequences


def test_more_sequences_than_rows_take_turns(weights):
    results = generate(weights, [request(seed=n, num_samples=3) for n in range(4)], max_rows=5)
    for n, result in enumerate(results):
        assert result.sequences == sample(weights, seed=n, num_samples=3).sequences


def test_little_memory_means_fewer_rows_at_once_and_no_other_result(weights):
    """One sequence is taken on whatever it needs; the others wait for it."""
    batch = DecodeBatch(weights, memory=DecodeMemory(max_bytes=1))
    results = {}
    batch.add([request(seed=n, on_done=partial(results.setdefault, n)) for n in range(3)])
    batch.step()
    assert len(batch._live) == 1
    while not batch.idle:
        batch.step()
    assert len(results) == 3
    for n, result in results.items():
        assert result.sequences == sample(weights, seed=n).sequences


def test_batches_share_the_memory_for_decoding(weights):
    """Room for eight sequences in all: beside a batch that plans for them, another gets one row.

    When the first batch is done, the second takes on all that wait.
    """
    slots = DecodeSlots(weights.base.shape, dtype=weights.base.dtype)
    memory = DecodeMemory(max_bytes=slots.bytes_for(slots=8, tokens=len(PROMPT) + 12))
    first, second = (DecodeBatch(weights, memory=memory) for _ in range(2))
    first.add([request(seed=1, max_tokens=12, stop=[])])
    first.step()
    second.add([request(seed=n, max_tokens=12, stop=[]) for n in range(3)])
    second.step()
    assert (len(first._live), len(second._live)) == (1, 1)
    while not first.idle:
        first.step()
    second.step()
    assert len(second._live) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "prompt: expected at least one token"),
        ({"prompt": [5, 259]}, "prompt: expected tokens from 0 to 258, found 259"),
        ({"prompt": [-1]}, "prompt: expected tokens from 0 to 258, found -1"),
        ({"max_tokens": 4090}, "max_tokens: expected at most 4096 tokens together"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"num_samples": 0}, "num_samples: expected at least 1, found 0"),
        ({"choice": Choice(temperature=-1.0)}, "temperature"),
        ({"choice": Choice(temperature=float("nan"))}, "temperature"),
        ({"choice": Choice(top_p=0.0)}, "top_p"),
        ({"topk_sampled": 260}, "topk: expected at most 259"),
    ],
)
def test_unusable_requests_are_refused(weights, changes, message):
    with pytest.raises(InputError, match=message):
        sample(weights, **changes)
