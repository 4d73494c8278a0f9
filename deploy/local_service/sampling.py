"""Sampling and scoring under some weights: the entry points of the rest of the service."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deploy.local_service.decoding import DecodeBatch
from deploy.local_service.kv_cache import PrefixCache
from deploy.local_service.sample_request import (
    PromptScoring,
    SampledSequence,
    SampleRequest,
    SampleResult,
    check_request,
)
from deploy.local_service.sampler_weights import SamplerWeights
from deploy.local_service.scoring import ScoreRequest, Scores, score
from deploy.local_service.token_choice import Choice

__all__ = [
    "Choice",
    "PrefixCache",
    "PromptScoring",
    "SampleRequest",
    "SampleResult",
    "SampledSequence",
    "ScoreRequest",
    "Scores",
    "check_request",
    "generate",
    "score",
]


def generate(
    weights: SamplerWeights,
    requests: Sequence[SampleRequest],
    *,
    admit: Callable[[], Sequence[SampleRequest]] = tuple,
    cache: PrefixCache | None = None,
    max_rows: int = 64,
) -> list[SampleResult | None]:
    """Sample all requests in one continuous batch.

    Up to `max_rows` sequences are decoded together; a finished one makes room for the next. What
    each request gets depends on the request and the weights alone.

    Args:
        weights: what to sample from.
        requests: the first requests.
        admit: called between two tokens; may hand out further requests.
        cache: keys and values of earlier prompts and completions; None keeps none.
        max_rows: most sequences decoded together.

    Returns:
        The results of the first and then of the admitted requests, in order; None for a cancelled
        one.

    Raises:
        InputError: if a request is not valid (see `check_request`).
    """
    batch = DecodeBatch(weights, cache=cache, max_rows=max_rows)
    added = list(requests)
    batch.add(added)
    while True:
        more = list(admit())
        batch.add(more)
        added += more
        if batch.idle:
            break
        batch.step()
    return [batch.results.get(id(request)) for request in added]
