"""The recorded updates of one arm in one phase, read back as arrays; no service, no client library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evidence.errors import InputError
from evidence.execution import ExecutionFile
from evidence.run import Run
from losses.replay import RecordedUpdate
from losses.token_arrays import TokenArrays
from tasks.recomputed import Recomputed

PHASES = ("diagnostic", "train", "pilot")
"""Where updates are looked for, the most telling first."""
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class StoredUpdate:
    """One update with its row, its token columns, and what a recomputed anchor compares with."""

    row: Mapping[str, Any]
    columns: Mapping[str, Array]
    anchor_logprobs_N: NDArray[np.float64] | None = None
    """[N] nats; None where the run kept none."""

    @property
    def update(self) -> int:
        """Its number in the phase."""
        return int(self.row["update"])

    @property
    def sequence_N(self) -> NDArray[np.int64]:
        """[N] which sequence each loss token belongs to."""
        size = int(self.columns["sample"].max(initial=0)) + 1
        found: NDArray[np.int64] = self.columns["group"] * size + self.columns["sample"]
        return found

    @property
    def tokens(self) -> TokenArrays:
        """The loss tokens as diagnostics read them."""
        return TokenArrays(
            target_logprobs_N=self.columns["target_logprob"].astype(np.float64),
            sampling_logprobs_N=self.columns["sampling_logprob"].astype(np.float64),
            advantages_N=self.columns["advantage"].astype(np.float64),
            keep_N=self.columns["keep"].astype(np.bool_),
            anchor_logprobs_N=self.anchor_logprobs_N,
        )

    def recorded(self) -> RecordedUpdate:
        """What the replay is given."""
        return RecordedUpdate(
            update=self.update,
            tokens=self.tokens,
            prob_ratio_N=self.columns["prob_ratio"].astype(np.float64),
            removed_N=self.columns["removed"].astype(np.bool_),
            loss=float(self.row["loss"]),
            denominator=float(self.row["denominator"]),
            counts=self.row,
        )


@dataclass(frozen=True, slots=True)
class StoredArm:
    """One arm in one phase.

    Attributes:
        run: the run directory.
        execution: its execution file.
        arm: the arm's name.
        phase: the phase.
        updates: every update whose rows are all there, in order.
    """

    run: Run
    execution: ExecutionFile
    arm: str
    phase: str
    updates: tuple[StoredUpdate, ...]

    @property
    def loss(self) -> Mapping[str, Any]:
        """The registered loss."""
        settings = self.execution.arms[self.arm].loss
        if settings is None:
            raise InputError("arm", self.arm, "an arm that is trained")
        return settings.config

    @property
    def steps(self) -> list[int]:
        """Rollout steps that were sampled, in order."""
        keys = self.run.keys("tokens", prefix=(self.arm, self.phase))
        return sorted(int(key[2]) for key in keys)

    def later_pass(self) -> tuple[list[StoredUpdate], str]:
        """The updates whose figures tell most, and which they are in words."""
        second = [one for one in self.updates if one.row["epoch"] == 1]
        if second:
            return second, "all second-pass loss calls pooled"
        later = [one for one in self.updates if one.row["minibatch"] >= 1]
        if later:
            return later, "all loss calls after a batch's first update pooled"
        return list(self.updates), "all loss calls pooled"


def stored_arm(run: Run, *, arm: str | None = None, phase: str | None = None) -> StoredArm | None:
    """Find the updates of a run that an investigation looks at.

    Args:
        run: the run directory.
        arm: the arm; by default the one that masks by divergence, else the treatment.
        phase: the phase; by default the first of `PHASES` with updates of that arm.

    Returns:
        The updates; None where the run has none.

    Raises:
        InputError: if the run has no execution file, or no such arm.
    """
    if run.execution is None:
        raise InputError("execution.json", None, "an execution file", where=run.path)
    execution = ExecutionFile.parse(run.execution, where=f"{run.path}/execution.json")
    if arm is not None and arm not in execution.arms:
        raise InputError("--arm", arm, f"one of the arms {', '.join(execution.arms)}")
    name = arm or default_arm(execution)
    for candidate in (phase,) if phase is not None else PHASES:
        updates = tuple(_updates(run, name, candidate))
        if updates or candidate == phase:
            return StoredArm(run, execution, name, candidate, updates)
    return None


def default_arm(execution: ExecutionFile) -> str:
    """The arm that masks by divergence; else the treatment; else the first trained one.

    Raises:
        InputError: if no arm is trained.
    """
    trained = [name for name, arm in execution.arms.items() if arm.loss is not None]
    if not trained:
        raise InputError("arms", list(execution.arms), "an arm that is trained")
    kinds = {name: execution.arms[name].loss for name in trained}
    masked = [name for name, loss in kinds.items() if loss is not None and loss.kind == "dppo"]
    treated = [name for name in trained if execution.arms[name].role == "treatment"]
    return (masked or treated or trained)[0]


def _updates(run: Run, arm: str, phase: str) -> list[StoredUpdate]:
    found = []
    kept: dict[int, Recomputed | None] = {}
    for key in run.keys("updates", prefix=(arm, phase)):
        if not run.has_table("update_tokens", key=key):
            continue
        row = run.read_table("updates", key=key)[0]
        table = run.read_arrow("update_tokens", key=key)
        columns = {
            name: np.asarray(table.column(name).to_numpy())
            for name in table.column_names
            if name not in ("arm", "phase", "update")
        }
        step = int(row["step"])
        if step not in kept:
            kept[step] = Recomputed.of_step(run, arm, phase, step)
        scores = kept[step]
        found.append(StoredUpdate(row, columns, None if scores is None else scores.at(columns)))
    if any(one.anchor_logprobs_N is None for one in found):  # a pool has them for all or for none
        found = [replace(one, anchor_logprobs_N=None) for one in found]
    return sorted(found, key=lambda one: one.update)
