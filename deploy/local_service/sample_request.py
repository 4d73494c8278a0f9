"""What a sampling request asks for, and what it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from deploy.local_service.base_model import BaseModel
from deploy.local_service.scoring import Scores
from deploy.local_service.token_choice import Choice
from evidence.errors import InputError

StopReason = Literal["stop", "length"]
Stop = Sequence[int] | Sequence[str] | str | None
"""None: end-of-sequence tokens. Empty: nothing, not even those. Otherwise these and those."""


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """What to score of the prompt."""

    next_tokens: bool = True
    """The log-probability of each prompt token after the first."""
    topk: int = 0
    """The most likely tokens at each position."""
    targets: Tensor | None = None
    """[P - 1, K] or [P, K] int64: other tokens in the place of the next one; -1 for none."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """One prompt and how to continue it."""

    prompt: Sequence[int]
    max_tokens: int
    num_samples: int = 1
    choice: Choice = field(default_factory=Choice)
    seed: int | None = None
    """Equal seeds give equal tokens; None draws one."""
    stop: Stop = None
    topk_sampled: int = 0
    """How many most likely tokens to return at each sampled position."""
    scoring: PromptScoring | None = None
    cancelled: Callable[[], bool] = lambda: False
    """Asked between two tokens; a cancelled request ends without a result."""
    on_done: Callable[[SampleResult], None] = lambda result: None
    """Told the result as soon as it is there."""


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One continuation of a prompt."""

    tokens: tuple[int, ...]
    """The stop token is included."""
    logprobs: tuple[float, ...]
    """Of the model's own distribution, in nats, whatever the temperature."""
    stop_reason: StopReason
    topk: tuple[tuple[tuple[int, float], ...], ...]
    """Per position the most likely (token, log-probability), if asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleResult:
    """All continuations of one request."""

    sequences: tuple[SampledSequence, ...]
    scores: Scores | None
    cache_hit_tokens: int
    """Prompt tokens whose keys and values were known from before."""


def check_request(request: SampleRequest, base: BaseModel) -> None:
    """Refuse a request that the model cannot carry out.

    Raises:
        InputError: naming the field.
    """
    prompt, limit = request.prompt, base.max_positions
    if not prompt:
        raise InputError("prompt", 0, "at least one token")
    wrong = [token for token in (min(prompt), max(prompt)) if not 0 <= token < base.vocab_size]
    if wrong:
        raise InputError("prompt", wrong[0], f"tokens from 0 to {base.vocab_size - 1}")
    if request.max_tokens < 0 or len(prompt) + request.max_tokens > limit:
        asked = f"{len(prompt)} prompt tokens and max_tokens {request.max_tokens}"
        raise InputError("max_tokens", asked, f"at most {limit} tokens together (context window)")
    if request.num_samples < 1:
        raise InputError("num_samples", request.num_samples, "at least 1")
    choice = request.choice
    if not 0.0 <= choice.temperature < float("inf"):
        raise InputError("temperature", choice.temperature, "a finite number, at least 0")
    if not 0.0 < choice.top_p <= 1.0:
        raise InputError("top_p", choice.top_p, "a number above 0, at most 1")
    most = max(request.topk_sampled, request.scoring.topk if request.scoring else 0)
    if most > base.vocab_size:
        raise InputError("topk", most, f"at most {base.vocab_size}")
