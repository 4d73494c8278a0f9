"""Rows and datums say the same thing: one target less than tokens, masks where they belong."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tasks.datums import (
    TrainedSequence,
    builtin_datum_of,
    datum_of,
    loss_inputs_of,
    minibatch_of,
    sequences_of,
)


def _table() -> pa.Table:
    """Two sequences: prompt 7 8, sampled 9; prompt 7, sampled 5 6 with a tool token between."""
    rows = [
        # group, sample, position, token, mask, logprob, advantage
        (0, 0, 0, 7, False, None, None),
        (0, 0, 1, 8, False, None, None),
        (0, 0, 2, 9, True, -0.5, 1.0),
        (0, 1, 0, 7, False, None, None),
        (0, 1, 1, 5, True, -0.25, -1.0),
        (0, 1, 2, 4, False, None, None),
        (0, 1, 3, 6, True, -2.0, -1.0),
    ]
    names = (
        "group",
        "sample",
        "position",
        "token_id",
        "loss_mask",
        "sampling_logprob",
        "advantage",
    )
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    types = (pa.int64(),) * 4 + (pa.bool_(), pa.float32(), pa.float32())
    return pa.table(
        {name: pa.array(columns[name], type=kind) for name, kind in zip(names, types, strict=True)}
    )


def test_sequences_are_cut_where_the_key_changes() -> None:
    first, second = sequences_of(_table())

    assert first.tokens.tolist() == [7, 8, 9]
    assert second.tokens.tolist() == [7, 5, 4, 6]
    assert second.loss_mask.tolist() == [False, True, False, True]
    assert second.sampling_logprobs.tolist() == [0.0, -0.25, 0.0, -2.0]
    assert (first.loss_tokens, second.loss_tokens) == (1, 2)


def test_sequences_of_an_empty_table_are_none() -> None:
    assert sequences_of(_table().slice(0, 0)) == []


def test_datum_shifts_targets_by_one() -> None:
    datum = datum_of(sequences_of(_table())[1])

    assert datum.model_input.to_ints() == [7, 5, 4]
    assert list(datum.loss_fn_inputs) == ["target_tokens"]
    assert list(datum.loss_fn_inputs["target_tokens"].data) == [5, 4, 6]


def test_builtin_datum_has_no_advantage_off_the_mask() -> None:
    datum = builtin_datum_of(sequences_of(_table())[1])

    assert list(datum.loss_fn_inputs["advantages"].data) == [-1.0, 0.0, -1.0]
    assert list(datum.loss_fn_inputs["logprobs"].data) == [-0.25, 0.0, -2.0]


def test_loss_inputs_line_up_with_targets() -> None:
    inputs = loss_inputs_of(sequences_of(_table())[1])

    assert inputs.loss_mask_T.tolist() == [True, False, True]
    assert inputs.advantages_T.tolist() == [-1.0, 0.0, -1.0]
    assert inputs.sampling_logprobs_T.tolist() == [-0.25, 0.0, -2.0]


def _of_group(group: int, sample: int) -> TrainedSequence:
    empty = np.zeros(2)
    return TrainedSequence(group, sample, empty.astype(int), empty > 0, empty, empty)


def test_minibatches_are_disjoint_and_hold_complete_groups() -> None:
    """Six groups in three parts: 0 and 1, 2 and 3, 4 and 5."""
    everything = [_of_group(group, sample) for group in range(6) for sample in range(2)]

    parts = [minibatch_of(everything, groups=6, minibatches=3, index=index) for index in range(3)]

    assert [[one.group for one in part] for part in parts] == [
        [0, 0, 1, 1],
        [2, 2, 3, 3],
        [4, 4, 5, 5],
    ]
