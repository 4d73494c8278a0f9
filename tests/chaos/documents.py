"""The runs that are put through chaos: the shipped spec `tiny`, and one with two epochs."""

from __future__ import annotations

import copy
from typing import Any

from evidence.canonical import digest, loads_strict
from flows.catalog import find_spec

Document = dict[str, Any]


def tiny() -> tuple[Document, Document]:
    """The shipped spec with its execution file: two minibatches, one epoch."""
    files = find_spec("tiny")
    if files.execution is None:
        raise RuntimeError("the spec tiny has no execution file")
    return (
        loads_strict(files.spec.read_bytes(), where="tiny"),
        loads_strict(files.execution.read_bytes(), where="tiny"),
    )


def two_epochs() -> tuple[Document, Document]:
    """The same with each batch used twice: four updates a step."""
    spec, execution = (copy.deepcopy(document) for document in tiny())
    execution["rollout"]["epochs"] = 2
    spec["steps"] *= 2
    for arm in spec["arms"]:
        arm["updates_per_batch"] *= 2
    for check in spec["activation_gate"]["checks"]:
        if check["metric"] == "executed_updates_per_batch":
            check |= {bound: 2 * check[bound] for bound in ("min", "max") if bound in check}
    execution["spec_sha256"] = digest(spec)
    return spec, execution
