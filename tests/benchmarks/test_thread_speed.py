"""How the embedded service's threads wait for each other, against threads that sleep at once.

Two processes of two threads each decode six sequences of SmolLM2-135M and take turns, one token
each, so that both see the same machine. Measured on two quiet cores (AVX2, shared host): 113
against 134 ms a token.
"""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys

import pytest

from deploy.local_service.launch import thread_environment
from deploy.local_service.settings import ServiceSettings

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        sys.platform != "linux" or (os.cpu_count() or 1) < 2,
        reason="two cores and GNU OpenMP are what is compared",
    ),
]

logger = logging.getLogger(__name__)

TOKENS = 40
DECODER = """
import sys, time
import torch
from deploy.local_service.base_model import BaseModel
from deploy.local_service.decoding import DecodeBatch
from deploy.local_service.model_store import SMOLLM2, resolve
from deploy.local_service.sample_request import SampleRequest
from deploy.local_service.sampler_weights import SamplerWeights

torch.set_num_threads(2)
base = BaseModel.load(resolve(SMOLLM2).folder)
batch = DecodeBatch(SamplerWeights.of_base(base))
prompts = [[(7 * j + i * j) % 40000 + 10 for j in range(300)] for i in range(6)]
batch.add([SampleRequest(prompt=p, max_tokens=200, seed=0, stop=[]) for p in prompts])
for _ in range(4):
    batch.step()
print("ready", flush=True)
for _ in sys.stdin:
    begun = time.perf_counter()
    batch.step()
    print(time.perf_counter() - begun, flush=True)
"""


def decoder(environment: dict[str, str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", DECODER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def token_seconds(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def test_threads_that_spin_for_a_moment_beat_threads_that_sleep_at_once() -> None:
    """A token takes at most 0.9 of the time."""
    given = thread_environment(ServiceSettings(threads=2))
    sides = [decoder(given), decoder(given | {"GOMP_SPINCOUNT": "0"})]
    try:
        pairs = [[token_seconds(side) for side in sides] for _ in range(TOKENS)]
    finally:
        for side in sides:
            side.kill()
            side.communicate()
    ours, sleeping = (statistics.median(times) for times in zip(*pairs, strict=True))
    logger.info("a token: %.0f ms, sleeping at once %.0f ms", 1e3 * ours, 1e3 * sleeping)
    assert ours <= 0.9 * sleeping
