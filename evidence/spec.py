"""The pre-registered experiment: what is compared, how it is judged, and what it may cost.

A spec is someone else's document. It is read as it is: fields that the program needs are typed
and checked, all others are kept, nothing is changed. Its digest is that of the document as given.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from evidence.canonical import digest
from evidence.errors import InputError
from evidence.parsing import Many, Name, OpenRecord, Seed, build, json_path, read_object, walk
from evidence.values import spec_mapping

DECISION_METHODS = ("paired_hoeffding", "paired_betting")
_GRID_KEYS = ("lr_grid", "lrs", "learning_rates", "learning_rate_grid")


def _one_learning_rate(value: Any) -> Any:
    if isinstance(value, list | tuple | Mapping):
        raise InputError("", value, _ONE_RATE)
    return value


_ONE_RATE = "one learning rate (a grid of learning rates is not supported yet)"
LearningRate = Annotated[float, BeforeValidator(_one_learning_rate), Field(ge=0)]


class _TakesOneRate(OpenRecord):
    @model_validator(mode="before")
    @classmethod
    def _no_grid(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            for key in _GRID_KEYS:
                if value.get(key) is not None:
                    raise InputError(key, value[key], _ONE_RATE)
        return value


class Arm(_TakesOneRate):
    """One way of training. The loss here is prose; the execution file says which code it is."""

    name: Name
    """How records, checks and tables name this arm."""
    seed: Seed | None = None
    """Training seed."""
    lr: LearningRate | None = None
    """Learning rate, where the arm states its own."""
    loss: str | None = None
    """The loss in words."""
    advantage: str | None = None
    """The advantage in words."""
    updates_per_batch: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps per rollout batch."""


class Optimizer(_TakesOneRate):
    """The planned optimizer."""

    name: Name
    """Family, e.g. ``adam``. AdamW counts as the same family."""
    lr: LearningRate
    """Learning rate of every arm that states none."""


class Dataset(OpenRecord):
    """The training data."""

    name: str | None = None
    hf_path: str | None = None
    split: str | None = None
    n_examples: Annotated[int, Field(ge=1)] | None = None
    """Training examples used in all."""


class Evaluation(OpenRecord):
    """The held-out evaluation."""

    metric: Name
    """What is measured, in words."""
    benchmark: str | None = None
    n_examples: Annotated[int, Field(ge=1)] | None = None
    """Held-out items."""
    aggregation: Any = None


class Budget(OpenRecord):
    """What the run may use. A budget of zero is a mistake: leave a limit out instead."""

    gpu_hours: Annotated[float, Field(gt=0)] | None = None
    """Accelerator hours, all arms and evaluation together."""
    max_wall_minutes: Annotated[float, Field(gt=0)] | None = None
    """Wall-clock minutes, waiting included."""


