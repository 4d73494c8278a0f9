"""Tables: checked before they are written, the same bytes for the same rows, never changed."""

import dataclasses
import hashlib
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evidence import tables
from evidence.errors import ConflictError, InputError

KEY = ("grpo", "train", 0)


def test_table_digest_does_not_depend_on_row_order(run, make_run, rollout_row, tmp_path):
    """The same rows in any order give the same path, SHA-256 and bytes."""
    rows = [rollout_row(group=g, sample=s, reward=g / 3) for g in range(4) for s in range(4)]
    shuffled = rows.copy()
    random.Random(0).shuffle(shuffled)
    other = make_run(root=tmp_path / "other")

    ref = run.write_table("rollouts", rows, key=KEY)
    again = other.write_table("rollouts", shuffled, key=KEY)

    assert ref == again
    assert ref.path == "tables/rollouts/grpo/train/000000.parquet"
    assert ref.rows == 16
    assert ref.sha256 == hashlib.sha256(Path(run.path, ref.path).read_bytes()).hexdigest()
    assert [(r["group"], r["sample"]) for r in run.read_table("rollouts", key=KEY)] == [
        (g, s) for g in range(4) for s in range(4)
    ]


def test_table_of_the_same_rows_changes_nothing(run, rollout_row):
    first = run.write_table("rollouts", [rollout_row()], key=KEY)
    inode = Path(run.path, first.path).stat().st_ino

    assert run.write_table("rollouts", [rollout_row()], key=KEY) == first
    assert Path(run.path, first.path).stat().st_ino == inode


def test_table_of_other_rows_is_a_conflict(run, rollout_row):
    """Other rows under a written key are refused, and the message says what differs."""
    run.write_table("rollouts", [rollout_row(reward=1.0)], key=KEY)

    with pytest.raises(ConflictError, match="row 0 column reward"):
        run.write_table("rollouts", [rollout_row(reward=0.5)], key=KEY)

    assert run.read_table("rollouts", key=KEY)[0]["reward"] == 1.0


def test_table_reads_back_as_written(run, rollout_row):
    """Every value comes back with its type; absent nullable columns are null."""
    row = rollout_row(reward=-0.0, seed=2**63 - 1, completion_text="a\nb")
    run.write_table("rollouts", [row], key=KEY)

    (read,) = run.read_table("rollouts", key=KEY)

    assert read == {"arm": "grpo", "phase": "train", "step": 0, **row}
    assert str(read["reward"]) == "-0.0"


@pytest.mark.parametrize("text", ["\ud83d", "a\x00b", "\u241b", "x" * 10_000_000, "<script>|`"])
def test_text_of_any_kind_comes_back(run, rollout_row, text):
    run.write_table("rollouts", [rollout_row(completion_text=text)], key=KEY)

    assert run.read_table("rollouts", key=KEY)[0]["completion_text"] == text


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"reward": None}, r"rollouts\[0\].reward: expected float64, not null, found None"),
        ({"reward": float("nan")}, r"rollouts\[0\].reward: expected a finite number, found nan"),
        ({"reward": float("-inf")}, r"rollouts\[0\].reward: expected a finite number"),
        ({"reward": "1"}, r"rollouts\[0\].reward: expected float64"),
        ({"reward": True}, r"rollouts\[0\].reward: expected float64"),
        ({"reward": 10**400}, r"rollouts\[0\].reward: expected"),
        ({"seed": 2**63}, r"rollouts\[0\].seed: expected int64"),
        ({"seed": 1.0}, r"rollouts\[0\].seed: expected int64"),
        ({"seed": True}, r"rollouts\[0\].seed: expected int64"),
        ({"truncated": 1}, r"rollouts\[0\].truncated: expected bool"),
        ({"item_id": 3}, r"rollouts\[0\].item_id: expected string"),
        ({"phase": "eval"}, r"rollouts\[0\].phase: expected 'train', as in the key"),
        ({"phase": "test"}, r"rollouts\[0\].phase: expected one of probe"),
        ({"colour": "red"}, r"rollouts\[0\].colour: expected no column of that name"),
    ],
)
def test_row_that_does_not_fit_is_refused(run, rollout_row, over, named):
    """The error names table, row, column and value; nothing is written."""
    with pytest.raises(InputError, match=named):
        run.write_table("rollouts", [rollout_row(**over)], key=KEY)

    assert not run.has_table("rollouts", key=KEY)


def test_row_without_a_required_column_is_refused(run, rollout_row):
    row = rollout_row()
    del row["reward"]

    with pytest.raises(InputError, match=r"rollouts.reward: expected a float64"):
        run.write_table("rollouts", [row], key=KEY)


