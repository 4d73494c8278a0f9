"""The bfloat16 option: products in bfloat16, residual stream and logits in float32."""

import pytest
import torch

from deploy.local_service.adapter import LoraConfig
from deploy.local_service.base_model import BaseModel
from deploy.local_service.model_store import TINY, resolve
from deploy.local_service.optimizer import AdamWConfig
from deploy.local_service.repeatability import find_differences
from deploy.local_service.sample_request import SampleRequest
from deploy.local_service.scoring import ScoreRequest, score
from deploy.local_service.training import TrainableModel, TrainingDatum
from deploy.local_service.transformer import hidden_rows
from tests.deploy.sampled import generate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return resolve(TINY, cache_dir=tmp_path_factory.mktemp("cache")).folder


def changed_model(folder, dtype):
    model = TrainableModel(BaseModel.load(folder, dtype=dtype), LoraConfig(rank=3, seed=1))
    noise = torch.randn(model.adapter.flat.shape, generator=torch.Generator().manual_seed(0))
    model.adapter.flat.add_(0.05 * noise)
    return model


def datum():
    tokens = torch.randint(3, 259, (40,), generator=torch.Generator().manual_seed(0))
    return TrainingDatum(tokens[:-1].tolist(), {"target_tokens": tokens[1:]})


def test_products_are_bfloat16_and_the_rest_is_float32(folder):
    model = changed_model(folder, torch.bfloat16)
    seen = []

    def multiply(layer, field, rows, matrix):
        product = matrix.multiply(rows)
        seen.append((rows.dtype, product.dtype))
        return product

    def attend(layer, q, k, v):
        return q.reshape(len(q), -1)

    with torch.no_grad():
        tokens = torch.arange(3, 11)
        hidden = hidden_rows(
            model.weights, tokens, torch.arange(8), attend=attend, multiply=multiply
        )
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert hidden.dtype == torch.float32
    assert model.weights.head.multiply(hidden).dtype == torch.float32


def test_values_and_gradient_are_near_those_of_float32(folder):
    """bfloat16 has 8 bits: a few hundredths of a nat on this model, a few percent of the gradient."""
    rough, fine = (changed_model(folder, d) for d in (torch.bfloat16, torch.float32))
    (rough_logprobs,), _ = rough.forward_backward([datum()], "cross_entropy")
    (fine_logprobs,), _ = fine.forward_backward([datum()], "cross_entropy")
    difference = (rough_logprobs - fine_logprobs).abs()
    assert 0 < float(difference.mean()) < 0.05
    distance = (rough.adapter.gradient - fine.adapter.gradient).norm()
    assert float(distance / fine.adapter.gradient.norm()) < 0.1


def test_small_steps_are_not_lost_in_rounding(folder):
    """Kept apart, an adapter that changes weights by less than half a bfloat16 step still counts."""
    model = TrainableModel(
        BaseModel.load(folder, dtype=torch.bfloat16),
        LoraConfig(rank=4, seed=1, train_unembed=False),
    )
    (before,), _ = model.forward_backward([datum()], "cross_entropy")
    model.optim_step(AdamWConfig(learning_rate=1e-4))
    (after,), _ = model.forward([datum()])
    assert float(after.double().sum()) > float(before.double().sum())


def test_sampler_scorer_and_trainer_agree(folder):
    model = changed_model(folder, torch.bfloat16)
    assert find_differences(model.base) == []
    prompt = list(range(40, 75))
    requests = [SampleRequest(prompt=prompt, max_tokens=20, seed=n, stop=[]) for n in range(5)]
    together = generate(model.weights, requests)
    for request, result in zip(requests, together, strict=True):
        assert generate(model.weights, [request])[0].sequences == result.sequences
        (sequence,) = result.sequences
        tokens = [*prompt, *sequence.tokens]
        (scores,) = score(model.weights, [ScoreRequest(tokens)])
        assert scores.next_logprobs[len(prompt) - 1 :].tolist() == list(sequence.logprobs)
        inputs = {"target_tokens": torch.tensor(tokens[1:])}
        (forward,), _ = model.forward([TrainingDatum(tokens[:-1], inputs)])
        assert forward.tolist() == scores.next_logprobs.tolist()