class Criterion(OpenRecord):
    """One clause of the decision: a weighted difference of arm means against a margin."""

    id: Name
    metric: Name
    weights: dict[str, float]
    """Role or arm to weight, e.g. treatment 1 and baseline -1."""
    margin: float
    """In the metric's unit; the whole interval must lie on one side of it."""
    bounds: Many[float]
    """Smallest and largest possible value of one observation."""
    tie_band: float | Many[float] | None = None
    """Optional: differences that count as no difference, ``[low, high]`` or half its width."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if not any(self.weights.values()):
            raise InputError("weights", self.weights, "at least one weight that is not 0")
        if len(self.bounds) != 2 or not self.bounds[0] < self.bounds[1]:
            raise InputError("bounds", list(self.bounds), "two numbers, the lower one first")
        if isinstance(self.tie_band, tuple) and (
            len(self.tie_band) != 2 or not self.tie_band[0] < self.tie_band[1]
        ):
            raise InputError("tie_band", list(self.tie_band), "two numbers, the lower one first")
        if isinstance(self.tie_band, float) and self.tie_band <= 0:
            raise InputError("tie_band", self.tie_band, "a number above 0")
        return self


class DecisionRule(OpenRecord):
    """The frozen rule that turns observations into a verdict."""

    version: int = 1
    unit: str | None = None
    """What one observation is, e.g. ``fixed_checkpoint_items``."""
    seeds: Annotated[Many[Seed], Field(min_length=1)]
    """The scheduled training seeds; none may be added later."""
    alpha: Annotated[float, Field(gt=0, lt=1)]
    """Chance, over all criteria together, that some interval misses."""
    method: Name
    criteria: Annotated[Many[Criterion], Field(min_length=1)]
    estimand: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.method not in DECISION_METHODS:
            raise InputError("method", self.method, f"one of {', '.join(DECISION_METHODS)}")
        if len(set(self.seeds)) != len(self.seeds):
            raise InputError("seeds", list(self.seeds), "each seed once")
        ids = [criterion.id for criterion in self.criteria]
        for index, name in enumerate(ids):
            if name in ids[:index]:
                raise InputError(f"criteria[{index}].id", name, "an id no other criterion has")
        return self


class Tolerance(OpenRecord):
    """Bounds of one parity check: error <= atol + rtol * largest reference value."""

    atol: Annotated[float, Field(ge=0)]
    rtol: Annotated[float, Field(ge=0)]
    min_cosine: Annotated[float, Field(ge=-1, le=1)] | None = None


class PreflightPath(OpenRecord):
    """One code path that must be shown to be correct before training."""

    id: Name
    kind: str | None = None
    baseline_revision: str | None = None
    reference_revision: str | None = None
    tolerances: dict[str, Tolerance] = Field(default_factory=dict)


class CorrectnessPreflight(OpenRecord):
    """The planned parity checks of custom losses and optimizers."""

    required: bool | None = None
    status: str | None = None
    paths: Many[PreflightPath] = ()


class RestorationArm(OpenRecord):
    """What one arm's optimizer must be found to be."""

    name: Name
    optimizer: str | None = None
    optimizer_config: dict[str, Any] = Field(default_factory=dict)


class RestorationGroup(OpenRecord):
    """Arms that must start from the same state."""

    arms: Many[RestorationArm]


class RestorationPreflight(OpenRecord):
    """The planned proof that the arms start equal."""

    applicable: bool | None = None
    reason: str | None = None
    fixed_batch_required: bool | None = None
    groups: Many[RestorationGroup] = ()


class ActivationCheck(OpenRecord):
    """One pilot metric and its accepted range (inclusive) or its accepted values."""

    metric: Name
    measures: str | None = None
    min: float | None = None
    max: float | None = None
    one_of: Many[Any] | None = None


class ActivationGate(OpenRecord):
    """The pilot that must show that the treatment acts at all."""

    applicable: bool | None = None
    reason: str | None = None
    checks: Many[ActivationCheck] = ()


class GenerationAudit(OpenRecord):
    """The planned audit of generated training data."""

    required: bool | None = None
    answer_comparison: str | None = None
    min_sample_size: Annotated[int, Field(ge=1)] | None = None
    max_label_errors: Annotated[int, Field(ge=0)] | None = None
    max_eval_overlaps: Annotated[int, Field(ge=0)] | None = None


