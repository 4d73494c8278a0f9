"""The activation gates' metrics, under their exact names and definitions.

Each metric is a pure function of what a pilot retained. It returns a number (a name, for the base
model), or None with a reason where it was not measured: never a stand-in. What was not measured is
``unverified`` to the gate.

Shape legend: N trained tokens, P problems (groups), G completions of one problem.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from losses.diagnostics import DiagnosticSettings, ppo_clipped, quantile
from losses.errors import LossInputError
from losses.token_arrays import Floats, TokenArrays, concatenate

Evidence = TypeVar("Evidence")

SECOND_UPDATE = 1
"""Position of the second update within a rollout batch, from 0."""
LARGE_TOKEN_ADVANTAGE_NATS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotUpdate:
    """One optimizer step of a pilot."""

    step: int
    """Rollout step whose batch was trained on."""
    position: int
    """Which update of that batch, from 0, counted over minibatches and epochs."""
    epoch: int = 0
    """Pass over that batch, from 0."""
    tokens: TokenArrays
    """Trained tokens with the log-probabilities before this update and the loss's decisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotEvidence:
    """What a pilot retained; a field is None where it retained nothing."""

    updates: Sequence[PilotUpdate] | None = None
    baseline_clip: tuple[float, float] | None = None
    """Bounds of the baseline's clip on the ratio itself, e.g. (0.8, 1.2)."""
    optimizer_steps: Mapping[int, int] | None = None
    """Optimizer steps as logged, by rollout step."""
    base_models: Sequence[str] | None = None
    """Model name that each created training client reported."""
    teacher_logprobs: ArrayLike | None = None
    """[N] nats on the trained tokens of the SDPO pilot; NaN where the teacher gave none."""
    student_logprobs: ArrayLike | None = None
    """[N] nats, sampling log-probabilities of the same tokens."""
    judge_rationales: Sequence[str | None] | None = None
    """One per trajectory: the judge's words in its teacher prompt."""
    group_rewards_PG: Sequence[Sequence[float]] | None = None
    """Composite reward of every completion, by group."""
    judge_calls_parsed: Sequence[bool] | None = None
    """One per judge call: whether three scores and a rationale could be parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateMetric:
    """One measured metric, or why it was not measured."""

    name: str
    value: float | int | str | None
    reason: str | None
    """Why ``value`` is None; None where it was measured."""
    detail: Mapping[str, object] = field(default_factory=dict)
    """Counts behind the value and what was decided where the definition is silent."""


class NotMeasuredError(Exception):
    """A metric cannot be computed from this evidence; the text says what is missing."""


Measure: TypeAlias = Callable[[PilotEvidence], tuple[float | int | str, dict[str, object]]]


def given(value: Evidence | None, what: str) -> Evidence:
    """Return evidence that must be there.

    Raises:
        NotMeasuredError: if it is None.
    """
    if value is None:
        message = f"{what} not retained"
        raise NotMeasuredError(message)
    return value


def second_updates(evidence: PilotEvidence) -> dict[int, TokenArrays]:
    """Return the trained tokens of each pilot step's second update.

    Raises:
        NotMeasuredError: if there is no pilot step, or a step lacks exactly one second update with
            a trained token.
    """
    updates = given(evidence.updates, "pilot updates")
    steps = sorted({update.step for update in updates})
    if not steps:
        message = "pilot has no update"
        raise NotMeasuredError(message)
    found: dict[int, TokenArrays] = {}
    for step in steps:
        second = [u.tokens for u in updates if u.step == step and u.position == SECOND_UPDATE]
        if len(second) != 1 or len(second[0]) == 0:
            message = f"pilot step {step}: expected one second update with a trained token"
            raise NotMeasuredError(message)
        found[step] = second[0]
    return found


def removed(tokens: TokenArrays) -> int:
    """Count the tokens whose non-zero gradient the loss removed."""
    return int(np.count_nonzero(~tokens.keep_N & (tokens.advantages_N != 0)))


def dppo_masked_token_fraction(evidence: PilotEvidence) -> tuple[float, dict[str, object]]:
    """Unweighted mean over pilot steps of removed / trained tokens at the second update.

    Removed means a non-zero advantage and not kept: zero advantages and padding are no engagement
    of the treatment. The denominator is all trained tokens of that update.
    """
    counts = {
        step: (removed(tokens), len(tokens)) for step, tokens in second_updates(evidence).items()
    }
    fractions = [masked / total for masked, total in counts.values()]
    detail: dict[str, object] = {
        "steps": [
            {"step": step, "masked_tokens": masked, "loss_tokens": total}
            for step, (masked, total) in counts.items()
        ]
    }
    return sum(fractions) / len(fractions), detail


def policy_drift_abs_p_q90(evidence: PilotEvidence) -> tuple[float, dict[str, object]]:
    """0.9 quantile of |p_current - p_sampler| over the trained tokens of all second updates.

    The tokens of the pilot's second updates are one pool; linear interpolation.
    """
    tokens = second_updates(evidence)
    drift = {step: absolute_drift(part) for step, part in tokens.items()}
    detail: dict[str, object] = {
        "loss_tokens": sum(len(part) for part in tokens.values()),
        "by_step": {str(step): quantile(values, 0.9) for step, values in drift.items()},
        "pooling": "tokens of all second updates, linear interpolation",
    }
    return quantile(np.concatenate(list(drift.values())), 0.9), detail


def absolute_drift(tokens: TokenArrays) -> Floats:
    """Return |p_current - p_sampler| of every trained token."""
    drift: Floats = np.abs(np.exp(tokens.target_logprobs_N) - np.exp(tokens.sampling_logprobs_N))
    return drift


def grpo_clip_fraction(evidence: PilotEvidence) -> tuple[float, dict[str, object]]:
    """Share of the pilot batches' trained tokens whose gradient the baseline's clip would remove.

    Direction-aware (A > 0 above the upper bound, A < 0 below the lower one; zero advantages never),
    ratio against the sampling log-probabilities, over all updates of the pilot's batches.

    Raises:
        NotMeasuredError: if no token was trained.
    """
    updates = given(evidence.updates, "pilot updates")
    low, high = given(evidence.baseline_clip, "baseline clip bounds")
    settings = DiagnosticSettings(
        rule=None, ratio_cap=None, ppo_low_threshold=low, ppo_high_threshold=high
    )
    clipped = {0: 0, SECOND_UPDATE: 0}
    totals = {0: 0, SECOND_UPDATE: 0}
    for update in updates:
        key = SECOND_UPDATE if update.position == SECOND_UPDATE else 0
        clipped[key] += clipped_tokens(update.tokens, settings)
        totals[key] += len(update.tokens)
    total = sum(totals.values())
    if total == 0:
        message = "pilot has no trained token"
        raise NotMeasuredError(message)
    detail: dict[str, object] = {
        "clipped_tokens": sum(clipped.values()),
        "loss_tokens": total,
        "second_update_clipped_tokens": clipped[SECOND_UPDATE],
        "second_update_loss_tokens": totals[SECOND_UPDATE],
        "definition": "direction-aware, zero advantages excluded, all updates of the batches",
    }
    return sum(clipped.values()) / total, detail


def clipped_tokens(tokens: TokenArrays, settings: DiagnosticSettings) -> int:
    """Count the tokens that the ratio clip would remove."""
    with np.errstate(over="ignore"):
        ratio_N = np.exp(tokens.target_logprobs_N - tokens.sampling_logprobs_N)
    return int(
        np.count_nonzero(ppo_clipped(ratio_N, np.sign(tokens.advantages_N), settings=settings))
    )


def executed_updates_per_batch(evidence: PilotEvidence) -> tuple[int, dict[str, object]]:
    """Optimizer steps per rollout batch, if every batch had the same number.

    Raises:
        NotMeasuredError: if there is no batch, or the numbers differ: no single one is true then.
    """
    steps = given(evidence.optimizer_steps, "optimizer steps by rollout step")
    counts = sorted(set(steps.values()))
    if len(counts) != 1:
        message = f"optimizer steps per rollout batch: {counts or 'none'}; expected one number"
        raise NotMeasuredError(message)
    return counts[0], {"batches": len(steps)}


def executed_base_model(evidence: PilotEvidence) -> tuple[str, dict[str, object]]:
    """Model name that every created training client reported.

    Raises:
        NotMeasuredError: if there is none, or they differ.
    """
    names = sorted(set(given(evidence.base_models, "base model at client creation")))
    if len(names) != 1:
        message = f"base models reported: {names}; expected one name"
        raise NotMeasuredError(message)
    return names[0], {"clients": len(given(evidence.base_models, "base model"))}


def second_pass(evidence: PilotEvidence) -> tuple[TokenArrays, dict[str, object]]:
    """Return the trained tokens of every update of a second pass, as one pool.

    Raises:
        NotMeasuredError: if no batch was passed over twice, or no token was trained then.
    """
    updates = given(evidence.updates, "pilot updates")
    pooled = concatenate([update.tokens for update in updates if update.epoch == 1])
    if len(pooled) == 0:
        message = "no update of a second pass with a trained token"
        raise NotMeasuredError(message)
    calls = sum(update.epoch == 1 for update in updates)
    return pooled, {"loss_tokens": len(pooled), "loss_calls": calls, "pooling": "by loss tokens"}


def epoch2_dppo_masked_token_fraction(
    evidence: PilotEvidence,
) -> tuple[float, dict[str, object]]:
    """Removed / trained tokens of all second-pass updates as one pool."""
    tokens, detail = second_pass(evidence)
    return removed(tokens) / len(tokens), {"masked_tokens": removed(tokens), **detail}


def epoch2_ppo_counterfactual_clip_fraction(
    evidence: PilotEvidence,
) -> tuple[float, dict[str, object]]:
    """Share of the second-pass tokens whose gradient the baseline's clip would remove."""
    tokens, detail = second_pass(evidence)
    low, high = given(evidence.baseline_clip, "baseline clip bounds")
    settings = DiagnosticSettings(
        rule=None, ratio_cap=None, ppo_low_threshold=low, ppo_high_threshold=high
    )
    clipped = clipped_tokens(tokens, settings)
    return clipped / len(tokens), {"clipped_tokens": clipped, **detail}


