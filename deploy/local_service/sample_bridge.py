"""Between a sampling request of the protocol and one of the numeric core."""

from __future__ import annotations

import numpy as np
import torch

from deploy.local_service.live import SampleTask
from deploy.local_service.requests import Sample
from deploy.local_service.sample_request import (
    PromptScoring,
    SampledSequence,
    SampleRequest,
    SampleResult,
)
from deploy.local_service.scoring import Scores
from deploy.local_service.token_choice import Choice
from deploy.local_service.wire import MISSING_LOGPROB, Array, SequenceResult, TopK
from deploy.local_service.wire import SampleResult as WireResult


def core_request(task: SampleTask) -> SampleRequest:
    """Return the core's request; its result is handed to the task in the protocol's form."""
    request, params = task.request, task.request.sampling_params
    room = params.max_tokens
    if room is None:
        raise ValueError("max_tokens: not set, expected the room that is left")
    return SampleRequest(
        prompt=task.prompt,
        max_tokens=room,
        num_samples=request.num_samples,
        choice=Choice(temperature=params.temperature, top_p=params.top_p, top_k=params.top_k),
        seed=params.seed,
        stop=params.stop,
        topk_sampled=request.topk_sample_logprobs,
        scoring=_scoring(task),
        cancelled=task.cancelled,
        on_done=lambda result: task.finish(wire_result(request, len(task.prompt), result)),
    )


def _scoring(task: SampleTask) -> PromptScoring | None:
    request = task.request
    targets = None
    if task.targets is not None:
        # The core scores after every token; nothing is named after the last one.
        after_last = np.full_like(task.targets[:1], -1)
        targets = torch.from_numpy(np.concatenate([task.targets, after_last]))
    if not request.prompt_logprobs and not request.topk_prompt_logprobs and targets is None:
        return None
    return PromptScoring(
        next_tokens=bool(request.prompt_logprobs),
        topk=request.topk_prompt_logprobs,
        targets=targets,
    )


def wire_result(request: Sample, prompt_length: int, result: SampleResult) -> WireResult:
    """Return a result of the core in the protocol's form.

    Position n of the prompt holds what was scored after its first n tokens, so that position 0
    holds nothing; positions before the last ``prompt_logprobs_last_n`` hold nothing either.
    """
    scores = result.scores
    unscored = 1
    if request.prompt_logprobs_last_n is not None:
        unscored = max(1, prompt_length - request.prompt_logprobs_last_n)
    return WireResult(
        sequences=[_sequence(sequence) for sequence in result.sequences],
        prompt_logprobs_P=_prompt_logprobs(scores, unscored),
        prompt_topk=_prompt_topk(scores, unscored),
        target_logprobs=_targets(scores, prompt_length),
        targets=request.target_prompt_logprobs,
        cached_prompt_tokens=result.cache_hit_tokens,
    )


def _sequence(sequence: SampledSequence) -> SequenceResult:
    topk = None
    if sequence.topk:
        ids = [[token for token, _ in row] for row in sequence.topk]
        logprobs = [[value for _, value in row] for row in sequence.topk]
        topk = TopK(np.asarray(ids, np.int32), np.asarray(logprobs, np.float32))
    return SequenceResult(
        tokens=sequence.tokens,
        logprobs=sequence.logprobs,
        stopped=sequence.stop_reason == "stop",
        topk=topk,
    )


def _prompt_logprobs(scores: Scores | None, unscored: int) -> Array | None:
    if scores is None or scores.next_logprobs is None:
        return None
    found = scores.next_logprobs.numpy().astype(np.float32)
    return np.concatenate([np.full(unscored, np.nan, np.float32), found[unscored - 1 :]])


def _prompt_topk(scores: Scores | None, unscored: int) -> TopK | None:
    if scores is None or scores.topk_ids is None or scores.topk_logprobs is None:
        return None
    # Row n of the core belongs to the token after the first n + 1.
    ids = np.roll(scores.topk_ids.numpy().astype(np.int32), 1, axis=0)
    logprobs = np.roll(scores.topk_logprobs.numpy().astype(np.float32), 1, axis=0)
    ids[:unscored], logprobs[:unscored] = 0, MISSING_LOGPROB
    return TopK(ids, logprobs)


def _targets(scores: Scores | None, prompt_length: int) -> Array | None:
    if scores is None or scores.target_logprobs is None:
        return None
    found = scores.target_logprobs.numpy().astype(np.float32)[: prompt_length - 1]
    return np.nan_to_num(found, nan=0.0)