class Spec(_TakesOneRate):
    """A frozen pre-registration.

    Example:
        >>> spec = Spec.parse(Path("spec.json").read_bytes())  # doctest: +SKIP
    """

    title: Name
    hypothesis: Name
    base_model: Name
    lora_rank: Annotated[int, Field(ge=1)]
    dataset: Dataset
    optimizer: Optimizer
    steps: Annotated[int, Field(ge=1)]
    """Optimizer steps per arm."""
    batch_size: Annotated[int, Field(ge=1)]
    """Sequences per rollout step."""
    max_seq_len: Annotated[int, Field(ge=1)]
    eval: Evaluation
    experiment_features: dict[str, Any] = Field(default_factory=dict)
    """What the experiment does, by name; a feature that is not declared is unknown."""
    arms: Annotated[Many[Arm], Field(min_length=1)]
    budget: Budget
    decision_rule: DecisionRule | None = None
    primary_endpoint: str | None = None
    training_type: str | None = None
    method: str | None = None
    baseline: str | None = None
    success_criterion: str | None = None
    command: str | None = None
    correctness_preflight: CorrectnessPreflight | None = None
    restoration_preflight: RestorationPreflight | None = None
    activation_gate: ActivationGate | None = None
    generation_audit: GenerationAudit | None = None
    feasibility_required: bool | None = None
    derived_from: str | None = None
    """Digest of the spec that this one resolves, where it is one that resolves another."""

    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)
    _digest: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [arm.name for arm in self.arms]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise InputError(f"arms[{index}].name", name, "a name no other arm has")
        needs_rule = any(
            self.experiment_features.get(feature) is True
            for feature in ("paired_comparison", "adaptive_selection")
        )
        if needs_rule and self.decision_rule is None:
            raise InputError("decision_rule", None, "a decision rule (the spec compares arms)")
        return self

    @classmethod
    def parse(cls, raw: Mapping[str, Any] | bytes | str, *, where: str | None = None) -> Self:
        """Read a spec, or the spec inside a triage document.

        Args:
            raw: UTF-8 JSON, or the mapping it was read into.
            where: name of the file, for errors.

        Raises:
            InputError: naming the field, its value and what was expected.
        """
        document = dict(spec_mapping(read_object(raw, where=where)))
        spec = build(cls, document, where=where)
        spec._raw = copy.deepcopy(document)
        spec._digest = digest(document)
        return spec

    @property
    def raw(self) -> dict[str, Any]:
        """The document as it was given (a copy: the spec itself never changes)."""
        return copy.deepcopy(self._raw)

    @property
    def digest(self) -> str:
        """SHA-256 of the document's canonical JSON; key order and layout do not matter."""
        return self._digest

    @property
    def rule(self) -> DecisionRule:
        """The decision rule of a spec that must have one.

        Raises:
            InputError: if the spec has none.
        """
        if self.decision_rule is None:
            raise InputError("decision_rule", None, "a decision rule")
        return self.decision_rule

    @property
    def arm_names(self) -> tuple[str, ...]:
        """Names of the arms, in the spec's order."""
        return tuple(arm.name for arm in self.arms)

    @property
    def primary_endpoint_text(self) -> str:
        """The endpoint as reports must repeat it: ``primary_endpoint``, else the eval metric."""
        return self.primary_endpoint or self.eval.metric


_PROSE = frozenset(
    {
        *("title", "hypothesis", "method", "command", "baseline", "success_criterion", "reason"),
        *("estimand", "measures", "note", "notes", "differences", "sources"),
    }
)
_PLACEHOLDER = re.compile(
    r"UNRESOLVED|\bTBD\b|\bTODO\b|^\s*(?i:unresolved)|(?i:pinned at run ?time)"
)
_SPEAKS_OF_A_PIN = re.compile(r"\bpinned\b", re.I)
_NAMES_A_PIN = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,}\b|\d+\.\d+", re.I)


def unresolved(spec: Spec | Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the placeholders that must be replaced before a launch.

    A placeholder is a text that says UNRESOLVED, TBD, TODO or "pinned at run time", or that
    speaks of a pinned revision without naming one. Fields that are prose (``method``, ``command``
    and the like) or that quote another spec (``differences``) are not read.

    Returns:
        (JSON path, text) in document order; empty when nothing is left open.
    """
    raw = spec.raw if isinstance(spec, Spec) else spec
    return [
        (json_path(path), leaf)
        for path, leaf in walk(raw)
        if isinstance(leaf, str) and _PROSE.isdisjoint(map(str, path)) and _is_placeholder(leaf)
    ]


def _is_placeholder(text: str) -> bool:
    if _PLACEHOLDER.search(text):
        return True
    return bool(_SPEAKS_OF_A_PIN.search(text)) and not _NAMES_A_PIN.search(text)