def epoch2_policy_drift_abs_p_q90(evidence: PilotEvidence) -> tuple[float, dict[str, object]]:
    """0.9 quantile of |p_current - p_sampler| over the second-pass tokens; linear interpolation."""
    tokens, detail = second_pass(evidence)
    return quantile(absolute_drift(tokens), 0.9), detail


def teacher_gap(evidence: PilotEvidence) -> tuple[Floats, int]:
    """Return |teacher - student| on every trained token, and how many had no teacher value.

    A token without one was trained with advantage 0, so its gap is 0 and it stays in the
    denominator. The gap is taken before any clip.

    Raises:
        NotMeasuredError: if there is no token or the arrays differ in length.
    """
    teacher = np.asarray(given(evidence.teacher_logprobs, "teacher log-probabilities"), float)
    student = np.asarray(given(evidence.student_logprobs, "student log-probabilities"), float)
    if teacher.shape != student.shape or teacher.size == 0:
        message = f"teacher and student log-probabilities: {teacher.shape} and {student.shape}"
        raise NotMeasuredError(message)
    missing = np.isnan(teacher)
    gap: Floats = np.where(missing, 0.0, np.abs(teacher - student))
    if not bool(np.isfinite(gap).all()):
        message = "teacher or student log-probabilities hold an infinity or a student NaN"
        raise NotMeasuredError(message)
    return gap, int(np.count_nonzero(missing))


