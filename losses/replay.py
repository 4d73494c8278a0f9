"""Replay recorded updates against the float64 reference, and ask which rule they followed.

What is replayed are recorded numbers: log-probabilities, advantages and decisions of every loss
token. Nothing is sampled, trained or asked of a service.

Shape legend: N loss tokens of one update.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from losses.errors import LossConfigError, LossInputError
from losses.inputs import LossInputs
from losses.objective import batch_loss
from losses.parity import ErrorSummary, parity_errors, reference_terms
from losses.reference.counts import Token, recount
from losses.registry import make_loss
from losses.token_arrays import Bools, Floats, TokenArrays

COUNTED = (
    *("loss_tokens", "nonzero_advantage_tokens", "masked_tokens"),
    *("removed_positive", "removed_negative", "keep_zero_tokens"),
    *("exceed", "exceed_dropped", "exceed_restoring", "exceed_zero_advantage"),
    *("ppo_counterfactual_tokens", "ppo_two_sided_tokens"),
)
DELTA_FACTOR = 1000.0
_EXTREMES = (1e-9, 0.5, 1.0 - 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedUpdate:
    """One update as it was recorded."""

    update: int
    tokens: TokenArrays
    prob_ratio_N: Floats
    removed_N: Bools
    loss: float
    """As recorded, after division by the denominator."""
    denominator: float
    counts: Mapping[str, Any]
    """Recorded diagnostics of the update, by column of `updates`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedUpdate:
    """One update, recomputed."""

    update: int
    decisions_different: int
    """Tokens whose recorded decision is not the reference's."""
    removed_different: int
    """Tokens recorded as removed although they were kept or had no gradient, or the reverse."""
    ratio_max_error: float
    loss_errors: ErrorSummary
    """Recorded loss against the reference's."""
    gradient_errors: ErrorSummary
    """Gradient of the training loss against the reference's slopes."""
    counts_different: tuple[str, ...]
    """Recorded counts that a recount one token at a time does not give."""


def replay(
    config: Mapping[str, Any],
    recorded: RecordedUpdate,
    *,
    weights_N: Floats | None = None,
    count_config: Mapping[str, Any] | None = None,
    ppo: tuple[float, float] = (0.8, 1.2),
) -> ReplayedUpdate:
    """Recompute one update by the reference and compare it with what was recorded.

    Args:
        config: the loss, as registered.
        recorded: the update.
        weights_N: [N] rollout-correction weights, where the loss took any.
        count_config: the mask that tokens were counted against; the loss's own by default.
        ppo: bounds of the counterfactual ratio clip.

    Raises:
        LossConfigError: if the reference has no loss of that kind.
        LossInputError: if a token holds a number that is not finite.
    """
    tokens = recorded.tokens
    terms = _terms(config, tokens)
    factor = np.ones(len(tokens)) if weights_N is None else weights_N
    expected_loss = math.fsum((terms.term * factor).tolist()) / recorded.denominator
    gradient = _gradient(config, tokens, recorded.denominator)
    nonzero = tokens.advantages_N != 0
    return ReplayedUpdate(
        update=recorded.update,
        decisions_different=int(np.count_nonzero(tokens.keep_N != terms.keep)),
        removed_different=int(np.count_nonzero(recorded.removed_N != (~tokens.keep_N & nonzero))),
        ratio_max_error=_ratio_error(config, recorded),
        loss_errors=parity_errors([recorded.loss], [expected_loss]),
        gradient_errors=parity_errors(gradient, terms.slope / recorded.denominator),
        counts_different=_recounted(count_config or config, recorded, ppo),
    )


def _terms(config: Mapping[str, Any], tokens: TokenArrays) -> Any:
    return reference_terms(
        config,
        current=tokens.target_logprobs_N,
        sampling=tokens.sampling_logprobs_N,
        anchor=tokens.anchor_logprobs_N,
        advantages=tokens.advantages_N,
        mask=np.ones(len(tokens)),
    )


def _gradient(config: Mapping[str, Any], tokens: TokenArrays, denominator: float) -> Floats:
    """Derivative of the loss in the log-probabilities, by the loss that training uses, in float64."""
    target = torch.from_numpy(tokens.target_logprobs_N.copy()).requires_grad_(True)
    inputs = LossInputs(
        sampling_logprobs_T=torch.from_numpy(tokens.sampling_logprobs_N),
        advantages_T=torch.from_numpy(tokens.advantages_N),
        loss_mask_T=torch.ones(len(tokens), dtype=torch.bool),
        anchor_logprobs_T=None
        if tokens.anchor_logprobs_N is None
        else torch.from_numpy(tokens.anchor_logprobs_N),
    )
    result = batch_loss(make_loss(config), [target], [inputs], denominator=denominator)
    (gradient,) = torch.autograd.grad(result.loss, target)
    found: Floats = gradient.numpy()
    return found


def _ratio_error(config: Mapping[str, Any], recorded: RecordedUpdate) -> float:
    """Largest relative error of the recorded ratio; 0 for losses whose ratio is no such power."""
    if config["kind"] != "dppo" or len(recorded.tokens) == 0:
        return 0.0
    tokens = recorded.tokens
    gap = tokens.target_logprobs_N - tokens.sampling_logprobs_N
    ratio = np.exp(np.minimum(gap, 20.0))
    if config["ratio_cap"] is not None:
        ratio = np.minimum(ratio, config["ratio_cap"])
    return float(np.max(np.abs(recorded.prob_ratio_N - ratio) / np.maximum(ratio, 1.0)))


