"""Conformance probes of sampling: what its log-probabilities, seeds and stops mean."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envs.protocols import SampledSequence
from evidence.conformance import Measurement
from tasks.conformance_bench import Bench, Example, Vector, score
from tasks.sampling import ServiceSampler

PROMPT = (60, 71, 82, 93, 104, 115)
LENGTH = 8
SEEDS = (11, 12, 13, 14, 15, 16)
HALF = 0.5
"""Temperature and top_p of the probes about their meaning."""


async def sampling(bench: Bench) -> list[Measurement]:
    """All probes of a sampler of the base model."""
    sampler = await bench.service.open_sampler(
        base_model=bench.lora.base_model, label="conformance"
    )
    try:
        plain = await _drawn(sampler)
        tempered = await _drawn(sampler, temperature=HALF)
        nucleus = await _drawn(sampler, top_p=HALF)
        scored = await _Scored.of(bench, sampler, plain, tempered, nucleus)
        return [
            *_scorers(scored),
            _under_temperature(scored),
            _under_top_p(scored),
            await _seed(sampler, plain),
            await _different(sampler),
            await _stop(sampler),
        ]
    finally:
        await sampler.close()


@dataclass(frozen=True, slots=True)
class _Scored:
    """Samples with what trainer and scorer say about their tokens, [sample][LENGTH] nats each."""

    sampled: dict[str, list[Vector]]
    trainer: dict[str, list[Vector]]
    scorer: dict[str, list[Vector]]
    trainer_shifted: list[Vector]
    scorer_shifted: list[Vector]

    @classmethod
    async def of(
        cls,
        bench: Bench,
        sampler: ServiceSampler,
        plain: Sequence[SampledSequence],
        tempered: Sequence[SampledSequence],
        nucleus: Sequence[SampledSequence],
    ) -> _Scored:
        """Ask both about every sample."""
        sampled: dict[str, list[Vector]] = {}
        trained: dict[str, list[Vector]] = {}
        scored: dict[str, list[Vector]] = {}
        shifted: tuple[list[Vector], list[Vector]] = ([], [])
        start = len(PROMPT)
        async with bench.model() as trainer:
            for name, drawn in (("plain", plain), ("tempered", tempered), ("nucleus", nucleus)):
                whole = [(*PROMPT, *one.tokens) for one in drawn]
                scores = await asyncio.gather(*map(sampler.compute_logprobs, whole))
                for one, tokens, answer in zip(drawn, whole, scores, strict=True):
                    ours = await score(trainer, Example(tokens, (1.0,) * (len(tokens) - 1)))
                    theirs = _numbers(answer)
                    sampled.setdefault(name, []).append(np.array(one.logprobs))
                    trained.setdefault(name, []).append(ours[start - 1 :])
                    scored.setdefault(name, []).append(theirs[start:])
                    if name == "plain":
                        shifted[0].append(np.roll(ours, -1)[start - 1 : -1])
                        shifted[1].append(np.roll(theirs, -1)[start:-1])
        return cls(sampled, trained, scored, *shifted)

    def true(self, name: str) -> list[Vector]:
        """The model's own log-probabilities: of the one that agrees better with plain samples."""
        nearest = min((self.trainer, self.scorer), key=lambda one: self.gap(one["plain"], "plain"))
        return nearest[name]

    def gap(self, other: Sequence[Vector], name: str) -> float:
        """Mean absolute difference from what came with the samples, nats."""
        return _gap(other, self.sampled[name])


def _scorers(scored: _Scored) -> list[Measurement]:
    short = [values[:-1] for values in scored.sampled["plain"]]
    between = _gap(scored.trainer["plain"], scored.scorer["plain"])
    trainer = {
        "trainer": scored.gap(scored.trainer["plain"], "plain"),
        "trainer_shifted": _gap(scored.trainer_shifted, short),
        "trainer_to_scorer": between,
    }
    scorer = {
        "scorer": scored.gap(scored.scorer["plain"], "plain"),
        "scorer_shifted": _gap(scored.scorer_shifted, short),
        "trainer_to_scorer": between,
    }
    return [
        Measurement("trainer_against_sampler", trainer),
        Measurement("scores_of_given_tokens", scorer),
    ]


