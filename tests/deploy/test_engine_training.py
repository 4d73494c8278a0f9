"""Training against autograd on a plain model, and what a request may and may not hold."""

import pytest
import torch
import torch.nn.functional as F

from deploy.local_service import training
from deploy.local_service.adapter import LoraConfig
from deploy.local_service.base_model import BaseModel
from deploy.local_service.model_store import TINY, resolve
from deploy.local_service.optimizer import AdamWConfig
from deploy.local_service.sample_request import SampleRequest
from deploy.local_service.training import TrainableModel, TrainingDatum
from evidence.errors import InputError
from tests.deploy.sampled import generate


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return BaseModel.load(resolve(TINY, cache_dir=tmp_path_factory.mktemp("cache")).folder)


def changed_model(base, **config):
    """A model whose adapter changes something, so that A and B both have gradients."""
    model = TrainableModel(base, LoraConfig(**({"rank": 3, "seed": 1} | config)))
    noise = torch.randn(model.adapter.flat.shape, generator=torch.Generator().manual_seed(0))
    model.adapter.flat.add_(0.05 * noise)
    return model


def random_data(*lengths, prompt=12, seed=0):
    """Sequences of which the first three share a prompt that has no advantage."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(n):
        return torch.randint(3, 259, (n,), generator=generator)

    shared = tokens(prompt)
    data = []
    for n, length in enumerate(lengths):
        sequence = torch.cat([shared if n < 3 else tokens(prompt), tokens(length)])
        count = len(sequence) - 1
        advantages = torch.randn(count, generator=generator)
        advantages[: prompt - 1] = 0.0
        inputs = {
            "target_tokens": sequence[1:],
            "weights": advantages,
            "advantages": advantages,
            "logprobs": -5.0 - torch.rand(count, generator=generator),
        }
        data.append(TrainingDatum(sequence[:-1].tolist(), inputs))
    return data


def plain_logprobs(base, parameters, scale, tokens, targets):
    """The model written out once more, in float64 and without any sharing or fusing."""
    shape = base.shape
    count = len(tokens)

    def project(layer, name, x, rows):
        field = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "attention_out",
                 "gate_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}[name]  # fmt: skip
        weight = getattr(base.layers[layer], field).weight[rows].double()
        y = x @ weight.T
        key = f"layers.{layer}.{name}"
        if f"{key}.A" in parameters:
            y = y + scale * (x @ parameters[f"{key}.A"].T) @ parameters[f"{key}.B"].T
        return y

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + shape.norm_eps) * weight.double()

    def rotate(x):
        cos, sin = base.rotary[:, :count].double()[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    q_dim, kv_dim, mlp = shape.query_dim, shape.kv_dim, shape.mlp
    x = base.embedding[tokens].double()
    mask = torch.full((count, count), -torch.inf, dtype=torch.float64).triu(1)
    for n, layer in enumerate(base.layers):
        h = norm(x, layer.attention_norm)
        q = project(n, "q_proj", h, slice(0, q_dim)).view(count, shape.heads, -1).transpose(0, 1)
        k = project(n, "k_proj", h, slice(q_dim, q_dim + kv_dim))
        v = project(n, "v_proj", h, slice(q_dim + kv_dim, None))
        k, v = (
            t.view(count, shape.kv_heads, -1)
            .transpose(0, 1)
            .repeat_interleave(shape.heads_per_kv, 0)
            for t in (k, v)
        )
        scores = rotate(q) @ rotate(k).transpose(1, 2) * shape.head_dim**-0.5 + mask
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, q_dim)
        x = x + project(n, "o_proj", out, slice(None))
        h = norm(x, layer.mlp_norm)
        gate = project(n, "gate_proj", h, slice(0, mlp))
        up = project(n, "up_proj", h, slice(mlp, None))
        x = x + project(n, "down_proj", F.silu(gate) * up, slice(None))
    hidden = norm(x, base.final_norm)
    logits = hidden @ base.head.weight.double().T
    if "unembed.A" in parameters:
        logits = logits + scale * (hidden @ parameters["unembed.A"].T) @ parameters["unembed.B"].T
    return logits.log_softmax(-1).gather(1, targets.view(count, -1)).view(targets.shape)


def plain_gradient(model, data, loss):
    """Return log-probabilities and the flat gradient by float64 autograd."""
    parameters = {
        name: value.double().clone().requires_grad_()
        for name, value in model.adapter.parameters.items()
    }
    scale = model.lora_config.scale
    logprobs = [
        plain_logprobs(
            model.base, parameters, scale, torch.tensor(d.tokens), d.inputs["target_tokens"]
        )
        for d in data
    ]
    total = sum(loss(lp, datum.inputs).sum() for lp, datum in zip(logprobs, data, strict=True))
    total.backward()
    flat = torch.cat([value.grad.flatten() for value in parameters.values()])
    return [lp.detach() for lp in logprobs], float(total.detach()), flat


def check_against_autograd(model, data, loss_fn, loss):
    expected, total, gradient = plain_gradient(model, data, loss)
    logprobs, metrics = model.forward_backward(data, loss_fn)
    for found, wanted in zip(logprobs, expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=3e-5)
    assert metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
    found = model.adapter.gradient.double()
    assert float((found - gradient).norm() / gradient.norm()) < 3e-5


def importance(logprobs, inputs):
    return -torch.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]


def cross_entropy(logprobs, inputs):
    return -logprobs * inputs["weights"]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"train_unembed": False},
        {"train_mlp": False, "train_unembed": False},
        {"train_attn": False},
        {"train_attn": False, "train_mlp": False, "rank": 1},
    ],
)
def test_gradient_is_that_of_autograd(base, config):
    model = changed_model(base, **config)
    check_against_autograd(model, random_data(5, 9, 1, 30), "importance_sampling", importance)


def test_gradient_beyond_one_page_of_keys(base):
    model = changed_model(base)
    check_against_autograd(model, random_data(300, 290, prompt=40), "cross_entropy", cross_entropy)


def test_small_batches_give_the_same_gradient(base, monkeypatch):
    whole, pieces = changed_model(base), changed_model(base)
    data = random_data(5, 9, 1, 30)
    whole_logprobs, whole_metrics = whole.forward_backward(data, "importance_sampling")
    monkeypatch.setattr(training, "TRAIN_ROWS", 24)
    logprobs, metrics = pieces.forward_backward(data, "importance_sampling")
    assert [x.tolist() for x in logprobs] == [x.tolist() for x in whole_logprobs]
    assert metrics["loss:sum"] == pytest.approx(whole_metrics["loss:sum"], rel=1e-5)
    torch.testing.assert_close(
        pieces.adapter.gradient, whole.adapter.gradient, rtol=1e-4, atol=1e-4
    )


def test_long_sequences_recompute_their_layers_and_give_the_same_bits(base, monkeypatch):
    whole, recomputed = changed_model(base), changed_model(base)
    data = random_data(60)
    whole.forward_backward(data, "cross_entropy")
    monkeypatch.setattr(training, "TRAIN_ROWS", 24)
    recomputed.forward_backward(data, "cross_entropy")
    assert recomputed.adapter.gradient.tolist() == whole.adapter.gradient.tolist()


def test_several_targets_per_position(base):
    """[T, K] targets and weights: a sum over all of them."""
    model = changed_model(base)
    tokens = list(range(40, 52))
    targets = torch.tensor([[n + 1, 3 + n % 2, 200] for n in tokens])
    weights = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    data = [TrainingDatum(tokens, {"target_tokens": targets, "weights": weights})]
    check_against_autograd(model, data, "cross_entropy", cross_entropy)
    (logprobs,), _ = model.forward(data)
    assert logprobs.shape == (12, 3)


def test_gradients_of_requests_add_up(base):
    one, two = changed_model(base), changed_model(base)
    data = random_data(5, 9)
    one.forward_backward(data, "cross_entropy")
    two.forward_backward(data[:1], "cross_entropy")
    two.forward_backward(data[1:], "cross_entropy")
    torch.testing.assert_close(one.adapter.gradient, two.adapter.gradient, rtol=1e-4, atol=1e-4)


def test_forward_leaves_the_gradient_alone(base):
    model = changed_model(base)
    model.forward(random_data(5))
    assert not model.adapter.gradient.any()


def test_logprobs_are_given_whatever_the_weights(base):
    model = changed_model(base)
    (datum,) = random_data(9)
    nothing = dict(datum.inputs) | {"weights": torch.zeros(len(datum.tokens))}
    (weighted,), _ = model.forward_backward([datum], "cross_entropy")
    model.discard_gradient()
    (unweighted,), metrics = model.forward_backward(
        [TrainingDatum(datum.tokens, nothing)], "cross_entropy"
    )
    assert unweighted.tolist() == weighted.tolist()
    assert metrics["loss:sum"] == 0.0
    assert not model.adapter.gradient.any()


def test_missing_weights_count_as_ones(base):
    model = changed_model(base)
    (datum,) = random_data(9)
    targets = {"target_tokens": datum.inputs["target_tokens"]}
    (logprobs,), metrics = model.forward([TrainingDatum(datum.tokens, targets)])
    assert metrics["loss:sum"] == pytest.approx(-float(logprobs.double().sum()))


def test_fresh_adapter_changes_nothing_and_its_seed_decides_it(base):
    one, same, other = (TrainableModel(base, LoraConfig(rank=4, seed=s)) for s in (1, 1, 2))
    assert one.adapter_sha256() == same.adapter_sha256() != other.adapter_sha256()
    data = random_data(9)
    assert one.forward(data)[0][0].tolist() == other.forward(data)[0][0].tolist()


def test_unseeded_adapter_has_a_seed_that_makes_it_again(base):
    model = TrainableModel(base, LoraConfig(rank=2))
    again = TrainableModel(base, model.lora_config)
    assert again.adapter_sha256() == model.adapter_sha256()


def test_steps_lower_the_loss_and_clear_the_gradient(base):
    model = TrainableModel(base, LoraConfig(rank=4, seed=1))
    data = random_data(20)
    losses = []
    for _ in range(5):
        weights = {"weights": torch.ones(len(data[0].tokens))}
        datum = TrainingDatum(data[0].tokens, dict(data[0].inputs) | weights)
        _, metrics = model.forward_backward([datum], "cross_entropy")
        losses.append(metrics["loss:sum"])
        model.optim_step(AdamWConfig(learning_rate=0.02))
        assert not model.adapter.gradient.any()
    assert losses == sorted(losses, reverse=True)
    assert model.optimizer_state().steps == 5


def test_step_without_a_gradient_works(base):
    model = TrainableModel(base, LoraConfig(rank=4, seed=1))
    before = model.adapter_sha256()
    metrics = model.optim_step(AdamWConfig())
    assert metrics["grad_norm"] == 0.0
    assert model.adapter_sha256() == before
    assert model.optimizer_state().steps == 1


def test_optimizer_state_says_what_was_last_used(base):
    model = TrainableModel(base, LoraConfig(rank=4, seed=1))
    assert model.optimizer_state().last_config is None
    config = AdamWConfig(learning_rate=0.5, beta2=0.9)
    model.optim_step(config)
    assert model.optimizer_state().last_config == config


def test_published_weights_do_not_move(base):
    model = changed_model(base)
    published = model.weights
    request = SampleRequest(prompt=[50, 60, 70], max_tokens=10, seed=1)
    before = generate(published, [request])[0].sequences
    model.forward_backward(random_data(9), "cross_entropy")
    model.optim_step(AdamWConfig(learning_rate=0.1))
    assert generate(published, [request])[0].sequences == before
    assert model.weights.sha256 != published.sha256
    assert generate(model.weights, [request])[0].sequences != before


def test_loss_that_is_not_finite_leaves_the_gradient_as_it_was(base):
    model = changed_model(base)
    data = random_data(5)
    model.forward_backward(data, "cross_entropy")
    before = model.adapter.gradient.tolist()
    far = torch.full((len(data[0].tokens),), -1e30)
    bad = TrainingDatum(data[0].tokens, dict(data[0].inputs) | {"logprobs": far})
    with pytest.raises(InputError, match="loss: expected a finite loss"):
        model.forward_backward([*random_data(4, seed=1), bad], "importance_sampling")
    assert model.adapter.gradient.tolist() == before


@pytest.mark.parametrize(
    ("tokens", "changes", "message"),
    [
        ([], {}, r"data\[0\].model_input: expected 1 to 4096 tokens"),
        ([259, 1], {}, r"data\[0\].model_input: expected tokens from 0 to 258, found 259"),
        ([-1, 1], {}, "found -1"),
        ([4, 5], {"target_tokens": torch.tensor([4, 259])}, "target_tokens.*found 259"),
        ([4, 5], {"target_tokens": torch.tensor([4])}, r"target_tokens: expected shape \[2\]"),
        ([4, 5], {"target_tokens": torch.tensor([4.0, 5.0])}, "int64"),
        ([4, 5], {"target_tokens": None}, "target_tokens"),
        ([4, 5], {"advantages": None}, r"advantages: expected shape \[2\], found None"),
        ([4, 5], {"advantages": torch.ones(3)}, r"advantages: expected shape \[2\]"),
        ([4, 5], {"logprobs": torch.tensor([0.0, float("nan")])}, "logprobs: expected finite"),
        ([4, 5], {"advantages": torch.tensor([float("inf"), 0.0])}, "advantages: expected finite"),
    ],
)
def test_unusable_data_are_refused(base, tokens, changes, message):
    model = changed_model(base)
    inputs = {
        "target_tokens": torch.tensor([4, 5]),
        "logprobs": torch.zeros(2),
        "advantages": torch.zeros(2),
    } | changes
    inputs = {name: value for name, value in inputs.items() if value is not None}
    with pytest.raises(InputError, match=message):
        model.forward_backward([TrainingDatum(tokens, inputs)], "importance_sampling")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rank": 0}, "rank: expected 1 to 256, found 0"),
        ({"rank": 257}, "rank"),
        ({"rank": 4, "alpha": 0.0}, "alpha"),
        (
            {"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False},
            "at least one of attn, mlp and unembed",
        ),
    ],
)
def test_unusable_adapters_are_refused(config, message):
    with pytest.raises(InputError, match=message):
        LoraConfig(**config)
