"""Measured errors for the correctness preflight: the losses against the float64 reference.

One fixed, hashed batch goes through both, fresh and stale, packed and unpacked; what comes back are
measured errors, never a verdict.

Shape legend: D datums (ragged), T targets of one datum, N targets of all datums joined.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from losses.errors import LossConfigError, LossInputError
from losses.inputs import LossInputs
from losses.objective import batch_loss
from losses.reference import policy as reference_policy
from losses.reference import sdpo as reference_sdpo
from losses.reference.arrays import TokenTerms
from losses.registry import make_loss

Floats: TypeAlias = NDArray[np.float64]
ErrorSummary: TypeAlias = dict[str, float | None]
"""``max_abs_error``, ``reference_max_abs``, ``relative_l2_error``, ``cosine_similarity``."""

SUMMARY_NAMES = ("max_abs_error", "reference_max_abs", "relative_l2_error", "cosine_similarity")
CHECKS = ("baseline_loss", "baseline_gradient", "reference_loss", "reference_gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBatch:
    """One batch of loss inputs as plain numbers, whose bytes can be kept and hashed.

    Raises:
        LossInputError: if a field's datums differ in number or length.
    """

    description: str
    target_logprobs_D: tuple[tuple[float, ...], ...]
    sampling_logprobs_D: tuple[tuple[float, ...], ...]
    advantages_D: tuple[tuple[float, ...], ...]
    loss_mask_D: tuple[tuple[bool, ...], ...]
    anchor_logprobs_D: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        """Refuse fields that do not fit together."""
        lengths = [len(row) for row in self.target_logprobs_D]
        for name, rows in self.fields().items():
            if [len(row) for row in rows] != lengths:
                message = f"{name}: lengths {[len(row) for row in rows]}; expected {lengths}"
                raise LossInputError(message)

    def fields(self) -> dict[str, tuple[tuple[float, ...], ...]]:
        """Return every array field that is given, by name."""
        named: dict[str, tuple[tuple[float, ...], ...]] = {
            "target_logprobs_D": self.target_logprobs_D,
            "sampling_logprobs_D": self.sampling_logprobs_D,
            "advantages_D": self.advantages_D,
            "loss_mask_D": self.loss_mask_D,
        }
        if self.anchor_logprobs_D is not None:
            named["anchor_logprobs_D"] = self.anchor_logprobs_D
        return named

    def canonical_bytes(self) -> bytes:
        """Return the batch as JSON: sorted keys, no spaces, ASCII; non-finite numbers as text."""
        document: dict[str, Any] = {
            name: [[jsonable(value) for value in row] for row in rows]
            for name, rows in self.fields().items()
        }
        document["description"] = self.description
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return text.encode("ascii")

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of ``canonical_bytes``, in hex."""
        return hashlib.sha256(self.canonical_bytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class LossAndGradient:
    """A scalar loss and its gradient in the joined log-probabilities."""

    loss: float
    gradient_N: Floats


@dataclass(frozen=True, slots=True)
class PathErrors:
    """Measured errors of one loss path."""

    errors: dict[str, ErrorSummary]
    """The four checks, each the least favourable of all variants, field by field."""
    variants: dict[str, dict[str, ErrorSummary]]
    """Each variant's own errors: fresh or stale inputs, packed or unpacked."""
    fixed_input_sha256: str


def jsonable(value: float) -> float | str:
    """Return a number as JSON can hold it."""
    return value if math.isfinite(value) else str(value)


def fixed_batch(
    *,
    description: str,
    target_logprobs: Sequence[ArrayLike],
    sampling_logprobs: Sequence[ArrayLike],
    advantages: Sequence[ArrayLike],
    loss_mask: Sequence[ArrayLike],
    anchor_logprobs: Sequence[ArrayLike] | None = None,
) -> FixedBatch:
    """Freeze a batch of tensors or arrays; float32 values are kept exactly.

    Raises:
        LossInputError: if a field's datums differ in number or length.
    """

    def rows(values: Sequence[ArrayLike]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(np.asarray(row, dtype=np.float64).tolist()) for row in values)

    return FixedBatch(
        description=description,
        target_logprobs_D=rows(target_logprobs),
        sampling_logprobs_D=rows(sampling_logprobs),
        advantages_D=rows(advantages),
        loss_mask_D=tuple(
            tuple(bool(entry) for entry in np.asarray(row).tolist()) for row in loss_mask
        ),
        anchor_logprobs_D=None if anchor_logprobs is None else rows(anchor_logprobs),
    )


def stale(batch: FixedBatch, *, nats: float, seed: int) -> FixedBatch:
    """Return the batch as if the policy had moved since sampling.

    Each current log-probability moves by a normal number of ``nats`` standard deviation, the same
    for the same seed, and stays at most 0. The values are those of float32, as a service returns
    them. Everything else, the sampling log-probabilities first of all, is unchanged.

    Args:
        batch: a fresh batch.
        nats: how far tokens move; > 0.
        seed: of the generator.

    Raises:
        LossConfigError: if ``nats`` is not positive.
    """
    if not nats > 0.0:
        message = f"nats: {nats}; expected a number > 0"
        raise LossConfigError(message)
    generator = np.random.Generator(np.random.PCG64(seed))
    moved = tuple(
        tuple(
            np.minimum(np.asarray(row) + nats * generator.standard_normal(len(row)), 0.0)
            .astype(np.float32)
            .astype(np.float64)
            .tolist()
        )
        for row in batch.target_logprobs_D
    )
    return replace(
        batch,
        target_logprobs_D=moved,
        description=f"{batch.description}; current policy moved by {nats:g} nats, seed {seed}",
    )


def parity_errors(actual: ArrayLike, reference: ArrayLike) -> ErrorSummary:
    """Compare two vectors in the four numbers of a correctness report.

    ``max_abs_error`` = max |actual - reference|; ``reference_max_abs`` = max |reference|;
    ``relative_l2_error`` = norm(actual - reference) / norm(reference), null for a zero reference;
    ``cosine_similarity``, null where either vector is zero. Every entry is null where a number is
    not finite or there is none: nothing was measured then.

    Raises:
        LossInputError: if the two differ in length.
    """
    ours = np.asarray(actual, dtype=np.float64).ravel()
    theirs = np.asarray(reference, dtype=np.float64).ravel()
    if ours.shape != theirs.shape:
        message = f"actual: {ours.size} numbers; expected {theirs.size}, as the reference"
        raise LossInputError(message)
    if ours.size == 0 or not bool(np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return dict.fromkeys(SUMMARY_NAMES)
    gap_norm, our_norm, their_norm = norm(ours - theirs), norm(ours), norm(theirs)
    cosine = None
    if our_norm > 0.0 and their_norm > 0.0:
        cosine = float(np.clip(np.dot(ours / our_norm, theirs / their_norm), -1.0, 1.0))
    return {
        "max_abs_error": float(np.abs(ours - theirs).max()),
        "reference_max_abs": float(np.abs(theirs).max()),
        "relative_l2_error": gap_norm / their_norm if their_norm > 0.0 else None,
        "cosine_similarity": cosine,
    }


def norm(values: Floats) -> float:
    """Return the Euclidean norm; scaled, so that squares neither overflow nor vanish."""
    largest = float(np.abs(values).max())
    return largest * float(np.linalg.norm(values / largest)) if largest > 0.0 else 0.0


def torch_result(
    config: Mapping[str, Any],
    batch: FixedBatch,
    *,
    denominator: float,
    packed: bool,
    logprob_dtype: torch.dtype = torch.float32,
) -> LossAndGradient:
    """Compute loss and gradient by the path that training uses.

    Args:
        config: the loss, as registered.
        batch: fixed inputs.
        denominator: what the sum is divided by.
        packed: True joins all datums into one; False sends each alone and adds up.
        logprob_dtype: dtype in which the log-probabilities arrive and the gradient leaves.

    Raises:
        LossInputError: if a trained token holds a non-finite number.
        LossConfigError: if the configuration or the denominator is not usable.
    """
    loss = make_loss(config)
    targets, inputs = tensors(batch, logprob_dtype=logprob_dtype)
    if packed:
        targets = [torch.cat(targets)]
        inputs = [joined(inputs)]
    targets = [target.requires_grad_(True) for target in targets]
    total = 0.0
    for target, datum in zip(targets, inputs, strict=True):
        part = batch_loss(loss, [target], [datum], denominator=denominator)
        part.loss.backward()  # type: ignore[no-untyped-call]
        total += float(part.loss.detach())
    gradients = [
        target.grad.to(torch.float64).numpy() for target in targets if target.grad is not None
    ]
    return LossAndGradient(total, np.concatenate(gradients) if gradients else np.zeros(0))


def tensors(
    batch: FixedBatch, *, logprob_dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[LossInputs]]:
    """Return the batch as the tensors that a training step holds."""
    targets = [torch.tensor(row, dtype=logprob_dtype) for row in batch.target_logprobs_D]
    anchors = batch.anchor_logprobs_D
    inputs = [
        LossInputs(
            sampling_logprobs_T=torch.tensor(batch.sampling_logprobs_D[index], dtype=logprob_dtype),
            advantages_T=torch.tensor(batch.advantages_D[index], dtype=torch.float64),
            loss_mask_T=torch.tensor(batch.loss_mask_D[index], dtype=torch.bool),
            anchor_logprobs_T=None
            if anchors is None
            else torch.tensor(anchors[index], dtype=logprob_dtype),
        )
        for index in range(len(targets))
    ]
    return targets, inputs


def joined(inputs: Sequence[LossInputs]) -> LossInputs:
    """Join the inputs of a batch end to end."""
    anchors = [i.anchor_logprobs_T for i in inputs if i.anchor_logprobs_T is not None]
    return LossInputs(
        sampling_logprobs_T=torch.cat([i.sampling_logprobs_T for i in inputs]),
        advantages_T=torch.cat([i.advantages_T for i in inputs]),
        loss_mask_T=torch.cat([i.loss_mask_T for i in inputs]),
        anchor_logprobs_T=torch.cat(anchors) if anchors else None,
    )


def reference_result(
    config: Mapping[str, Any], batch: FixedBatch, *, denominator: float
) -> LossAndGradient:
    """Compute loss and gradient by the float64 reference.

    Raises:
        LossConfigError: if the reference has no policy loss of that kind.
    """
    terms = reference_terms(
        config,
        current=joined_rows(batch.target_logprobs_D),
        sampling=joined_rows(batch.sampling_logprobs_D),
        anchor=None if batch.anchor_logprobs_D is None else joined_rows(batch.anchor_logprobs_D),
        advantages=joined_rows(batch.advantages_D),
        mask=joined_rows(batch.loss_mask_D),
    )
    loss = math.fsum(terms.term.tolist()) / denominator
    return LossAndGradient(loss, terms.slope / denominator)


def joined_rows(rows: Sequence[Sequence[float]]) -> Floats:
    """Return rows of different lengths end to end."""
    return np.asarray([value for row in rows for value in row], dtype=np.float64)


def reference_terms(
    config: Mapping[str, Any],
    *,
    current: ArrayLike,
    sampling: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    anchor: ArrayLike | None = None,
    teacher: ArrayLike | None = None,
) -> TokenTerms:
    """Return the reference's terms, slopes and decisions for a registered policy loss.

    Args:
        config: the loss, as registered; ``dppo`` without a top-K divergence.
        current: nats under the policy being trained, any shape.
        sampling: nats, the same shape.
        advantages: the same shape.
        mask: non-zero where trained.
        anchor: nats, for ``anchor: recompute``.
        teacher: nats, for ``sdpo_token``.

    Raises:
        LossConfigError: if the reference has no policy loss of that kind, or the anchor or teacher
            that the configuration needs is missing.
    """
    make_loss(config)
    kind = config["kind"]
    recompute = config.get("anchor", "sampling") == "recompute"
    if recompute and anchor is None:
        message = 'anchor: None; expected values, needed by anchor "recompute"'
        raise LossConfigError(message)
    compared = anchor if recompute and anchor is not None else sampling
    if kind == "importance_sampling":
        return reference_policy.importance_sampling(current, sampling, advantages, mask)
    if kind == "grpo_clip":
        return reference_policy.clipped_surrogate(
            current,
            compared,
            advantages,
            mask,
            low=config["clip_low_threshold"],
            high=config["clip_high_threshold"],
            dual_clip=config["dual_clip"],
            log_ratio_limit=config.get("log_ratio_limit_nats"),
        )
    if kind == "cispo":
        low, high = config["clip_low_threshold"], config["clip_high_threshold"]
        return reference_policy.cispo(current, sampling, advantages, mask, low=low, high=high)
    if kind == "dppo" and config.get("top_k") is None:
        form = reference_policy.MaskForm(
            divergence=config["divergence"],
            delta_low=config["delta_low"],
            delta_high=config["delta_high"],
            ratio_cap=config["ratio_cap"],
        )
        return reference_policy.dppo(
            current, sampling, advantages, mask, form=form, anchor=compared
        )
    if kind == "sdpo_token" and teacher is not None:
        weights = reference_sdpo.importance_weight(current, compared, is_clip=config["is_clip"])
        return reference_sdpo.token_level(current, teacher, mask, weights=weights)
    message = (
        f"loss kind: {kind!r}, top_k {config.get('top_k')!r}; "
        "expected importance_sampling, grpo_clip, cispo, dppo without top_k, or sdpo_token with "
        "a teacher"
    )
    raise LossConfigError(message)


def path_errors(
    *,
    baseline: Mapping[str, Any],
    treatment: Mapping[str, Any],
    fresh: FixedBatch,
    stale: FixedBatch,
    denominator: float,
    reference_fresh: FixedBatch | None = None,
    reference_stale: FixedBatch | None = None,
    logprob_dtype: torch.dtype = torch.float32,
) -> PathErrors:
    """Measure one loss path: the baseline through the new path, and the treatment's reference.

    Four variants: fresh and stale inputs, each packed and unpacked. A path whose treatment is an
    advantage rather than a loss passes batches that hold the reference's own advantages.

    Args:
        baseline: the baseline's loss, as registered; compared as ``baseline_*``.
        treatment: the treatment's loss, as registered; compared as ``reference_*``.
        fresh: inputs right after sampling.
        stale: the same with the policy moved (``stale``).
        denominator: what sums are divided by.
        reference_fresh: what the reference is given for the treatment, if not the same.
        reference_stale: the same for the stale inputs.
        logprob_dtype: dtype in which log-probabilities arrive.

    Returns:
        Errors in the form of a correctness report, with each variant beside them. The hash covers
        both batches.

    Raises:
        LossInputError: if a trained token holds a non-finite number.
        LossConfigError: if a configuration is not usable.
    """
    pairs = {
        "fresh": (fresh, reference_fresh or fresh),
        "stale": (stale, reference_stale or stale),
    }
    variants: dict[str, dict[str, ErrorSummary]] = {}
    for age, (batch, expected) in pairs.items():
        for packed in (True, False):
            variants[f"{age}_{'packed' if packed else 'unpacked'}"] = variant_errors(
                {"baseline": (baseline, batch), "reference": (treatment, expected)},
                batch,
                denominator=denominator,
                packed=packed,
                logprob_dtype=logprob_dtype,
            )
    digest = hashlib.sha256(fresh.canonical_bytes() + b"\n" + stale.canonical_bytes()).hexdigest()
    worst = {check: worst_of([variant[check] for variant in variants.values()]) for check in CHECKS}
    return PathErrors(worst, variants, digest)


def variant_errors(
    pairs: Mapping[str, tuple[Mapping[str, Any], FixedBatch]],
    batch: FixedBatch,
    *,
    denominator: float,
    packed: bool,
    logprob_dtype: torch.dtype,
) -> dict[str, ErrorSummary]:
    """Measure the four checks of one variant."""
    errors: dict[str, ErrorSummary] = {}
    for prefix, (config, expected_batch) in pairs.items():
        actual = torch_result(
            config, batch, denominator=denominator, packed=packed, logprob_dtype=logprob_dtype
        )
        expected = reference_result(config, expected_batch, denominator=denominator)
        errors[f"{prefix}_loss"] = parity_errors([actual.loss], [expected.loss])
        errors[f"{prefix}_gradient"] = parity_errors(actual.gradient_N, expected.gradient_N)
    return errors


def worst_of(summaries: Sequence[ErrorSummary]) -> ErrorSummary:
    """Combine summaries so that a check passed by the result is passed by every one of them.

    The largest errors, the smallest reference and cosine. A summary that measured nothing makes the
    whole unmeasured; a relative error or cosine that a zero vector left null does not.
    """
    if not summaries or any(summary["max_abs_error"] is None for summary in summaries):
        return dict.fromkeys(SUMMARY_NAMES)

    def present(name: str) -> list[float]:
        values = (summary[name] for summary in summaries)
        return [value for value in values if value is not None]

    return {
        "max_abs_error": max(present("max_abs_error")),
        "reference_max_abs": min(present("reference_max_abs")),
        "relative_l2_error": max(present("relative_l2_error"), default=None),
        "cosine_similarity": min(present("cosine_similarity"), default=None),
    }