def test_null_in_the_second_row_is_named(run, rollout_row):
    rows = [rollout_row(), rollout_row(sample=1, advantage=None)]

    with pytest.raises(InputError, match=r"rollouts\[1\].advantage"):
        run.write_table("rollouts", rows, key=KEY)


def test_key_that_occurs_twice_is_refused(run, rollout_row):
    rows = [rollout_row(sample=1), rollout_row(sample=0), rollout_row(sample=1, reward=0.0)]

    with pytest.raises(InputError, match="group 0, sample 1 twice"):
        run.write_table("rollouts", rows, key=KEY)


def test_unknown_phase_in_the_key_is_refused(run, rollout_row):
    with pytest.raises(InputError, match="one of probe, preflight, pilot, calibration-1"):
        run.write_table("rollouts", [rollout_row()], key=("grpo", "test", 0))


@pytest.mark.parametrize("key", [(), ("grpo", "train"), ("grpo", "train", 0, 0)])
def test_key_of_another_length_is_refused(run, rollout_row, key):
    with pytest.raises(InputError, match="one value for each of arm, phase, step"):
        run.write_table("rollouts", [rollout_row()], key=key)


@pytest.mark.parametrize("arm", ["../up", "a/b", "..", ".hidden", "1", "ärm", "C:\\x", "\ud83d"])
def test_arm_name_cannot_leave_the_directory(run, rollout_row, arm):
    """Any arm name is a plain file name, comes back as it was, and leaves nothing outside."""
    ref = run.write_table("rollouts", [rollout_row()], key=(arm, "train", 0))

    assert ref.path.count("/") == 4
    assert ".." not in ref.path
    assert run.keys("rollouts") == [(arm, "train", 0)]
    assert run.read_table("rollouts", key=(arm, "train", 0))[0]["arm"] == arm


@pytest.mark.parametrize("arm", ["", "x" * 300])
def test_arm_name_that_is_no_file_name_is_refused(run, rollout_row, arm):
    with pytest.raises(InputError, match=r"rollouts.arm"):
        run.write_table("rollouts", [rollout_row()], key=(arm, "train", 0))


def _token_columns(count):
    mask = np.arange(count) % 2 == 0
    return {
        "group": np.zeros(count, dtype=np.int64),
        "sample": np.zeros(count, dtype=np.int32),
        "position": np.arange(count),
        "turn": np.zeros(count, dtype=np.int64),
        "token_id": np.arange(count) + 5,
        "loss_mask": mask,
        "sampling_logprob": np.ma.array(np.full(count, -0.1, dtype=np.float32), mask=~mask),
    }


def test_columns_and_rows_give_the_same_bytes(run, make_run, tmp_path):
    """The columnar form is the same table as a list of rows."""
    columns = _token_columns(5)
    rows = [
        {
            "group": 0,
            "sample": 0,
            "position": position,
            "turn": 0,
            "token_id": position + 5,
            "loss_mask": position % 2 == 0,
            "sampling_logprob": float(np.float32(-0.1)) if position % 2 == 0 else None,
        }
        for position in range(5)
    ]

    one = run.write_table("tokens", columns, key=KEY)
    other = make_run(root=tmp_path / "other").write_table("tokens", rows, key=KEY)

    assert one == other


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"token_id": np.array([1.0, 2.0])}, "one dimension of int64"),
        ({"token_id": np.array([2**63, 1], dtype=np.uint64)}, r"below 2\*\*63"),
        ({"loss_mask": np.array([1, 0])}, "one dimension of bool"),
        ({"token_id": np.zeros((2, 2), dtype=np.int64)}, "one dimension of int64"),
        ({"token_id": np.array([1])}, "2 values"),
        ({"advantage": np.array([1e39, 0.0])}, r"tokens\[0\].advantage: .* fits 32 bits"),
        ({"advantage": [0.0, 1e39]}, r"tokens\[1\].advantage: .* fits 32 bits"),
        ({"advantage": np.array([np.nan, 0.0])}, r"tokens\[0\].advantage: .* finite"),
        ({"nothing": np.array([1, 2])}, "a column of table tokens"),
    ],
)
def test_columns_that_do_not_fit_are_refused(run, over, named):
    with pytest.raises(InputError, match=named):
        run.write_table("tokens", {**_token_columns(2), **over}, key=KEY)

    assert not run.has_table("tokens", key=KEY)


def test_logprob_may_be_infinite_where_declared(run):
    """-inf under the mask and NaN are stored as they are."""
    columns = _token_columns(2)
    columns["sampling_logprob"] = [float("-inf"), float("nan")]
    run.write_table("tokens", columns, key=KEY)

    first, second = run.read_table("tokens", key=KEY)

    assert first["sampling_logprob"] == float("-inf")
    assert second["sampling_logprob"] != second["sampling_logprob"]


