"""Every named fault makes an observable difference, and nothing does without one."""

import dataclasses
import math

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types

from deploy.local_service.faults import FAULTS, SemanticFaults
from deploy.local_service.requests import Sample
from deploy.local_service.wire import SampleResult, SequenceResult, TopK

PROMPT = types.ModelInput.from_ints([1, 60, 61, 62, 63, 64])
ADAM = types.AdamParams(
    learning_rate=0.05, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5, beta1=0.9, beta2=0.95
)


def datum(tokens, weights):
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": torch.tensor(tokens[1:]),
            "weights": torch.tensor(weights),
        },
    )


def batch():
    return [datum([1, 70, 71, 72], [0.0, 1.0, -0.5]), datum([1, 80, 81], [0.5, 1.0])]


class Bench:
    """Fresh clients against the service, and its own view of them."""

    def __init__(self, url):
        self.url = url
        self.client = tinker.ServiceClient(base_url=url)

    def trainer(self):
        return self.client.create_lora_training_client("tiny", rank=4, seed=3).result(timeout=60)

    def control(self, method, path, **kwargs):
        with httpx.Client(trust_env=False, timeout=30) as http:
            answer = http.request(method, f"{self.url}/api/v1/{path}", **kwargs)
            answer.raise_for_status()
            return answer.json()

    def logprobs(self, model):
        output = model.forward(batch(), "cross_entropy").result(timeout=60)
        return [item["logprobs"].tolist() for item in output.loss_fn_outputs]

    def step(self, model):
        model.forward_backward(batch(), "cross_entropy").result(timeout=60)
        return model.optim_step(ADAM).result(timeout=60).metrics


def training(bench):
    """One step from two chunks, after a forward: losses, log-probabilities before and after."""
    model = bench.trainer()
    before = model.forward(batch(), "cross_entropy").result(timeout=60)
    chunks = [model.forward_backward([item], "cross_entropy") for item in batch()]
    losses = [chunk.result(timeout=60).metrics for chunk in chunks]
    metrics = model.optim_step(ADAM).result(timeout=60).metrics
    order = [item["logprobs"].tolist() for item in before.loss_fn_outputs]
    return before.metrics, order, losses, metrics, bench.logprobs(model)


