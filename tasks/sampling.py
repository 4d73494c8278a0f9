"""A served policy as the environments see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tinker
from numpy.typing import NDArray

from envs.protocols import SampledSequence
from tasks.failures import Failure, FailureKind
from tasks.sdk import sample_takes

if TYPE_CHECKING:
    from tasks.service import Service


class ServiceSampler:
    """Samples from one set of published weights; implements the environments' `Sampler`.

    Sampling is safe to repeat, so refusals and outages are waited out here. A lost policy is not:
    `ModelLost` goes to whoever can publish it again.
    """

    def __init__(
        self,
        service: Service,
        client: tinker.SamplingClient,
        *,
        label: str,
        session: tinker.ServiceClient | None,
    ) -> None:
        self._service, self._client, self._session = service, client, session
        self._label = label

    async def sample(
        self,
        prompt_tokens: Sequence[int],
        *,
        num_samples: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        stop: Sequence[int] | Sequence[str],
    ) -> list[SampledSequence]:
        """Sample completions; see `envs.protocols.Sampler`.

        Raises:
            ModelLost: if the service no longer has these weights.
            CapacityBlocked: refused for too long.
            ServiceOutage: out of reach for too long.
        """
        parameters = tinker.SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            stop=list(stop),  # type: ignore[arg-type]  # the SDK takes ids or strings, not a union
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        )
        prompt = tinker.ModelInput.from_ints(list(prompt_tokens))
        response = await self._asked(
            lambda: self._client.sample(prompt, num_samples, parameters), "sample"
        )
        return [
            SampledSequence(
                tokens=tuple(sequence.tokens),
                logprobs=tuple(_logprobs_of(sequence)),
                stop_reason=str(getattr(sequence.stop_reason, "value", sequence.stop_reason)),
            )
            for sequence in response.sequences
        ]

    async def compute_logprobs(self, tokens: Sequence[int]) -> list[float | None]:
        """Log-probability of every token given those before it, nats; None for the first."""
        prompt = tinker.ModelInput.from_ints(list(tokens))
        answer = await self._asked(lambda: self._client.compute_logprobs(prompt), "score")
        return [None if value is None else float(value) for value in answer]

    async def likeliest(
        self, tokens: Sequence[int], *, top_k: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The `top_k` likeliest tokens at each position, and their log-probabilities.

        Returns:
            [L, K] token ids and nats; row i belongs to position i, and row 0 means nothing.

        Raises:
            PermanentServiceError: if the service, or the SDK, knows no `topk_prompt_logprobs`.
        """
        self._require("topk_prompt_logprobs")
        prompt = tinker.ModelInput.from_ints(list(tokens))
        answer = await self._asked(
            lambda: self._client.sample(
                prompt, 1, _ONE_TOKEN, include_prompt_logprobs=True, topk_prompt_logprobs=top_k
            ),
            "likeliest tokens",
        )
        rows = answer.topk_prompt_logprobs
        if rows is None or any(row is None or len(row) != top_k for row in rows[1:]):
            raise _not_returned("topk_prompt_logprobs", self._label)
        pairs = np.array([[(0, 0.0)] * top_k, *rows[1:]], dtype=np.float64)
        return pairs[:, :, 0].astype(np.int64), pairs[:, :, 1]

    async def scores_of(
        self, tokens: Sequence[int], candidates: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Log-probabilities of given tokens at each position.

        Args:
            tokens: [L] the sequence.
            candidates: [L, K] token ids; a row of -1 asks for nothing, and row 0 is not read.

        Returns:
            [L, K] nats, NaN where nothing was asked.

        Raises:
            PermanentServiceError: if the service, or the SDK, knows no `target_prompt_logprobs`.
        """
        self._require("target_prompt_logprobs")
        prompt = tinker.ModelInput.from_ints(list(tokens))
        asked = tinker.TensorData.from_numpy(np.ascontiguousarray(candidates[1:]))
        answer = await self._asked(
            lambda: self._client.sample(
                prompt, 1, _ONE_TOKEN, include_prompt_logprobs=True, target_prompt_logprobs=asked
            ),
            "scores of tokens",
        )
        found = answer.target_prompt_logprobs
        if found is None:
            raise _not_returned("target_prompt_logprobs", self._label)
        scores = np.full(candidates.shape, np.nan)
        values = np.asarray(found.to_numpy(), dtype=np.float64).reshape(candidates[1:].shape)
        scores[1:] = np.where(candidates[1:] >= 0, values, np.nan)
        return scores

    def _require(self, field: str) -> None:
        if not sample_takes(self._client, field):
            raise _not_returned(field, self._label)

    async def close(self) -> bool:
        """Release the sampler's session, if it has its own; whether the service confirmed it."""
        return self._session is None or await self._service.release(self._session)

    async def _asked(self, submit: Any, verb: str) -> Any:
        what, deadlines = f"{verb} {self._label}", self._service.settings.deadlines

        async def once() -> Any:
            began = self._service.clock.now()
            try:
                made = submit()
                future = made.future() if hasattr(made, "future") else made
                return await self._service.watch.settle(future, deadlines.sample, what)
            except Exception as error:
                # Waiting behind other samples is no refusal; without progress the SDK gives up.
                spent = min(self._service.clock.now() - began, deadlines.sample_progress)
                raise self._service.translated(error, what, spent=spent) from error

        return await self._service.retrying(what, once)


_ONE_TOKEN = tinker.SamplingParams(max_tokens=1, temperature=1.0)


def _not_returned(field: str, label: str) -> Exception:
    failure = Failure(FailureKind.PERMANENT, f"the service returns no {field}")
    return failure.as_error(f"top-K scores of {label}")


def _logprobs_of(sequence: Any) -> list[float]:
    logprobs = sequence.logprobs
    if logprobs is None:
        raise ValueError("the service returned a sample without log-probabilities")
    return [float(value) for value in logprobs]
