"""How much faster the embedded service computes than the plain libraries, as ratios in one run.

Run alone on a quiet machine: ``OMP_WAIT_POLICY=passive OMP_NUM_THREADS=2 pytest -m bench
--log-cli-level=INFO tests/benchmarks/test_service_speed.py``. All measurements are SmolLM2-135M in float32, 52-token
prompts, 24 new tokens, wall time, best of the repetitions, the two sides taking turns.

Measured on two shared AVX2 cores (AMD EPYC, load average 6 to 7, so absolute speeds are low):

=====================  =========  ==========
ratio                  1 thread   2 threads
=====================  =========  ==========
8 groups of 8          3.56       4.66
1 group of 8           1.61       2.06
training, 2 groups     2.35       2.47
=====================  =========  ==========

With 64 instead of 24 new tokens the prompt counts for less: 3.0 and 1.5 at one thread, in processor
time under more load.

What bounds the ratios:

* One group of 8: both sides read all 540 MB of weights for every 8 tokens. The gain is the prompt
  (computed once, not 8 times), matrices that are packed once, and fewer small operations.
* 8 groups of 8: one step of 64 rows costs about 4 steps of 8 rows' arithmetic but reads the
  weights once. The product of 64 rows is bound by arithmetic (17 GFLOP a step, 70 to 110 GFLOP/s
  a core), so more rows in flight add little.
* Training: a group's prompt is computed once, the unembedding's gradient only for rows with a
  loss, and no gradient reaches frozen matrices. Bound by arithmetic: two products forward and
  backward per unique token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from deploy.local_service.adapter import LoraConfig
from deploy.local_service.base_model import BaseModel
from deploy.local_service.model_store import SMOLLM2, resolve
from deploy.local_service.sample_request import SampleRequest
from deploy.local_service.sampler_weights import SamplerWeights
from deploy.local_service.training import TrainableModel, TrainingDatum
from tests.deploy.sampled import generate

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]

logger = logging.getLogger(__name__)

PROMPT_TOKENS, NEW_TOKENS, GROUP = 52, 24, 8
REPETITIONS = 3


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return BaseModel.load(resolve(SMOLLM2).folder)


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(resolve(SMOLLM2).folder, dtype=torch.float32)
    return model.eval()


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, 49000, (count, PROMPT_TOKENS), generator=generator).tolist()


def best_seconds(*sides: Callable[[], object]) -> list[float]:
    """Return the shortest wall time of each side; the sides take turns."""
    best = [float("inf")] * len(sides)
    for side in sides:
        side()
    for _ in range(REPETITIONS):
        for n, side in enumerate(sides):
            started = time.perf_counter()
            side()
            best[n] = min(best[n], time.perf_counter() - started)
    return best


def plain_group(model: PreTrainedModel, prompt: list[int]) -> None:
    model.generate(
        torch.tensor([prompt] * GROUP),
        attention_mask=torch.ones(GROUP, PROMPT_TOKENS, dtype=torch.long),
        do_sample=True,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        top_k=0,
        pad_token_id=2,
    )


def group_requests(prompt: list[int]) -> list[SampleRequest]:
    """One request per completion, as tinker-cookbook sends them."""
    return [
        SampleRequest(prompt=prompt, max_tokens=NEW_TOKENS, seed=n, stop=[]) for n in range(GROUP)
    ]


@pytest.mark.parametrize(("groups", "least"), [(8, 3.0), (1, 1.3)])
def test_sampling_beats_transformers_group_by_group(
    base: BaseModel, plain: PreTrainedModel, groups: int, least: float
) -> None:
    asked = prompts(groups)
    weights = SamplerWeights.of_base(base)

    def ours() -> None:
        generate(weights, [request for prompt in asked for request in group_requests(prompt)])

    def theirs() -> None:
        for prompt in asked:
            plain_group(plain, prompt)

    ours_seconds, theirs_seconds = best_seconds(ours, theirs)
    tokens = groups * GROUP * NEW_TOKENS
    ratio = theirs_seconds / ours_seconds
    report(
        f"sampling, {groups} groups of {GROUP}",
        f"{tokens / ours_seconds:.0f} against {tokens / theirs_seconds:.0f} tokens/s",
        ratio,
    )
    assert ratio >= least


def test_training_beats_a_plain_peft_step(base: BaseModel, plain: PreTrainedModel) -> None:
    groups, completion, rank = 2, 32, 16
    sequences = [
        prompt + torch.randint(100, 49000, (completion,)).tolist()
        for prompt in prompts(groups)
        for _ in range(GROUP)
    ]
    model = TrainableModel(base, LoraConfig(rank=rank, seed=0, train_unembed=False))
    data = [datum(tokens) for tokens in sequences]
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    peft = get_peft_model(plain, PeftConfig(r=rank, lora_alpha=32, target_modules=modules))
    ids = torch.tensor(sequences)

    def ours() -> None:
        model.forward_backward(data, "importance_sampling")
        model.discard_gradient()

    def theirs() -> None:
        logprobs = torch.log_softmax(peft(input_ids=ids).logits[:, :-1], -1)
        picked = logprobs.gather(-1, ids[:, 1:, None])[..., 0][:, PROMPT_TOKENS - 1 :]
        (-torch.exp(picked - picked.detach())).sum().backward()
        peft.zero_grad()

    ours_seconds, theirs_seconds = best_seconds(ours, theirs)
    tokens = ids.numel()
    ratio = theirs_seconds / ours_seconds
    report(
        f"training, {groups} groups of {GROUP}",
        f"{tokens / ours_seconds:.0f} against {tokens / theirs_seconds:.0f} tokens/s",
        ratio,
    )
    assert ratio >= 1.5


def datum(tokens: list[int]) -> TrainingDatum:
    advantages = torch.ones(len(tokens) - 1)
    advantages[: PROMPT_TOKENS - 1] = 0.0
    inputs = {
        "target_tokens": torch.tensor(tokens[1:]),
        "logprobs": torch.full((len(tokens) - 1,), -10.0),
        "advantages": advantages,
    }
    return TrainingDatum(tokens[:-1], inputs)


def report(what: str, speeds: str, ratio: float) -> None:
    threads = torch.get_num_threads()
    logger.info("%s, %d threads: %s, ratio %.2f", what, threads, speeds, ratio)
