"""The settings file of a bounded diagnostic: everything that is fixed before it measures anything.

The form is that of the recorded diagnostic and is not a setting: eight minibatches of complete
groups, two passes over one frozen batch, at most sixteen optimizer updates, one wall-clock cap.
Loss, optimizer, renderer and sampling settings are those of the experiment and cannot be stated
here: a diagnostic explains a setting, it does not look for a better one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, PrivateAttr, model_validator

from evidence.canonical import digest
from evidence.errors import InputError
from evidence.parsing import ClosedRecord, Many, Name, build, read_object

MINIBATCHES, EPOCHS = 8, 2
MAX_UPDATES = MINIBATCHES * EPOCHS
SentinelUpdate: TypeAlias = Literal[1, 2, 4, 8, 16]
SENTINEL_UPDATES: tuple[SentinelUpdate, ...] = (1, 2, 4, 8, 16)


class Sentinels(ClosedRecord):
    """Fixed tokens of the frozen batch that are scored again as training goes on."""

    sequences: Annotated[
        int, Field(ge=1, description="sequences of the batch, one of each group in turn")
    ]
    after_updates: Annotated[
        Many[SentinelUpdate],
        Field(min_length=1, description="updates after which they are scored"),
    ] = SENTINEL_UPDATES


class InitialState(ClosedRecord):
    """The full initial state that is restored."""

    checkpoint: Annotated[
        str | None,
        Field(
            min_length=1,
            description="URI of an immutable full checkpoint; null to take that of the earlier "
            "run, or to save a fresh one",
        ),
    ] = None
    accept_unreported_immutability: Annotated[
        bool, Field(description="true only for a service that says nothing about its checkpoints")
    ] = False


class BudgetUsed(ClosedRecord):
    """What the experiment has used before, where no run directory shows it."""

    wall_minutes: Annotated[float, Field(ge=0, description="wall minutes used before")] = 0.0
    gpu_hours: Annotated[float | None, Field(ge=0, description="GPU-hours used, null: unknown")] = (
        None
    )


class DiagnosticFile(ClosedRecord):
    """Everything that a diagnostic needs beside a spec and its execution file.

    Example:
        >>> settings = DiagnosticFile.parse(path.read_bytes())  # doctest: +SKIP
    """

    version: Literal[1]
    arm: Annotated[Name, Field(description="the arm whose mask is examined")]
    reason: Annotated[Name, Field(description="why, in words; it stands in every deviation")]
    groups: Annotated[int, Field(ge=MINIBATCHES, description="prompts; a multiple of 8")]
    group_size: Annotated[int, Field(ge=2, description="samples per prompt")]
    minibatches: Annotated[Literal[8], Field(description="parts of complete groups")]
    epochs: Annotated[Literal[2], Field(description="passes over the frozen batch")]
    max_updates: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_UPDATES,
            description="optimizer updates; with fewer than 16 the second pass is not whole, and "
            "the conclusion is that evidence is missing",
        ),
    ]
    wall_minutes: Annotated[
        float, Field(gt=0, le=12, description="hard cap that counts set-up; at most 12")
    ]
    sentinels: Sentinels
    initial_state: InitialState = InitialState()
    budget_used: BudgetUsed = BudgetUsed()

    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _complete_groups(self) -> Self:
        if self.groups % self.minibatches:
            raise InputError("groups", self.groups, "a multiple of 8, so that groups stay whole")
        if self.sentinels.sequences > self.groups * self.group_size:
            expected = f"at most groups * group_size = {self.groups * self.group_size}"
            raise InputError("sentinels.sequences", self.sentinels.sequences, expected)
        return self

    @classmethod
    def parse(cls, raw: Mapping[str, Any] | bytes | str, *, where: str | None = None) -> Self:
        """Read a settings file.

        Raises:
            InputError: naming the field, its value and what was expected.
        """
        document = read_object(raw, where=where)
        settings = build(cls, document, where=where)
        settings._raw = copy.deepcopy(document)
        return settings

    @property
    def raw(self) -> dict[str, Any]:
        """The file as it was given (a copy)."""
        return copy.deepcopy(self._raw)

    @property
    def digest(self) -> str:
        """SHA-256 of the file's canonical JSON, as written."""
        return digest(self._raw)
