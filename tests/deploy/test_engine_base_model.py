"""The model's arithmetic against transformers, and what a folder must hold."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.local_service.base_model import BaseModel
from deploy.local_service.model_store import SMOLLM2, TINY, resolve
from deploy.local_service.repeatability import find_differences
from deploy.local_service.sample_request import SampleRequest
from deploy.local_service.sampler_weights import SamplerWeights
from deploy.local_service.scoring import ScoreRequest, score
from deploy.local_service.token_choice import Choice
from evidence.errors import InputError
from tests.deploy.sampled import generate


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return resolve(TINY, cache_dir=tmp_path_factory.mktemp("cache"))


def random_tokens(vocab, *lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


def reference_logprobs(folder, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)


def check_against_transformers(folder, lengths, *, tolerance):
    base = BaseModel.load(folder)
    weights = SamplerWeights.of_base(base)
    sequences = random_tokens(base.vocab_size, *lengths)
    requests = [ScoreRequest(tokens, topk=3) for tokens in sequences]
    for tokens, scores in zip(sequences, score(weights, requests), strict=True):
        expected = reference_logprobs(folder, tokens)
        following = torch.tensor(tokens[1:])[:, None]
        own = expected[:-1].gather(1, following)[:, 0]
        torch.testing.assert_close(scores.next_logprobs, own, rtol=0, atol=tolerance)
        best = expected.topk(3)
        torch.testing.assert_close(scores.topk_logprobs, best.values, rtol=0, atol=tolerance)
        assert (scores.topk_ids == best.indices).float().mean() > 0.99


def test_tiny_scores_as_transformers_does(tiny):
    check_against_transformers(tiny.folder, (2, 9, 70, 300), tolerance=2e-5)


def test_tiny_continues_greedily_as_transformers_does(tiny):
    weights = SamplerWeights.of_base(BaseModel.load(tiny.folder))
    (prompt,) = random_tokens(259, 12)
    request = SampleRequest(prompt=prompt, max_tokens=20, choice=Choice(temperature=0.0), stop=[])
    (result,) = generate(weights, [request])
    tokens = list(prompt)
    for _ in range(20):
        tokens.append(int(reference_logprobs(tiny.folder, tokens)[-1].argmax()))
    assert list(result.sequences[0].tokens) == tokens[12:]


def test_tokenizer_gives_bytes_and_chat_tokens(tiny):
    """Byte b is token 3 + b: 104 + 3, 105 + 3, then the end-of-turn token 2."""
    base = BaseModel.load(tiny.folder)
    assert base.encode("hi<|im_end|>") == [107, 108, 2]
    assert base.decode([107, 108, 2]) == "hi<|im_end|>"
    assert base.decode(base.encode("naïve ½\n")) == "naïve ½\n"
    assert base.eos_ids == {2}


def test_chat_template_is_that_of_the_cookbooks_renderer(tiny):
    renderers = pytest.importorskip("tinker_cookbook.renderers")
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1?"}]
    prompt = renderers.get_renderer("qwen3_instruct", tokenizer).build_generation_prompt(messages)
    templated = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert prompt.to_ints() == templated["input_ids"]


def test_model_is_a_few_thousand_parameters(tiny):
    base = BaseModel.load(tiny.folder)
    layers = [m for layer in base.layers for m in (layer.qkv, layer.attention_out, layer.gate_up)]
    count = base.embedding.numel() + sum(m.weight.numel() for m in layers)
    assert 4000 < count < 12000


def test_nothing_found_that_is_not_repeatable(tiny):
    assert find_differences(BaseModel.load(tiny.folder)) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_type", "qwen2"), ("attention_bias", True), ("rope_scaling", {"rope_type": "linear"})],
)
def test_other_architectures_are_refused(tiny, tmp_path, field, value):
    for file in tiny.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(InputError, match="expected"):
        BaseModel.load(tmp_path)


def test_dtype_that_is_not_served_is_refused(tiny):
    with pytest.raises(InputError, match="dtype: expected one of float32, bfloat16"):
        BaseModel.load(tiny.folder, dtype=torch.float16)


@pytest.mark.slow
def test_smollm2_scores_as_transformers_does():
    check_against_transformers(resolve(SMOLLM2).folder, (20, 300), tolerance=2e-4)


@pytest.mark.slow
def test_smollm2_splits_digits_and_knows_its_chat_tokens():
    base = BaseModel.load(resolve(SMOLLM2).folder)
    assert base.decode(base.encode("3 + 25 = 100")) == "3 + 25 = 100"
    assert len(base.encode("100")) == 3
    assert base.encode("<|im_start|><|im_end|>") == [1, 2]
    assert base.eos_ids == {2}