def repeated_request(bench):
    """One optimizer step, sent three times under one number."""
    model = bench.trainer()
    model.forward_backward(batch(), "cross_entropy").result(timeout=60)
    adam = {"learning_rate": 0.05, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    body = {"model_id": model.model_id, "seq_id": 9, "adam_params": adam}
    for _ in range(3):
        request = bench.control("POST", "optim_step", json=body)["request_id"]
    bench.control("POST", "retrieve_future", json={"request_id": request})
    return bench.control("GET", f"local/models/{model.model_id}")["optimizer"]["steps"]


def restoring(bench):
    """One more step: live after a save, restored with and without the optimizer."""
    model = bench.trainer()
    for _ in range(3):
        bench.step(model)
    path = model.save_state("s").result(timeout=60).path
    models = [
        model,
        bench.client.create_training_client_from_state_with_optimizer(path).result(timeout=60),
        bench.client.create_training_client_from_state(path).result(timeout=60),
    ]
    for one in models:
        bench.step(one)
    return [bench.logprobs(one) for one in models]


def publishing(bench):
    """Prompt scores of two publications with a step between them."""
    model = bench.trainer()
    scores = []
    for _ in range(2):
        bench.step(model)
        sampler = model.save_weights_and_get_sampling_client().result(timeout=60)
        scores.append(sampler.compute_logprobs(PROMPT).result(timeout=60))
    return scores


def kinds(bench):
    """Which checkpoints there are after saving both kinds under one name."""
    model = bench.trainer()
    bench.step(model)
    model.save_state("s").result(timeout=60)
    model.save_weights_for_sampler("s").result(timeout=60)
    listed = bench.control("GET", f"training_runs/{model.model_id}/checkpoints")["checkpoints"]
    return sorted(item["checkpoint_id"] for item in listed)


def sampling(bench, **params):
    sampler = bench.client.create_sampling_client(base_model="tiny").result(timeout=60)
    asked = types.SamplingParams(**({"max_tokens": 6, "seed": 5, "stop": []} | params))
    answer = sampler.sample(PROMPT, 3, asked, include_prompt_logprobs=True).result(timeout=60)
    sequences = [(s.tokens, s.logprobs, s.stop_reason) for s in answer.sequences]
    return sequences, answer.prompt_logprobs


def tempered(bench):
    return sampling(bench, temperature=0.5)


def nucleus(bench):
    return sampling(bench, top_p=0.7)


def stopping(bench):
    return sampling(bench, stop=[int(token) for token in range(100, 200)])


def reports(bench):
    """What is said about optimizer and base model."""
    model = bench.trainer()
    known = bench.control("GET", f"local/models/{model.model_id}")
    return known["optimizer"], model.get_info().model_data.model_name


PROBES = {
    "mean_instead_of_sum": training,
    "mean_over_data": lambda bench: bench.step(bench.trainer()),
    "negative_weights_blown_up": training,
    "normalised_by_weight_sum": training,
    "no_loss_metric": training,
    "forward_accumulates": training,
    "gradient_erased_between_chunks": training,
    "scrambled_order": training,
    "logprobs_off_by_one": training,
    "zero_logprobs_where_unweighted": training,
    "step_applied_twice": training,
    "replay_executes_again": repeated_request,
    "learning_rate_halved": training,
    "learning_rate_1000_times": training,
    "gradient_clip_ignored": training,
    "weight_decay_ignored": training,
    "cold_adam_after_restore": restoring,
    "restore_ignores_weights_only": restoring,
    "save_resets_optimizer": restoring,
    "stale_sampler": publishing,
    "sampler_overwrites_training": kinds,
    "temperature_scaled_logprobs": tempered,
    "top_p_renormalised_logprobs": nucleus,
    "sampler_disagrees_with_trainer": sampling,
    "ignored_seed": sampling,
    "duplicate_samples": sampling,
    "stop_token_missing": stopping,
    "prompt_logprobs_shifted": sampling,
    "lost_optimizer_report": reports,
    "wrong_base_model_report": reports,
}


@pytest.fixture(scope="module")
def healthy(local_service):
    """What each probe sees on a service without faults, computed once."""
    bench, seen = Bench(local_service.url), {}

    def look(probe):
        if probe not in seen:
            seen[probe] = probe(bench)
            assert probe(bench) == seen[probe], "the probe itself is not repeatable"
        return seen[probe]

    return look


def test_every_fault_has_a_probe():
    """A fault that nothing could observe would be no test of a conformance check."""
    assert PROBES.keys() == FAULTS.keys()
    assert len(FAULTS) >= 15


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_fault_is_observable(faulty_service, healthy, name):
    """The same calls give another answer with the fault, and the old one after it."""
    bench, probe = Bench(faulty_service.url), PROBES[name]
    expected = healthy(probe)
    bench.control("POST", "local/faults", json={"faults": [name]})
    faulty = probe(bench)

    assert faulty != expected


def test_tempered_and_renormalised_logprobs_by_hand():
    """Two tokens at 0.8 and 0.2: at temperature 0.5 the first has 0.64 / 0.68; in a nucleus of
    0.7 it is alone."""
    request = Sample.model_validate(
        {
            "sampling_session_id": "s",
            "seq_id": 0,
            "prompt": {"chunks": []},
            "sampling_params": {"temperature": 0.5, "top_p": 0.7},
        }
    )
    row = np.log([[0.8, 0.2]]).astype(np.float32)
    sequence = SequenceResult(
        [4], [math.log(0.8)], stopped=False, topk=TopK(np.array([[4, 9]]), row)
    )
    found = {}
    for name in ("temperature_scaled_logprobs", "top_p_renormalised_logprobs"):
        faults = SemanticFaults(allowed=True, names=[name])
        assert faults.sample_request(request, vocab_size=2).topk_sample_logprobs == 2
        found[name] = faults.sample_result(request, SampleResult([sequence])).sequences[0]

    assert found["temperature_scaled_logprobs"].logprobs == pytest.approx([math.log(0.64 / 0.68)])
    assert found["top_p_renormalised_logprobs"].logprobs == pytest.approx([0.0], abs=1e-6)
    assert found["temperature_scaled_logprobs"].topk is None


def test_hooks_change_nothing_without_a_fault():
    """Every hook returns what it was given."""
    faults = SemanticFaults(allowed=False)
    request = Sample.model_validate(
        {
            "sampling_session_id": "s",
            "seq_id": 0,
            "prompt": {"chunks": []},
            "sampling_params": {},
        }
    )
    result = SampleResult([SequenceResult([4], [-1.0], stopped=True)])
    data, logprobs = [], []

    assert faults.train_data(data) is data
    assert faults.train_logprobs(data, logprobs) is logprobs
    assert faults.sample_request(request, vocab_size=9) is request
    assert dataclasses.asdict(faults.sample_result(request, result)) == dataclasses.asdict(result)
