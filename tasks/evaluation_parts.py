"""The items of one evaluation in the portions in which they are kept while it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evidence.run import EPISODES, GROUPS, Run, TableRef
from tasks.context import RunContext

CHUNK = 8
"""Single answers that are kept together."""


@dataclass(frozen=True, slots=True)
class EvaluationParts:
    """Finished portions of one evaluation; a killed one repeats only what is missing.

    An episode of several turns takes many requests and a judge's answer, so that each is kept by
    itself, under the index of its item. Single answers are kept by eights, in another folder: a
    portion of one kind is never taken for one of the other.

    Attributes:
        run: the run directory.
        arm: who is evaluated.
        label: which evaluation.
        folder: kind of part.
        portions: ids of the items of each part, in order.
    """

    run: Run
    arm: str
    label: str
    folder: str
    portions: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, ctx: RunContext, arm: str, label: str) -> EvaluationParts:
        """Divide the held-out items of a run."""
        ids, alone = tuple(ctx.eval_ids), ctx.evaluation_settings.max_turns != 1
        size = 1 if alone else CHUNK
        portions = tuple(ids[at : at + size] for at in range(0, len(ids), size))
        return cls(ctx.run, arm, label, EPISODES if alone else GROUPS, portions)

    def missing(self) -> list[int]:
        """Indices of the portions that are not finished, in order."""
        finished = set(self._finished())
        return [index for index in range(len(self.portions)) if index not in finished]

    def keep(self, index: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Keep the rows of a finished portion by table; a table without rows is left out."""
        found = {name: rows for name, rows in tables.items() if rows}
        self.run.write_part(self.arm, "eval", self.label, index, found, folder=self.folder)

    def items_done(self) -> int:
        """How many items are finished."""
        return sum(len(self.portions[index]) for index in self._finished())

    def assemble(self) -> TableRef:
        """Write the tables of the whole evaluation; `evaluations`, which ends it, comes last."""
        indices = range(len(self.portions))
        refs = self.run.assemble_parts(self.arm, "eval", self.label, indices, folder=self.folder)
        return refs["evaluations"]

    def _finished(self) -> list[int]:
        return self.run.parts(self.arm, "eval", self.label, folder=self.folder)
