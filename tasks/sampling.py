"""A served policy as the environments see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tinker

from envs.protocols import SampledSequence

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


def _logprobs_of(sequence: Any) -> list[float]:
    logprobs = sequence.logprobs
    if logprobs is None:
        raise ValueError("the service returned a sample without log-probabilities")
    return [float(value) for value in logprobs]
