"""From table rows to what the service is sent, and back: the only place that knows the wire keys.

A sequence of L tokens becomes L - 1 targets: the input is all tokens but the last, the targets are
all but the first, and every per-token array drops its first element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tinker
import torch
from numpy.typing import NDArray

from losses.inputs import LossInputs

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Support:
    """The K tokens at each position of a sequence that a logit-level loss compares.

    Attributes:
        tokens: [L, K] token ids; any valid id where the position is not trained.
        teacher_logprobs: [L, K] nats of the teacher; 0 where the position is not trained.
    """

    tokens: NDArray[np.int64]
    teacher_logprobs: Floats


@dataclass(frozen=True, slots=True)
class TrainedSequence:
    """One stored sequence of L tokens, as an update uses it.

    Attributes:
        group: its group within the rollout step.
        sample: its place within the group.
        tokens: [L] token ids.
        loss_mask: [L] bool; sampled by the policy and trained.
        sampling_logprobs: [L] nats, 0 off the mask; as returned with the sample.
        advantages: [L] advantage of each token, 0 off the mask.
        teacher_logprobs: [L] nats of a teacher, NaN where there is none; None without a teacher.
        support: what a logit-level loss compares; None for every other loss.
    """

    group: int
    sample: int
    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    sampling_logprobs: Floats
    advantages: Floats
    teacher_logprobs: Floats | None = None
    support: Support | None = None

    @property
    def targets(self) -> NDArray[np.int64]:
        """[L - 1] target tokens."""
        return self.tokens[1:]

    @property
    def loss_tokens(self) -> int:
        """How many targets are trained on."""
        return int(self.loss_mask[1:].sum())


def sequences_of(table: Any) -> list[TrainedSequence]:
    """Cut the Arrow table `tokens` of one rollout step into its sequences, in key order."""
    columns = {
        name: table.column(name).combine_chunks()
        for name in (
            *("group", "sample", "position", "token_id"),
            *("loss_mask", "sampling_logprob", "advantage"),
        )
    }
    group, sample = (columns[name].to_numpy() for name in ("group", "sample"))
    if not len(group):
        return []
    starts = np.flatnonzero(np.r_[True, (np.diff(group) != 0) | (np.diff(sample) != 0)])
    arrays = {
        "tokens": columns["token_id"].to_numpy().astype(np.int64),
        "loss_mask": columns["loss_mask"].to_numpy(zero_copy_only=False).astype(bool),
        "sampling_logprobs": _floats(columns["sampling_logprob"]),
        "advantages": _floats(columns["advantage"]),
    }
    ends = [*starts[1:], len(group)]
    return [
        TrainedSequence(
            group=int(group[start]),
            sample=int(sample[start]),
            **{name: array[start:end] for name, array in arrays.items()},
        )
        for start, end in zip(starts, ends, strict=True)
    ]


def with_teacher(sequences: Sequence[TrainedSequence], rescored: Any) -> list[TrainedSequence]:
    """Give sequences the advantages and the teacher that the Arrow table `rescoring` holds.

    Args:
        sequences: of one rollout step, in key order.
        rescored: the table of that step: one row for every trained token of every sequence.

    Raises:
        ValueError: if the rows are not those tokens.
    """
    columns = {
        name: rescored.column(name).combine_chunks().to_numpy()
        for name in ("group", "sample", "position", "advantage", "teacher_logprob")
    }
    found, start = [], 0
    for sequence in sequences:
        positions = np.flatnonzero(sequence.loss_mask)
        rows = slice(start, start + len(positions))
        start = rows.stop
        ours = (columns["group"][rows] == sequence.group) & (
            columns["sample"][rows] == sequence.sample
        )
        if not np.array_equal(columns["position"][rows], positions) or not ours.all():
            raise ValueError(
                f"rescoring of group {sequence.group}, sample {sequence.sample}: other tokens than "
                "the trained ones"
            )
        advantages = np.zeros(len(sequence.tokens))
        teacher = np.full(len(sequence.tokens), np.nan)
        advantages[positions] = columns["advantage"][rows]
        teacher[positions] = columns["teacher_logprob"][rows]
        found.append(replace(sequence, advantages=advantages, teacher_logprobs=teacher))
    if start != rescored.num_rows:
        raise ValueError(f"rescoring has {rescored.num_rows} rows, {start} tokens are trained")
    return found


def with_support(
    sequences: Sequence[TrainedSequence], supports: Any, *, top_k: int
) -> list[TrainedSequence]:
    """Give sequences the tokens that the Arrow table `supports` holds for them.

    Args:
        sequences: of one rollout step, in key order, with their teacher.
        supports: the table of that step: `top_k` rows for every position that the teacher scored.
        top_k: tokens a position.

    Raises:
        ValueError: if the rows are not those positions.
    """
    columns = {
        name: supports.column(name).combine_chunks().to_numpy().reshape(-1, top_k)
        for name in ("group", "sample", "position", "token_id", "teacher_logprob")
    }
    found, start = [], 0
    for sequence in sequences:
        positions = scored_positions(sequence)
        rows = slice(start, start + len(positions))
        start = rows.stop
        ours = (columns["group"][rows, 0] == sequence.group) & (
            columns["sample"][rows, 0] == sequence.sample
        )
        if not np.array_equal(columns["position"][rows, 0], positions) or not ours.all():
            raise ValueError(f"supports of group {sequence.group}, sample {sequence.sample}")
        support = empty_support(sequence, top_k=top_k)
        support.tokens[positions] = columns["token_id"][rows]
        support.teacher_logprobs[positions] = columns["teacher_logprob"][rows]
        found.append(replace(sequence, support=support))
    return found


def scored_positions(sequence: TrainedSequence) -> NDArray[np.int64]:
    """Positions of the trained tokens that the teacher has a value for."""
    if sequence.teacher_logprobs is None:
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(sequence.loss_mask & np.isfinite(sequence.teacher_logprobs))


def empty_support(sequence: TrainedSequence, *, top_k: int) -> Support:
    """A support without anything to compare: each position's own token, K times."""
    tokens = np.repeat(sequence.tokens[:, None], top_k, axis=1)
    return Support(tokens, np.zeros(tokens.shape))


