"""Wrong behaviour by name, so that a conformance check can be shown to catch it.

Each fault is one mistake that a training service of this kind has made or could make. They are off
unless the service was started with ``--allow-faults`` and the fault was named; every hook below
returns its input unchanged then. Faults on the wire are in `transport_faults`.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from deploy.local_service.errors import invalid_request
from deploy.local_service.requests import AdamParams, Sample
from deploy.local_service.wire import Array, SampleResult, SequenceResult, TopK, WireDatum

FAULTS: Mapping[str, str] = {
    "mean_instead_of_sum": "the loss is divided by the number of trained tokens of the request",
    "mean_over_data": "the loss is divided by the number of data of the request",
    "negative_weights_blown_up": "negative weights and advantages count ten times",
    "normalised_by_weight_sum": "each datum counts by its weights' sum (1e-9 if that is not above "
    "0), and the loss is divided by the number of data",
    "no_loss_metric": "forward_backward reports no metrics",
    "forward_accumulates": "a forward alone adds to the gradient",
    "gradient_erased_between_chunks": "each forward_backward starts from an empty gradient",
    "scrambled_order": "per-datum results come back in reverse order",
    "logprobs_off_by_one": "training log-probabilities are shifted by one position",
    "zero_logprobs_where_unweighted": "log-probabilities are 0 where the weight is 0",
    "step_applied_twice": "an optimizer step is applied twice",
    "replay_executes_again": "a training request that is sent again is executed again",
    "learning_rate_halved": "the learning rate is halved",
    "learning_rate_1000_times": "the learning rate is 1000 times as high",
    "gradient_clip_ignored": "grad_clip_norm has no effect",
    "weight_decay_ignored": "weight_decay has no effect",
    "cold_adam_after_restore": "a restored optimizer has lost its moments",
    "restore_ignores_weights_only": "a weights-only restore brings the optimizer's state along",
    "save_resets_optimizer": "saving a state clears the optimizer's moments",
    "stale_sampler": "a published sampler has the weights of the publication before it",
    "sampler_overwrites_training": "a sampler checkpoint deletes the training checkpoint of its name",
    "temperature_scaled_logprobs": "sampling log-probabilities are those of the tempered distribution",
    "top_p_renormalised_logprobs": "sampling log-probabilities are renormalised over the nucleus",
    "sampler_disagrees_with_trainer": "sampling log-probabilities are off by about 0.05 nats",
    "ignored_seed": "the sampling seed has no effect",
    "duplicate_samples": "the samples of one seeded request are all the same",
    "stop_token_missing": "the stop token is cut from the answer",
    "prompt_logprobs_shifted": "prompt log-probabilities are shifted by one position",
    "lost_optimizer_report": "nothing is said about the optimizer",
    "wrong_base_model_report": "another base model is reported than the one that runs",
}
"""Every fault, with what it does wrong."""

NEGATIVE_FACTOR = 10.0
SMALLEST_SUM = 1e-9
NOISE_NATS = 0.05


class SemanticFaults:
    """The faults that are switched on."""

    def __init__(self, *, allowed: bool, names: Iterable[str] = ()) -> None:
        self._allowed = allowed
        self._on: frozenset[str] = frozenset()
        self.switch(names)

    def switch(self, names: Iterable[str]) -> None:
        """Switch on these faults and all others off.

        Raises:
            ApiError: 400 for an unknown name, or if faults are not allowed here.
        """
        wanted = frozenset(names)
        unknown = sorted(wanted - FAULTS.keys())
        if unknown:
            raise invalid_request(f"faults {unknown}: unknown, expected some of {sorted(FAULTS)}")
        if wanted and not self._allowed:
            raise invalid_request("faults: not allowed, expected a start with --allow-faults")
        self._on = wanted

    def on(self, name: str) -> bool:
        """Say whether a fault is on."""
        return name in self._on

    def names(self) -> list[str]:
        """Return the faults that are on."""
        return sorted(self._on)

    # ---- training

    def train_data(self, data_D: Sequence[WireDatum]) -> Sequence[WireDatum]:
        """Return the training data as the faulty service would use them."""
        if self.on("negative_weights_blown_up"):
            data_D = [_rescaled(datum, _blow_up) for datum in data_D]
        if self.on("mean_instead_of_sum"):
            tokens = max(1, sum(_trained_tokens(datum) for datum in data_D))
            data_D = [_rescaled(datum, lambda w: w / tokens) for datum in data_D]
        if self.on("normalised_by_weight_sum"):
            count = max(1, len(data_D))
            data_D = [_rescaled(datum, lambda w: w / _positive_sum(w) / count) for datum in data_D]
        if self.on("mean_over_data"):
            count = max(1, len(data_D))
            data_D = [_rescaled(datum, lambda w: w / count) for datum in data_D]
        return data_D

    def train_logprobs(
        self, data_D: Sequence[WireDatum], logprobs_D: Sequence[Array]
    ) -> Sequence[Array]:
        """Return the per-datum log-probabilities as the faulty service would give them."""
        if self.on("logprobs_off_by_one"):
            logprobs_D = [np.roll(logprobs, 1, axis=0) for logprobs in logprobs_D]
        if self.on("zero_logprobs_where_unweighted"):
            logprobs_D = [
                logprobs if (weight := _weight(datum)) is None else np.where(weight, logprobs, 0.0)
                for datum, logprobs in zip(data_D, logprobs_D, strict=True)
            ]
        if self.on("scrambled_order"):
            logprobs_D = list(logprobs_D)[::-1]
        return logprobs_D

    def train_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics of a request as the faulty service would report them."""
        return {} if self.on("no_loss_metric") else metrics

    def optimizer(self, params: AdamParams) -> AdamParams:
        """Return the hyperparameters that the faulty service would use."""
        if self.on("learning_rate_halved"):
            params = params.model_copy(update={"learning_rate": params.learning_rate / 2})
        if self.on("learning_rate_1000_times"):
            params = params.model_copy(update={"learning_rate": params.learning_rate * 1000})
        if self.on("gradient_clip_ignored"):
            params = params.model_copy(update={"grad_clip_norm": 0.0})
        if self.on("weight_decay_ignored"):
            params = params.model_copy(update={"weight_decay": 0.0})
        return params

    # ---- sampling

    def sample_request(self, request: Sample, *, vocab_size: int) -> Sample:
        """Return the sampling request as the faulty service would read it.

        Args:
            request: what was asked for.
            vocab_size: tokens of the model; the faults about distributions need all of them.
        """
        if self.on("temperature_scaled_logprobs") or self.on("top_p_renormalised_logprobs"):
            request = request.model_copy(update={"topk_sample_logprobs": vocab_size})
        if self.on("ignored_seed"):
            params = request.sampling_params.model_copy(update={"seed": secrets.randbits(62)})
            request = request.model_copy(update={"sampling_params": params})
        return request

    def sample_result(self, request: Sample, result: SampleResult) -> SampleResult:
        """Return the sampling result as the faulty service would give it."""
        sequences = [self._distorted(request, sequence) for sequence in result.sequences]
        if self.on("duplicate_samples") and request.sampling_params.seed is not None:
            sequences = [sequences[0]] * len(sequences)
        if self.on("stop_token_missing"):
            sequences = [_without_stop(sequence) for sequence in sequences]
        if self.on("sampler_disagrees_with_trainer"):
            sequences = [_noisy(sequence) for sequence in sequences]
        prompt = result.prompt_logprobs_P
        if prompt is not None and self.on("prompt_logprobs_shifted"):
            prompt = np.roll(prompt, 1)
        return dataclasses.replace(result, sequences=sequences, prompt_logprobs_P=prompt)

    def _distorted(self, request: Sample, sequence: SequenceResult) -> SequenceResult:
        """Replace log-probabilities by those of the distribution that was really drawn from."""
        tempered = self.on("temperature_scaled_logprobs")
        nucleus = self.on("top_p_renormalised_logprobs")
        if sequence.topk is None or not (tempered or nucleus):
            return sequence
        params = request.sampling_params
        rows = sequence.topk.logprobs.astype(np.float64)
        found = np.asarray(sequence.logprobs, np.float64)
        if tempered and params.temperature > 0:
            rows, found = rows / params.temperature, found / params.temperature
            found = found - _log_sum_exp(rows)
            rows = rows - _log_sum_exp(rows)[:, None]
        if nucleus:
            found = found - _log_nucleus_mass(rows, top_p=params.top_p)
        kept = request.topk_sample_logprobs
        topk = TopK(sequence.topk.token_ids[:, :kept], sequence.topk.logprobs[:, :kept])
        return dataclasses.replace(sequence, logprobs=found.tolist(), topk=topk if kept else None)