def sdpo_frac_tokens_abs_adv_gt_0_1(evidence: PilotEvidence) -> tuple[float, dict[str, object]]:
    """Share of trained assistant tokens with |teacher - student| > 0.1 nats, strictly."""
    gap, missing = teacher_gap(evidence)
    large = int(np.count_nonzero(gap > LARGE_TOKEN_ADVANTAGE_NATS))
    detail: dict[str, object] = {
        "tokens": gap.size,
        "tokens_above": large,
        "tokens_without_teacher": missing,
    }
    return large / gap.size, detail


def sdpo_mean_abs_token_adv(evidence: PilotEvidence) -> tuple[float, dict[str, object]]:
    """Mean |teacher - student| over trained assistant tokens, nats, before any clip."""
    gap, missing = teacher_gap(evidence)
    return float(gap.mean()), {"tokens": gap.size, "tokens_without_teacher": missing}


def sdpo_frac_trajectories_with_feedback(
    evidence: PilotEvidence,
) -> tuple[float, dict[str, object]]:
    """Share of trajectories whose teacher prompt holds a judge rationale that is not blank."""
    rationales = given(evidence.judge_rationales, "judge rationales of the teacher prompts")
    filled = sum(bool(text and text.strip()) for text in rationales)
    return share(filled, len(rationales), "trajectories")