def test_nan_rows_written_again_are_no_conflict(run):
    columns = {**_token_columns(1), "sampling_logprob": [float("nan")]}

    assert run.write_table("tokens", columns, key=KEY) == run.write_table(
        "tokens", columns, key=KEY
    )


def test_all_null_step_has_the_declared_types(run, rollout_row):
    """A step whose optional columns are all null fits the next one that has values."""
    run.write_table("rollouts", [rollout_row()], key=("grpo", "train", 0))
    row = rollout_row(native_reward=0.5, info_json="{}")
    run.write_table("rollouts", [row], key=("grpo", "train", 1))

    table = run.read_all("rollouts")

    assert table.column("native_reward").to_pylist() == [None, 0.5]
    assert str(table.schema.field("native_reward").type) == "double"
    assert str(table.schema.field("info_json").type) == "large_string"


def test_empty_table_is_a_table(run):
    ref = run.write_table("tokens", [], key=KEY)

    assert ref.rows == 0
    assert run.has_table("tokens", key=KEY)
    assert run.read_table("tokens", key=KEY) == []


def test_read_all_is_in_numeric_order_and_takes_a_prefix(run, rollout_row):
    for arm in ("grpo", "dppo"):
        for step in (10, 9, 2):
            run.write_table("rollouts", [rollout_row()], key=(arm, "train", step))

    table = run.read_all("rollouts", prefix=("grpo",))

    assert table.column("step").to_pylist() == [2, 9, 10]
    assert run.keys("rollouts", prefix=("dppo", "train"))[0] == ("dppo", "train", 2)
    assert run.read_all("updates").num_rows == 0


def test_table_of_another_version_is_refused(run, rollout_row):
    """A file whose schema is not the declared one is an error, never half understood."""
    ref = run.write_table("rollouts", [rollout_row()], key=KEY)
    tokens = run.write_table("tokens", _token_columns(1), key=KEY)
    place = Path(run.path, ref.path)
    place.write_bytes(Path(run.path, tokens.path).read_bytes())

    with pytest.raises(InputError, match="columns of table rollouts version 1"):
        run.read_table("rollouts", key=KEY)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_short_file_is_refused(run, rollout_row, keep):
    ref = run.write_table("rollouts", [rollout_row()], key=KEY)
    place = Path(run.path, ref.path)
    place.write_bytes(place.read_bytes()[:keep])

    with pytest.raises(InputError, match="a whole Parquet file"):
        run.read_table("rollouts", key=KEY)


def test_content_digests_leave_journals_out(run, rollout_row):
    ref = run.write_table("rollouts", [rollout_row()], key=KEY)
    run.write_table(
        "timings", [{"what": "sampling", "seconds": 1.5, "units": 1, "samples": 8}], key=(1, *KEY)
    )

    assert run.content_digests() == {ref.path: ref.sha256}


def test_part_holds_a_group_until_the_step_is_complete(run, rollout_row):
    """Finished groups are found again, and the step's tables are assembled from them."""
    for group in (1, 0):
        rows = [rollout_row(group=group, sample=sample) for sample in (0, 1)]
        tokens = {**_token_columns(3), "group": np.full(3, group)}
        run.write_part("grpo", "train", 0, group, {"rollouts": rows, "tokens": tokens})

    assert run.parts("grpo", "train", 0) == [0, 1]
    assert run.parts("dppo", "train", 0) == []

    refs = run.assemble_parts("grpo", "train", 0, [0, 1])

    assert refs["rollouts"].rows == 4
    assert refs["tokens"].rows == 6
    direct = run.read_table("rollouts", key=KEY)
    assert [(row["group"], row["sample"]) for row in direct] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_tables_that_parts_name_and_that_are_missing_are_known(run, rollout_row):
    """Only one of the two groups has tokens."""
    tokens = {**_token_columns(3), "group": np.full(3, 1)}
    run.write_part("grpo", "train", 0, 0, {"rollouts": [rollout_row()]})
    run.write_part("grpo", "train", 0, 1, {"rollouts": [rollout_row(group=1)], "tokens": tokens})
    assert run.unassembled("grpo", "train", 0) == ["rollouts", "tokens"]
    assert run.unassembled("grpo", "train", 1) == []

    run.write_table("rollouts", [rollout_row(), rollout_row(group=1)], key=KEY)

    assert run.unassembled("grpo", "train", 0) == ["tokens"]
    run.assemble_parts("grpo", "train", 0, [0, 1])
    assert run.unassembled("grpo", "train", 0) == []


