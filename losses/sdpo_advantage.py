"""SDPO's advantages: teacher minus sampling log-probability, token by token.

Shape legend: T targets of one sequence (its tokens without the first), S tokens of the teacher's
sequence.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from losses.errors import LossConfigError, LossInputError
from losses.inputs import require_finite, require_shape

MissingTeacher: TypeAlias = Literal["no_signal", "zero_nats"]
"""A trained token whose teacher log-probability the service left out: ``no_signal`` gives it
advantage 0, ``zero_nats`` takes the teacher as certain of it (as the published code does)."""


class AlignedTeacher(NamedTuple):
    """The teacher's log-probabilities at the targets' own positions."""

    teacher_logprobs_T: Tensor
    """[T] float64 nats; NaN where there is none."""
    scored: int
    """Targets with a value."""
    unanswered: int
    """Targets inside the rescored part for which the service returned none."""
    beyond_context: int
    """Targets after the last rescored token."""


class TokenAdvantages(NamedTuple):
    """Token-level SDPO advantages and what had to be left without a signal."""

    advantages_T: Tensor
    """[T] float64 nats; exactly 0 off the mask."""
    missing_tokens: int
    """Trained tokens without a teacher log-probability."""
    clipped_tokens: int
    """Trained tokens whose difference the clip changed."""


def align_teacher_logprobs(
    teacher_logprobs_S: Sequence[float | None],
    *,
    sequence_tokens: int,
    student_prefix_tokens: int,
    teacher_prefix_tokens: int,
) -> AlignedTeacher:
    """Move each rescored token's log-probability to its target position in the student's sequence.

    The teacher's sequence is its own prefix followed by the student's tokens after theirs, all of
    them: prompts, sampled tokens and tool results alike. Token i of the student stands at
    ``i - student_prefix + teacher_prefix`` of the teacher's, and target t is token t + 1. Counting
    trained tokens instead would shift every turn after the first tool result.

    Args:
        teacher_logprobs_S: one entry per teacher token, in nats; None where the service has none
            (the first token always). May end early, where the context was full.
        sequence_tokens: tokens of the student's whole sequence, T + 1.
        student_prefix_tokens: tokens replaced by the teacher's prefix; at least 1.
        teacher_prefix_tokens: tokens of the teacher's prefix; at least 1.

    Returns:
        [T] values and counts over all targets after the prefix, trained or not.

    Raises:
        LossInputError: if a length is not possible.
    """
    if not 1 <= student_prefix_tokens <= sequence_tokens:
        message = (
            f"student_prefix_tokens: {student_prefix_tokens}; expected 1 to {sequence_tokens}, "
            "the tokens of the sequence"
        )
        raise LossInputError(message)
    if teacher_prefix_tokens < 1:
        message = f"teacher_prefix_tokens: {teacher_prefix_tokens}; expected at least 1"
        raise LossInputError(message)
    offset = teacher_prefix_tokens - student_prefix_tokens
    longest = sequence_tokens + offset
    if len(teacher_logprobs_S) > longest:
        message = (
            f"teacher_logprobs_S: {len(teacher_logprobs_S)} entries; expected at most {longest}"
        )
        raise LossInputError(message)
    values_T = torch.full((sequence_tokens - 1,), float("nan"), dtype=torch.float64)
    unanswered = 0
    last = min(sequence_tokens, len(teacher_logprobs_S) - offset)
    for token in range(student_prefix_tokens, last):
        value = teacher_logprobs_S[token + offset]
        if value is None:
            unanswered += 1
        else:
            values_T[token - 1] = value
    scored = max(last - student_prefix_tokens, 0) - unanswered
    beyond = sequence_tokens - max(last, student_prefix_tokens)
    return AlignedTeacher(values_T, scored, unanswered, beyond)


def require_clip(clip_nats: float | None) -> None:
    """Refuse a clip that would reverse or silence the signal.

    Raises:
        LossConfigError: names the value.
    """
    if clip_nats is not None and not clip_nats > 0.0:
        message = f"clip_nats: {clip_nats}; expected a number > 0 or null"
        raise LossConfigError(message)


def token_advantages(
    aligned: AlignedTeacher,
    sampling_logprobs_T: Tensor,
    loss_mask_T: Tensor,
    *,
    clip_nats: float | None,
    missing: MissingTeacher,
) -> TokenAdvantages:
    """Return ``clip(teacher - sampling, -c, c)`` on trained tokens, exactly 0 elsewhere.

    Tokens after the rescored part have no signal whatever ``missing`` says: nothing was asked.

    Args:
        aligned: the teacher at the targets' positions.
        sampling_logprobs_T: [T] nats, as returned with the sample.
        loss_mask_T: [T] bool.
        clip_nats: c; None for no clip.
        missing: what a token without an answer gets.

    Returns:
        The advantages in nats, float64, and counts over the trained tokens.

    Raises:
        LossInputError: if shapes differ or a trained token's sampling value is not finite.
        LossConfigError: if ``clip_nats`` is not positive or ``missing`` is unknown.
    """
    require_clip(clip_nats)
    if missing not in ("no_signal", "zero_nats"):
        message = f"missing: {missing!r}; expected one of ['no_signal', 'zero_nats']"
        raise LossConfigError(message)
    teacher_T = aligned.teacher_logprobs_T
    require_shape("sampling_logprobs_T", sampling_logprobs_T, tuple(teacher_T.shape))
    require_shape("loss_mask_T", loss_mask_T, tuple(teacher_T.shape))
    require_finite("sampling_logprobs_T", sampling_logprobs_T, loss_mask_T)
    absent_T = torch.isnan(teacher_T)
    if missing == "zero_nats":
        answered_T = absent_T.clone()
        answered_T[len(teacher_T) - aligned.beyond_context :] = False
        teacher_T = torch.where(answered_T, torch.zeros_like(teacher_T), teacher_T)
    usable_T = loss_mask_T & ~torch.isnan(teacher_T)
    zeros_T = torch.zeros_like(teacher_T)
    difference_T = torch.where(usable_T, teacher_T, zeros_T) - torch.where(
        usable_T, sampling_logprobs_T.to(torch.float64), zeros_T
    )
    clipped_T = difference_T
    if clip_nats is not None:
        clipped_T = difference_T.clamp(min=-clip_nats, max=clip_nats)
    return TokenAdvantages(
        clipped_T,
        missing_tokens=int((loss_mask_T & absent_T).sum()),
        clipped_tokens=int((clipped_T != difference_T).sum()),
    )


def sequence_advantages(advantages_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    """Replace token advantages by their mean over the trained tokens, on those tokens.

    Sequence-level SDPO. Without a trained token the result is 0 everywhere.

    Sources:
        arXiv:2601.20802, section 4.2.
    """
    require_shape("loss_mask_T", loss_mask_T, tuple(advantages_T.shape))
    zeros_T = torch.zeros_like(advantages_T)
    count = int(loss_mask_T.sum())
    if count == 0:
        return zeros_T
    mean = torch.where(loss_mask_T, advantages_T, zeros_T).sum() / count
    return torch.where(loss_mask_T, mean.expand_as(advantages_T), zeros_T)


def hybrid_advantages(grpo_T: Tensor, sdpo_T: Tensor, *, weight_grpo: float) -> Tensor:
    """Return ``weight * grpo + (1 - weight) * sdpo``: the weight is GRPO's share.

    Args:
        grpo_T: [T] group-relative advantages, broadcast over the trained tokens.
        sdpo_T: [T] SDPO advantages, already clipped.
        weight_grpo: the paper's lambda, in [0, 1].

    Raises:
        LossConfigError: if the weight is outside [0, 1].
        LossInputError: if the shapes differ.

    Sources:
        arXiv:2601.20802, eq. 3.
    """
    if not 0.0 <= weight_grpo <= 1.0:
        message = f"weight_grpo: {weight_grpo}; expected a number in [0, 1]"
        raise LossConfigError(message)
    require_shape("sdpo_T", sdpo_T, tuple(grpo_T.shape))
    return weight_grpo * grpo_T + (1.0 - weight_grpo) * sdpo_T


SDPO_KINDS = ("sdpo_token", "sdpo_sequence", "sdpo_hybrid")


def registered_sdpo_advantages(
    config: Mapping[str, Any],
    aligned: AlignedTeacher,
    sampling_logprobs_T: Tensor,
    loss_mask_T: Tensor,
    *,
    group_advantage: float | None = None,
) -> TokenAdvantages:
    """Return the advantages of one trajectory as the execution file registers them.

    ``sdpo_token`` clips teacher - sampling token by token. ``sdpo_sequence`` averages the unclipped
    differences of the trajectory and clips the average. ``sdpo_hybrid`` mixes ``sdpo_token`` with
    the trajectory's group advantage; ``grpo_weight`` is the group advantage's share. A token without
    a teacher value has no signal.

    Args:
        config: the ``advantage`` block: ``kind``, ``clip`` (null for none), ``grpo_weight``.
        aligned: the teacher at the targets' positions.
        sampling_logprobs_T: [T] nats.
        loss_mask_T: [T] bool.
        group_advantage: reward minus the group's mean, for ``sdpo_hybrid``.

    Returns:
        [T] float64 advantages, exactly 0 off the mask, and counts over the trained tokens.

    Raises:
        LossConfigError: names the field, its value and what is allowed.
        LossInputError: if shapes differ, a number is not finite or the group advantage is missing.
    """
    kind = config.get("kind")
    if kind not in SDPO_KINDS:
        message = f"advantage.kind: {kind!r}; expected one of {list(SDPO_KINDS)}"
        raise LossConfigError(message)
    if "clip" not in config:
        message = "advantage.clip: missing; expected a number of nats > 0 or null"
        raise LossConfigError(message)
    clip = config["clip"]
    require_clip(clip)
    per_token = token_advantages(
        aligned,
        sampling_logprobs_T,
        loss_mask_T,
        clip_nats=None if kind == "sdpo_sequence" else clip,
        missing="no_signal",
    )
    if kind == "sdpo_sequence":
        return averaged(per_token, loss_mask_T, clip_nats=clip)
    if kind == "sdpo_hybrid":
        weight = float(config.get("grpo_weight", float("nan")))
        return mixed(per_token, loss_mask_T, group_advantage=group_advantage, weight_grpo=weight)
    return per_token


def averaged(
    per_token: TokenAdvantages, loss_mask_T: Tensor, *, clip_nats: float | None
) -> TokenAdvantages:
    """Average unclipped token advantages over a trajectory and clip the average."""
    mean_T = sequence_advantages(per_token.advantages_T, loss_mask_T)
    bounded_T = mean_T if clip_nats is None else mean_T.clamp(min=-clip_nats, max=clip_nats)
    clipped = int((bounded_T != mean_T).sum())
    return TokenAdvantages(bounded_T, per_token.missing_tokens, clipped)


def mixed(
    per_token: TokenAdvantages,
    loss_mask_T: Tensor,
    *,
    group_advantage: float | None,
    weight_grpo: float,
) -> TokenAdvantages:
    """Mix token advantages with the trajectory's group advantage on its trained tokens.

    Raises:
        LossInputError: if there is no group advantage.
        LossConfigError: if the weight is outside [0, 1].
    """
    if group_advantage is None:
        message = "group_advantage: None; expected a number, needed by 'sdpo_hybrid'"
        raise LossInputError(message)
    zeros_T = torch.zeros_like(per_token.advantages_T)
    group_T = torch.where(loss_mask_T, torch.full_like(zeros_T, group_advantage), zeros_T)
    mixed_T = hybrid_advantages(group_T, per_token.advantages_T, weight_grpo=weight_grpo)
    return per_token._replace(advantages_T=mixed_T)
