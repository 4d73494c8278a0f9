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
LENGTH = 6
SAMPLES = 4
HALF = 0.5
"""Temperature and top_p of the probes about their meaning."""


async def agreement(bench: Bench) -> list[Measurement]:
    """Log-probabilities of plain samples against trainer and scorer."""
    return _scorers(await _plain(bench))


async def meaning(bench: Bench) -> list[Measurement]:
    """Log-probabilities of samples at another temperature and from a nucleus."""
    plain = await _plain(bench)
    sampler = await bench.sampler()
    tempered = await _Scored.of(bench, await _drawn(bench, sampler, temperature=HALF))
    nucleus = await _Scored.of(bench, await _drawn(bench, sampler, top_p=HALF))
    return [_under_temperature(plain, tempered), _under_top_p(plain, nucleus)]


async def choices(bench: Bench) -> list[Measurement]:
    """Which tokens are sampled: seeds, several samples, and the token that stops."""
    sampler = await bench.sampler()
    return [
        await _seed(bench, sampler),
        await _different(bench, sampler),
        await _stop(bench, sampler),
    ]


async def _plain(bench: Bench) -> _Scored:
    sampler = await bench.sampler()
    return await _Scored.of(bench, await _drawn(bench, sampler))


@dataclass(frozen=True, slots=True)
class _Scored:
    """Samples with what trainer and scorer say about their tokens, nats, an array a sample.

    The shifted ones are those of the token before, without the last; nothing has been trained.
    """

    sampled: list[Vector]
    trainer: list[Vector]
    scorer: list[Vector]
    trainer_shifted: list[Vector]
    scorer_shifted: list[Vector]

    @classmethod
    async def of(cls, bench: Bench, drawn: Sequence[SampledSequence]) -> _Scored:
        """Ask both about every sample, the trainer on a new model."""
        whole = [(*PROMPT, *one.tokens) for one in drawn]
        sampler = await bench.sampler()
        answers = await asyncio.gather(*map(sampler.compute_logprobs, whole))
        theirs = [_numbers(answer) for answer in answers]
        trainer = await bench.untrained()
        ours = [
            await score(trainer, Example(tokens, (1.0,) * (len(tokens) - 1))) for tokens in whole
        ]
        start = len(PROMPT)
        return cls(
            sampled=[np.array(one.logprobs) for one in drawn],
            trainer=[values[start - 1 :] for values in ours],
            scorer=[values[start:] for values in theirs],
            trainer_shifted=[np.roll(values, -1)[start - 1 : -1] for values in ours],
            scorer_shifted=[np.roll(values, -1)[start:-1] for values in theirs],
        )

    def gap(self, other: Sequence[Vector]) -> float:
        """Mean absolute difference from what came with the samples, nats."""
        return _gap(other, self.sampled)

    def true(self, plain: _Scored) -> list[Vector]:
        """The model's own log-probabilities: of the one that agrees better with plain samples."""
        return self.trainer if plain.gap(plain.trainer) <= plain.gap(plain.scorer) else self.scorer


def _scorers(plain: _Scored) -> list[Measurement]:
    short = [values[:-1] for values in plain.sampled]
    between = _gap(plain.trainer, plain.scorer)
    trainer = {
        "trainer": plain.gap(plain.trainer),
        "trainer_shifted": _gap(plain.trainer_shifted, short),
        "trainer_to_scorer": between,
    }
    scorer = {
        "scorer": plain.gap(plain.scorer),
        "scorer_shifted": _gap(plain.scorer_shifted, short),
        "trainer_to_scorer": between,
    }
    return [
        Measurement("trainer_against_sampler", trainer),
        Measurement("scores_of_given_tokens", scorer),
    ]


def _under_temperature(plain: _Scored, tempered: _Scored) -> Measurement:
    """At one temperature, tempered values of several first tokens are a line of slope 1 / T."""
    true = tempered.true(plain)
    first = np.array([values[0] for values in true])
    returned = np.array([values[0] for values in tempered.sampled])
    spread = first - first.mean()
    total = float(spread @ spread)
    values = {
        "plain": plain.gap(plain.true(plain)),
        "gap": tempered.gap(true),
        "slope": float(spread @ returned / total) if total > _SPREAD else None,
    }
    return Measurement("logprobs_under_temperature", values)


def _under_top_p(plain: _Scored, nucleus: _Scored) -> Measurement:
    true = nucleus.true(plain)
    shift = np.concatenate(nucleus.sampled) - np.concatenate(true)
    values = {
        "plain": plain.gap(plain.true(plain)),
        "gap": nucleus.gap(true),
        "shift": float(shift.mean()),
    }
    return Measurement("logprobs_under_top_p", values)


_SPREAD = 1e-3
"""First tokens whose log-probabilities vary less than this show no slope."""


async def _seed(bench: Bench, sampler: ServiceSampler) -> Measurement:
    one, other = await _drawn(bench, sampler), await _drawn(bench, sampler)
    same = np.mean([mine.tokens == again.tokens for mine, again in zip(one, other, strict=True)])
    others = np.mean([mine.tokens == one[0].tokens for mine in one[1:]])
    return Measurement("seed", {"same": float(same), "other": float(others)})


async def _different(bench: Bench, sampler: ServiceSampler) -> Measurement:
    drawn = await _sample(sampler, bench.seed + 1, num_samples=SAMPLES)
    values = {"different": float(len({one.tokens for one in drawn})), "samples": float(len(drawn))}
    return Measurement("samples_of_one_request", values)


async def _stop(bench: Bench, sampler: ServiceSampler) -> Measurement:
    """Greedy decoding, and again with its third token as the one that stops."""
    whole = (await _sample(sampler, bench.seed, temperature=0.0))[0].tokens
    token = whole[min(2, len(whole) - 1)]
    end = whole.index(token) + 1
    ended = (await _sample(sampler, bench.seed, temperature=0.0, stop=(token,)))[0]
    stopped = ended.stop_reason == "stop" and ended.tokens[: end - 1] == whole[: end - 1]
    values = {"stopped": float(stopped), "included": float(ended.tokens == whole[:end])}
    return Measurement("stop_token", values)


async def _drawn(
    bench: Bench, sampler: ServiceSampler, *, temperature: float = 1.0, top_p: float = 1.0
) -> list[SampledSequence]:
    """Samples of a seed each, asked for side by side."""
    drawn = await asyncio.gather(
        *(
            _sample(sampler, bench.seed + number, temperature=temperature, top_p=top_p)
            for number in range(1, SAMPLES + 1)
        )
    )
    return [one for (one,) in drawn]


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
