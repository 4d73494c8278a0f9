"""A frozen batch: digests of everything that an update is given, and the check before every reuse.

Works on the stored table alone, with neither a service nor its client library, so that the same
check runs during a diagnostic and in an investigation years later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evidence.canonical import sha256_hex
from evidence.errors import ConflictError, InputError
from evidence.run import Run
from tasks.recomputed import read_recomputed

FILE = "frozen-batch.json"
PATH = f"files/{FILE}"
RECOMPUTED = "recomputed_logprobs"
_ARRAYS = {
    "layout": (("group", "<i8"), ("sample", "<i8"), ("position", "<i8")),
    "tokens": (("token_id", "<i8"),),
    "sampling_logprobs": (("sampling_logprob", "<f4"),),
    "advantages": (("advantage", "<f4"),),
    "masks": (("loss_mask", "|u1"),),
}


def frozen_digests(table: Any) -> dict[str, str]:
    """SHA-256 of each array of the Arrow table `tokens`, in key order, little-endian.

    A value that is null (off the mask) counts as 0; whether it is on the mask is in ``masks``.
    """
    found = {}
    for name, columns in _ARRAYS.items():
        parts = [_array(table, column, dtype).tobytes() for column, dtype in columns]
        found[name] = sha256_hex(b"".join(parts))
    return found


def _array(table: Any, column: str, dtype: str) -> NDArray[Any]:
    values = table.column(column).combine_chunks()
    if values.null_count:
        values = values.fill_null(0.0)
    return np.ascontiguousarray(values.to_numpy(zero_copy_only=False)).astype(dtype)


def _digests_of(run: Run, key: tuple[str, str, int]) -> dict[str, str]:
    """Digests of the batch at a key: its table's arrays, and its recomputed scores if there are any."""
    found = frozen_digests(run.read_arrow("tokens", key=key))
    scores = read_recomputed(run, *key)
    if scores is not None:
        found[RECOMPUTED] = sha256_hex(np.ascontiguousarray(scores).astype("<f4").tobytes())
    return found


def freeze(run: Run, *, arm: str, phase: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write the digests of a batch once, with facts about how it was sampled.

    Raises:
        ConflictError: if a batch with other digests was frozen before.
    """
    key = (arm, phase, 0)
    record = {
        "version": 1,
        "arm": arm,
        "phase": phase,
        "arrays": _digests_of(run, key),
        "tables": {name: run.table_ref(name, key=key).to_record() for name in _TABLES},
        **facts,
    }
    run.write_json(PATH, record)
    return record


_TABLES = ("tokens", "rollouts")


def frozen(run: Run) -> dict[str, Any] | None:
    """The frozen batch's record, None where none was frozen."""
    return dict(run.read_json(PATH)) if run.store.exists(PATH) else None


def assert_frozen(run: Run) -> None:
    """Compare the stored batch with its digests.

    Raises:
        InputError: if nothing was frozen.
        ConflictError: naming the first array or table that is not what it was.
    """
    record = frozen(run)
    if record is None:
        raise InputError(PATH, None, "a frozen batch", where=run.path)
    key = (record["arm"], record["phase"], 0)
    now = _digests_of(run, key)
    for name, expected in record["arrays"].items():
        if now.get(name) != expected:
            wanted = f"{expected}, as frozen before the first update"
            raise ConflictError(f"frozen batch {name}", now.get(name), wanted, where=run.path)
    for name, reference in record["tables"].items():
        actual = run.table_ref(name, key=key).sha256
        if actual != reference["sha256"]:
            wanted = f"{reference['sha256']}, as frozen before the first update"
            raise ConflictError(f"frozen table {name}", actual, wanted, where=run.path)