def _log_sum_exp(rows: Array) -> Array:
    highest = rows.max(axis=1)
    total: Array = highest + np.log(np.exp(rows - highest[:, None]).sum(axis=1))
    return total


def _log_nucleus_mass(rows: Array, *, top_p: float) -> Array:
    """Return the log of the probability kept by top-p; rows hold log-probabilities, best first."""
    probabilities = np.exp(rows)
    before = probabilities.cumsum(axis=1) - probabilities
    mass: Array = np.log(np.where(before < top_p, probabilities, 0.0).sum(axis=1))
    return mass


def _weight(datum: WireDatum) -> Array | None:
    return next((datum.inputs[n] for n in ("weights", "advantages") if n in datum.inputs), None)


def _trained_tokens(datum: WireDatum) -> int:
    weight = _weight(datum)
    return len(datum.tokens) if weight is None else int(np.count_nonzero(weight))


def _positive_sum(weight: Array) -> np.float32:
    return np.float32(max(float(weight.sum()), SMALLEST_SUM))


def _blow_up(weight: Array) -> Array:
    return np.where(weight < 0, weight * np.float32(NEGATIVE_FACTOR), weight)


def _rescaled(datum: WireDatum, change: Callable[[Array], Array]) -> WireDatum:
    inputs = dict(datum.inputs)
    if "weights" not in inputs and "advantages" not in inputs:
        inputs["weights"] = np.ones(inputs["target_tokens"].shape, np.float32)
    for name in ("weights", "advantages"):
        if name in inputs:
            inputs[name] = np.asarray(change(inputs[name]), np.float32)
    return WireDatum(datum.tokens, inputs)


def _without_stop(sequence: SequenceResult) -> SequenceResult:
    if not sequence.stopped:
        return sequence
    return dataclasses.replace(
        sequence, tokens=sequence.tokens[:-1], logprobs=sequence.logprobs[:-1]
    )


def _noisy(sequence: SequenceResult) -> SequenceResult:
    # A smooth, repeatable error that averages out: what a low-precision sampler looks like.
    shifted = [
        value + NOISE_NATS * math.sin(7.0 * position + 3.0 * value)
        for position, value in enumerate(sequence.logprobs)
    ]
    return dataclasses.replace(sequence, logprobs=shifted)
