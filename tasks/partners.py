"""Served partners of an episode: the user simulator and the judge, opened when first asked."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from envs.errors import EnvServiceError
from envs.protocols import SampledSequence
from envs.served import Partner, make_partner
from evidence.run_settings import ServedModel
from tasks.context import RunContext
from tasks.failures import ModelLost
from tasks.sampling import ServiceSampler
from tasks.service import Service

FAILED = "partner_failed"
"""Event of the ledger: a simulator or judge gave no usable answer in all its attempts."""


class ServedPartner:
    """A model that only samples; it is opened again if the service forgets it.

    A forgotten one is closed once the last request to it has come back.
    """

    def __init__(self, service: Service, model: str, *, label: str) -> None:
        self._service, self._model, self._label = service, model, label
        self._open: ServiceSampler | None = None
        self._requests: Counter[ServiceSampler] = Counter()
        self._lock = asyncio.Lock()

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
        """Sample completions; see `envs.protocols.Sampler`."""
        patience = self._service.patience()
        while True:
            sampler = await self._sampler()
            self._requests[sampler] += 1
            try:
                return await sampler.sample(
                    prompt_tokens,
                    num_samples=num_samples,
                    max_tokens=max_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    top_k=top_k,
                    seed=seed,
                    stop=stop,
                )
            except ModelLost as error:
                if error.failure is None:
                    raise
                self._open = None if self._open is sampler else self._open
                failure = error.failure
            finally:
                await self._done_with(sampler)
            await patience.wait(failure, self._label)

    async def _done_with(self, sampler: ServiceSampler) -> None:
        self._requests[sampler] -= 1
        if not self._requests[sampler]:
            del self._requests[sampler]
            if self._open is not sampler:
                await sampler.close()

    async def _sampler(self) -> ServiceSampler:
        async with self._lock:
            if self._open is None:
                self._open = await self._service.open_sampler(
                    base_model=self._model, label=self._label
                )
            return self._open


def served_partners(ctx: RunContext, load_tokenizer: Callable[[str], Any]) -> dict[str, Partner]:
    """The partners that the execution file has served, by role.

    An answer that stays unusable is written to the ledger as ``partner_failed``. After a restart
    its partner is asked with seeds that have not failed yet.

    Args:
        ctx: the run.
        load_tokenizer: loads the tokenizer of a model by its name.
    """
    failed = Counter(event["partner"] for event in ctx.run.events(FAILED))

    def note(error: EnvServiceError) -> None:
        ctx.run.append(
            FAILED, partner=error.partner, attempts=error.attempts, problems=list(error.problems)
        )

    roles = {"simulator": ctx.execution.simulator, "judge": ctx.execution.judge}
    return {
        role: make_partner(
            role,
            settings.model_dump(),
            sampler=ServedPartner(ctx.service, settings.model, label=role),
            tokenizer=load_tokenizer(settings.model),
            seed=ctx.arms[0].seed,
            failed_rounds=failed[role],
            on_failure=note,
        )
        for role, settings in roles.items()
        if isinstance(settings, ServedModel)
    }