def grpo_frac_groups_nonzero_adv(evidence: PilotEvidence) -> tuple[float, dict[str, object]]:
    """Share of rollout groups whose composite rewards are not all equal."""
    groups = given(evidence.group_rewards_PG, "composite rewards by group")
    varied = sum(len(set(rewards_G)) > 1 for rewards_G in groups)
    return share(varied, len(groups), "groups")


def judge_parse_success_rate(evidence: PilotEvidence) -> tuple[float, dict[str, object]]:
    """Share of judge calls that returned three parsable scores and a rationale."""
    calls = given(evidence.judge_calls_parsed, "judge calls")
    return share(sum(bool(parsed) for parsed in calls), len(calls), "calls")


def share(part: int, whole: int, what: str) -> tuple[float, dict[str, object]]:
    """Return a share with its counts.

    Raises:
        NotMeasuredError: if the whole is 0.
    """
    if whole == 0:
        message = f"no {what} in the pilot"
        raise NotMeasuredError(message)
    return part / whole, {what: whole, f"{what}_counted": part}


MEASURES: dict[str, Measure] = {
    "dppo_masked_token_fraction": dppo_masked_token_fraction,
    "policy_drift_abs_p_q90": policy_drift_abs_p_q90,
    "grpo_clip_fraction": grpo_clip_fraction,
    "epoch2_dppo_masked_token_fraction": epoch2_dppo_masked_token_fraction,
    "epoch2_ppo_counterfactual_clip_fraction": epoch2_ppo_counterfactual_clip_fraction,
    "epoch2_policy_drift_abs_p_q90": epoch2_policy_drift_abs_p_q90,
    "executed_updates_per_batch": executed_updates_per_batch,
    "executed_base_model": executed_base_model,
    "sdpo_frac_tokens_abs_adv_gt_0.1": sdpo_frac_tokens_abs_adv_gt_0_1,
    "sdpo_mean_abs_token_adv": sdpo_mean_abs_token_adv,
    "sdpo_frac_trajectories_with_feedback": sdpo_frac_trajectories_with_feedback,
    "grpo_frac_groups_nonzero_adv": grpo_frac_groups_nonzero_adv,
    "judge_parse_success_rate": judge_parse_success_rate,
}
"""Every metric that a gate may name."""


def measure(name: str, evidence: PilotEvidence) -> GateMetric:
    """Measure one gate metric by its exact name.

    Args:
        name: as the spec's ``activation_gate`` spells it.
        evidence: what the pilot retained.

    Returns:
        The value, or None with the reason: an unknown name, or evidence that is missing or does not
        allow the definition to be applied.
    """
    if name not in MEASURES:
        reason = f"unknown metric {name!r}; known: {', '.join(MEASURES)}"
        return GateMetric(name=name, value=None, reason=reason)
    try:
        value, detail = MEASURES[name](evidence)
    except (NotMeasuredError, LossInputError) as error:
        return GateMetric(name=name, value=None, reason=str(error))
    return GateMetric(name=name, value=value, reason=None, detail=detail)


def measure_all(names: Sequence[str], evidence: PilotEvidence) -> dict[str, GateMetric]:
    """Measure several gate metrics; the order is that of the names."""
    return {name: measure(name, evidence) for name in names}