def _recounted(
    config: Mapping[str, Any], recorded: RecordedUpdate, ppo: tuple[float, float]
) -> tuple[str, ...]:
    """Names of the recorded counts that differ from a recount; only forms that it knows."""
    if config["kind"] != "dppo" or config["divergence"] != "binary_tv":
        return ()
    tokens = recorded.tokens
    anchors = tokens.anchor_logprobs_N if config.get("anchor") == "recompute" else None
    compared = tokens.sampling_logprobs_N if anchors is None else anchors
    counts = recount(
        (
            Token(target_logprob=p, sampling_logprob=q, anchor_logprob=r, advantage=a, keep=k)
            for p, q, r, a, k in zip(
                tokens.target_logprobs_N.tolist(),
                tokens.sampling_logprobs_N.tolist(),
                compared.tolist(),
                tokens.advantages_N.tolist(),
                tokens.keep_N.tolist(),
                strict=True,
            )
        ),
        delta_low=config["delta_low"],
        delta_high=config["delta_high"],
        ppo=ppo,
    )
    return tuple(
        name
        for name in COUNTED
        if recorded.counts.get(name) is not None and recorded.counts[name] != counts[name]
    )


# ---- which rule was followed --------------------------------------------------------------------

KeepRule: TypeAlias = Callable[[TokenArrays], Bools]


def matching_variants(config: Mapping[str, Any], updates: Sequence[RecordedUpdate]) -> list[str]:
    """Name the known variants of a mask whose decisions are those recorded, token for token.

    Args:
        config: the registered loss.
        updates: recorded updates.

    Returns:
        Names; ``as registered`` if the registered rule is among them.
    """
    return [
        name
        for name, rule in _variants(config)
        if all(np.array_equal(rule(one.tokens), one.tokens.keep_N) for one in updates)
    ]


def _variants(config: Mapping[str, Any]) -> Iterator[tuple[str, KeepRule]]:
    def by(changed: Mapping[str, Any]) -> KeepRule:
        return lambda tokens: np.asarray(_terms(changed, tokens).keep, dtype=np.bool_)

    yield "as registered", by(config)
    if config["kind"] != "dppo":
        return
    low, high = config["delta_low"], config["delta_high"]
    for name, factor in (
        (f"delta times {DELTA_FACTOR:g}", DELTA_FACTOR),
        (f"delta divided by {DELTA_FACTOR:g}", 1.0 / DELTA_FACTOR),
        ("half the total variation", 2.0),
    ):
        if low is not None and high is not None:
            yield name, by({**config, "delta_low": low * factor, "delta_high": high * factor})
    yield "thresholds swapped", by({**config, "delta_low": high, "delta_high": low})
    for divergence in ("binary_tv", "binary_kl", "ratio"):
        if divergence != config["divergence"] and low is not None:
            yield f"divergence {divergence}", by({**config, "divergence": divergence})
    yield "mask whatever the sign", _whatever_the_sign(config)
    yield "mask of the other direction", _other_direction(config)
    yield "no mask", lambda tokens: np.ones(len(tokens), dtype=np.bool_)
    clip = {"kind": "grpo_clip", "dual_clip": None}
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    yield "ratio clip of 0.2", by({**clip, **bounds})


def _turned(tokens: TokenArrays, sign: float) -> TokenArrays:
    return TokenArrays(
        target_logprobs_N=tokens.target_logprobs_N,
        sampling_logprobs_N=tokens.sampling_logprobs_N,
        advantages_N=np.where(tokens.advantages_N > 0, sign, -sign),
        keep_N=tokens.keep_N,
        anchor_logprobs_N=tokens.anchor_logprobs_N,
    )


def _whatever_the_sign(config: Mapping[str, Any]) -> KeepRule:
    def rule(tokens: TokenArrays) -> Bools:
        first, second = (_terms(config, _turned(tokens, sign)).keep for sign in (1.0, -1.0))
        return np.asarray(first & second, dtype=np.bool_)

    return rule


def _other_direction(config: Mapping[str, Any]) -> KeepRule:
    return lambda tokens: np.asarray(_terms(config, _turned(tokens, -1.0)).keep, dtype=np.bool_)


# ---- what can activate at all -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Whether any pair of probabilities makes a loss remove a gradient, by sign of the advantage."""

    positive: bool
    negative: bool


def reach(config: Mapping[str, Any]) -> Reach:
    """Try the registered loss on the most extreme moves that two probabilities can make.

    A threshold on total variation above 1, for instance, lets nothing activate, whatever is
    trained: the figures of a run then say nothing about its regime.
    """
    pairs = [(math.log(p), math.log(q)) for p in _EXTREMES for q in _EXTREMES if p != q]
    found = []
    for advantage in (1.0, -1.0):
        terms = reference_terms(
            config,
            current=[p for p, _ in pairs],
            sampling=[q for _, q in pairs],
            anchor=[q for _, q in pairs],
            advantages=[advantage] * len(pairs),
            mask=[1.0] * len(pairs),
        )
        found.append(bool((~terms.keep).any()))
    return Reach(positive=found[0], negative=found[1])


def try_replay(
    config: Mapping[str, Any], recorded: RecordedUpdate, **options: Any
) -> tuple[ReplayedUpdate | None, str | None]:
    """Replay an update, or say why it cannot be replayed."""
    try:
        return replay(config, recorded, **options), None
    except (LossConfigError, LossInputError) as error:
        return None, str(error)


DELTA_GRID = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)


def removed_at(tokens: TokenArrays, *, delta: float) -> int:
    """Tokens that a total-variation mask of this threshold would remove: a figure, not a sweep."""
    moved = np.exp(tokens.target_logprobs_N) - np.exp(tokens.sampling_logprobs_N)
    towards = np.sign(tokens.advantages_N) * moved
    return int(np.count_nonzero(towards > delta))