def _floats(column: Any) -> Floats:
    """A nullable column as float64, 0 where it is null."""
    return np.asarray(column.fill_null(0.0).to_numpy(zero_copy_only=False), dtype=np.float64)


def datum_of(sequence: TrainedSequence) -> tinker.Datum:
    """What `forward` and `forward_backward_custom` are sent for a sequence.

    With a support the targets are [L - 1, K + 1]: its tokens, then the sampled one.
    """
    return _datum(sequence, {})


def builtin_datum_of(sequence: TrainedSequence) -> tinker.Datum:
    """What the built-in policy losses are sent; tokens off the mask have advantage 0."""
    mask = sequence.loss_mask[1:]
    return _datum(
        sequence,
        {
            "logprobs": np.where(mask, sequence.sampling_logprobs[1:], 0.0).astype(np.float32),
            "advantages": np.where(mask, sequence.advantages[1:], 0.0).astype(np.float32),
        },
    )


def supervised_datum_of(sequence: TrainedSequence) -> tinker.Datum:
    """What the built-in cross-entropy is sent: weight 1 on the mask, 0 elsewhere."""
    return _datum(sequence, {"weights": sequence.loss_mask[1:].astype(np.float32)})


def _datum(sequence: TrainedSequence, extra: dict[str, NDArray[np.float32]]) -> tinker.Datum:
    targets = sequence.targets
    if sequence.support is not None:
        targets = np.concatenate([sequence.support.tokens[1:], targets[:, None]], axis=1)
    inputs: dict[str, Any] = {"target_tokens": torch.from_numpy(targets.copy())}
    inputs |= {name: torch.from_numpy(values) for name, values in extra.items()}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(sequence.tokens[:-1].tolist()),
        loss_fn_inputs=inputs,
    )


def loss_inputs_of(
    sequence: TrainedSequence,
    anchor_logprobs: Floats | None = None,
    *,
    reads_teacher: bool = False,
) -> LossInputs:
    """What a loss is given for the L - 1 targets of a sequence, in float64.

    A loss that reads the teacher leaves out the tokens that the teacher has no value for.
    """
    mask, teacher = sequence.loss_mask[1:].copy(), None
    if reads_teacher and sequence.teacher_logprobs is not None:
        teacher = sequence.teacher_logprobs[1:]
        mask &= np.isfinite(teacher)
        teacher = np.where(mask, teacher, 0.0)
    return LossInputs(
        sampling_logprobs_T=_tensor(sequence.sampling_logprobs[1:]),
        advantages_T=_tensor(sequence.advantages[1:]),
        loss_mask_T=torch.from_numpy(mask),
        anchor_logprobs_T=None if anchor_logprobs is None else _tensor(anchor_logprobs),
        teacher_logprobs_T=None if teacher is None else _tensor(teacher),
        teacher_logprobs_TK=(
            _tensor(sequence.support.teacher_logprobs[1:])
            if reads_teacher and sequence.support is not None
            else None
        ),
    )


def _tensor(values: Floats) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float64))


def minibatch_of(
    sequences: Sequence[TrainedSequence], *, groups: int, minibatches: int, index: int
) -> list[TrainedSequence]:
    """The sequences of one of `minibatches` disjoint parts of complete groups.

    Groups keep their order: part i holds groups i * groups / minibatches and those after it.
    """
    size = groups // minibatches
    return [
        sequence for sequence in sequences if index * size <= sequence.group < (index + 1) * size
    ]
