"""Sample requests to their end, as the service does token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from deploy.local_service.decoding import DecodeBatch
from deploy.local_service.kv_cache import PrefixCache
from deploy.local_service.sample_request import SampleRequest, SampleResult
from deploy.local_service.sampler_weights import SamplerWeights


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
    results: list[SampleResult | None] = []

    def add(asked: Sequence[SampleRequest]) -> None:
        first = len(results)
        results.extend([None] * len(asked))
        batch.add([_kept(request, results, n) for n, request in enumerate(asked, first)])

    add(requests)
    while True:
        add(admit())
        if batch.idle:
            return results
        batch.step()


def _kept(request: SampleRequest, results: list[SampleResult | None], n: int) -> SampleRequest:
    """Return the request; its result also goes to a place in the list."""

    def done(result: SampleResult) -> None:
        results[n] = result
        request.on_done(result)

    return replace(request, on_done=done)