def test_part_of_an_evaluation_goes_by_its_label(run):
    row = {
        "policy_version": 0,
        "item_id": "i0",
        "metric": "accuracy",
        "seed": 0,
        "value": 1.0,
        "prediction": "\ud83d",
        "stop_reason": "stop",
        "evaluator_id": "e" * 64,
    }
    run.write_part("base", "eval", "final", 3, {"evaluations": [row]})

    tables = run.read_part("base", "eval", "final", 3)

    assert tables["evaluations"].column("label").to_pylist() == ["final"]
    assert run.parts("base", "eval", "final") == [3]


def test_part_with_a_bad_row_is_not_written(run, rollout_row):
    with pytest.raises(InputError, match="reward"):
        run.write_part("grpo", "train", 0, 0, {"rollouts": [rollout_row(reward=None)]})

    assert run.parts("grpo", "train", 0) == []


def test_other_part_of_the_same_group_is_a_conflict(run, rollout_row):
    run.write_part("grpo", "train", 0, 0, {"rollouts": [rollout_row()]})

    with pytest.raises(ConflictError, match=r"parts/grpo/train/000000/000000\.zip"):
        run.write_part("grpo", "train", 0, 0, {"rollouts": [rollout_row(reward=0.0)]})


def test_unknown_table_is_named(run):
    with pytest.raises(InputError, match="one of rollouts, tokens"):
        run.write_table("completions", [])


def test_reference_of_a_written_table(run, rollout_row):
    ref = run.write_table("rollouts", [rollout_row()], key=KEY)

    assert run.table_ref("rollouts", key=KEY) == ref
    assert ref.to_record() == {"path": ref.path, "sha256": ref.sha256, "rows": 1}


def test_table_of_a_newer_version_is_refused(run, rollout_row, monkeypatch):
    """A file written by a later program says so, instead of being half understood."""
    newer = dataclasses.replace(tables.ROLLOUTS, version=2)
    monkeypatch.setattr(tables, "TABLES", {"rollouts": newer})
    run.write_table("rollouts", [rollout_row()], key=KEY)
    monkeypatch.undo()

    with pytest.raises(InputError, match=r"version: expected version 1 of table rollouts"):
        run.read_table("rollouts", key=KEY)


def test_more_rows_under_a_written_key_are_a_conflict(run, rollout_row):
    run.write_table("rollouts", [rollout_row()], key=KEY)

    with pytest.raises(ConflictError, match="2 rows for 1"):
        run.write_table("rollouts", [rollout_row(), rollout_row(sample=1)], key=KEY)


def test_same_rows_in_other_bytes_are_no_conflict(run, rollout_row):
    """Another Parquet library writes the same rows with other bytes; that is still a no-op."""
    ref = run.write_table("rollouts", [rollout_row(native_reward=0.5)], key=KEY)
    place = Path(run.path, ref.path)
    table = run.read_arrow("rollouts", key=KEY)
    pq.write_table(table, place, compression="none")

    again = run.write_table("rollouts", [rollout_row(native_reward=0.5)], key=KEY)

    assert again.sha256 == hashlib.sha256(place.read_bytes()).hexdigest() != ref.sha256


def test_second_row_of_a_single_row_file_is_refused(run):
    row = {"step": 0, "epoch": 0, "minibatch": 0, "policy_version_before": 0, "datums": 1}
    row |= {"loss": 0.0, "loss_tokens": 1, "nonzero_advantage_tokens": 1}
    row |= {"denominator": 1.0, "learning_rate": 1e-4}

    with pytest.raises(InputError, match="one row for this key"):
        run.write_table("updates", [row, row], key=KEY)


def test_numpy_scalars_and_arrow_columns_are_taken(run, rollout_row):
    row = rollout_row(seed=np.int64(7), reward=np.float32(0.5), truncated=np.bool_(False))
    run.write_table("rollouts", [row], key=KEY)
    columns = {**_token_columns(2), "token_id": pa.array([1, 2], type=pa.int64())}
    run.write_table("tokens", columns, key=KEY)

    assert run.read_table("rollouts", key=KEY)[0]["reward"] == 0.5
    assert [row["token_id"] for row in run.read_table("tokens", key=KEY)] == [1, 2]


@pytest.mark.parametrize(
    ("column", "named"),
    [
        (pa.array([1.0, 2.0]), "an Arrow column of type int64"),
        (pa.array([1, None], type=pa.int64()), r"tokens\[1\].token_id: expected int64, not null"),
        (np.ma.array([1, 2], mask=[False, True]), r"tokens\[1\].token_id: expected int64"),
    ],
)
def test_arrow_column_that_does_not_fit_is_refused(run, column, named):
    with pytest.raises(InputError, match=named):
        run.write_table("tokens", {**_token_columns(2), "token_id": column}, key=KEY)