def _under_temperature(scored: _Scored) -> Measurement:
    """At one temperature, tempered values of several first tokens are a line of slope 1 / T."""
    true = scored.true("tempered")
    first = np.array([values[0] for values in true])
    returned = np.array([values[0] for values in scored.sampled["tempered"]])
    spread = first - first.mean()
    total = float(spread @ spread)
    slope = float(spread @ returned / total) if total > 1e-3 else None
    values = {
        "plain": scored.gap(scored.true("plain"), "plain"),
        "gap": scored.gap(true, "tempered"),
        "slope": slope,
    }
    return Measurement("logprobs_under_temperature", values)


def _under_top_p(scored: _Scored) -> Measurement:
    true = scored.true("nucleus")
    shift = np.concatenate(scored.sampled["nucleus"]) - np.concatenate(true)
    values = {
        "plain": scored.gap(scored.true("plain"), "plain"),
        "gap": scored.gap(true, "nucleus"),
        "shift": float(shift.mean()),
    }
    return Measurement("logprobs_under_top_p", values)


async def _seed(sampler: ServiceSampler, plain: Sequence[SampledSequence]) -> Measurement:
    again = await _drawn(sampler)
    same = np.mean([one.tokens == other.tokens for one, other in zip(plain, again, strict=True)])
    other = np.mean([one.tokens == plain[0].tokens for one in plain[1:]])
    return Measurement("seed", {"same": float(same), "other": float(other)})


async def _different(sampler: ServiceSampler) -> Measurement:
    drawn = await _sample(sampler, SEEDS[0], num_samples=4)
    values = {"different": float(len({one.tokens for one in drawn})), "samples": float(len(drawn))}
    return Measurement("samples_of_one_request", values)


async def _stop(sampler: ServiceSampler) -> Measurement:
    """Greedy decoding, and again with its third token as the one that stops."""
    whole = (await _draw(sampler, 1, temperature=0.0)).tokens
    token = whole[min(2, len(whole) - 1)]
    end = whole.index(token) + 1
    ended = await _draw(sampler, 1, temperature=0.0, stop=(token,))
    values = {
        "stopped": float(
            ended.stop_reason == "stop" and ended.tokens[: end - 1] == whole[: end - 1]
        ),
        "included": float(ended.tokens == whole[:end]),
    }
    return Measurement("stop_token", values)


async def _drawn(
    sampler: ServiceSampler, *, temperature: float = 1.0, top_p: float = 1.0
) -> list[SampledSequence]:
    """One sample for each seed, asked for side by side."""
    return await asyncio.gather(
        *(_draw(sampler, seed, temperature=temperature, top_p=top_p) for seed in SEEDS)
    )


async def _draw(
    sampler: ServiceSampler,
    seed: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop: Sequence[int] = (),
) -> SampledSequence:
    drawn = await _sample(sampler, seed, temperature=temperature, top_p=top_p, stop=stop)
    return drawn[0]


async def _sample(
    sampler: ServiceSampler,
    seed: int,
    *,
    num_samples: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop: Sequence[int] = (),
) -> list[SampledSequence]:
    return await sampler.sample(
        PROMPT,
        num_samples=num_samples,
        max_tokens=LENGTH,
        temperature=temperature,
        top_p=top_p,
        top_k=-1,
        seed=seed,
        stop=list(stop),
    )


def _numbers(values: Sequence[float | None]) -> Vector:
    return np.array([np.nan if value is None else value for value in values])


def _gap(found: Sequence[Vector], expected: Sequence[Vector]) -> float:
    return float(np.abs(np.concatenate(found) - np.concatenate(expected)).mean())
