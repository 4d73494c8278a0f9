"""The execution file: every setting that a spec leaves to prose, with where it comes from.

A spec says what is compared; it never says in a field how many groups are sampled or what delta
is. Prose is not parsed. These settings stand in a file beside the spec, are part of the run's
identity, and have no defaults where a default would decide a result.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, Field, PrivateAttr, model_validator
from pydantic.fields import FieldInfo

from evidence.canonical import digest
from evidence.errors import InputError
from evidence.method_settings import (
    AdvantageSettings,
    DenominatorSettings,
    RolloutCorrection,
)
from evidence.parsing import ClosedRecord, Many, Name, build, read_object, record_types
from evidence.run_settings import (
    ArmSettings,
    Calibration,
    Environment,
    EvaluationSettings,
    Fallback,
    Feasibility,
    Judge,
    Lora,
    OptimizerSettings,
    Pilot,
    Rollout,
    Simulator,
    WarmStart,
)
from evidence.spec import Spec


class ExecutionFile(ClosedRecord):
    """Everything a run needs beside its spec.

    Example:
        >>> execution = ExecutionFile.parse(path.read_bytes())  # doctest: +SKIP
    """

    version: Literal[1]
    spec_sha256: Annotated[
        str,
        Field(pattern=r"^[0-9a-f]{64}$", description="digest of the spec, as `check` prints it"),
    ]
    environment: Environment
    arms: Annotated[dict[Name, ArmSettings], Field(min_length=1)]
    advantage: AdvantageSettings
    denominator: DenominatorSettings
    rollout: Rollout
    optimizer: OptimizerSettings
    rollout_steps: Annotated[int, Field(ge=1, description="rollout steps per arm")]
    lora: Lora
    renderer: Annotated[Name, Field(description="renderer of the prompts")]
    system_prompt: Annotated[str | None, Field(description="null for none")]
    pilot: Pilot
    checkpoint_every: Annotated[int, Field(ge=1, description="rollout steps between checkpoints")]
    evaluation: EvaluationSettings
    feasibility: Feasibility
    max_seq_len_policy: Annotated[
        Literal["end_episode", "fail"],
        Field(description="a sequence at max_seq_len ends its episode, or stops the run"),
    ]
    rollout_correction: RolloutCorrection | None = None
    simulator: Simulator | None = None
    judge: Judge | None = None
    warm_start: WarmStart | None = None
    fallbacks: Many[Fallback] = ()
    calibration: Calibration | None = None
    sources: Annotated[
        dict[str, str], Field(description="field path to where its value comes from")
    ] = Field(default_factory=dict)

    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        taken: dict[str, str] = {}
        for name, arm in self.arms.items():
            if arm.role in taken:
                expected = f"a role of its own ({taken[arm.role]} has this one)"
                raise InputError(f"arms.{name}.role", arm.role, expected)
            taken[arm.role] = name
        for index, name in enumerate(self.pilot.arms):
            if name not in self.arms:
                place = "pilot.arm" if index == 0 else f"pilot.other_arms[{index - 1}]"
                raise InputError(place, name, f"one of the arms {', '.join(self.arms)}")
        for name in _conditional(self.model_dump()):
            raise InputError(name, None, _NEEDED[name])
        return self

    @classmethod
    def parse(cls, raw: Mapping[str, Any] | bytes | str, *, where: str | None = None) -> Self:
        """Read an execution file.

        Args:
            raw: UTF-8 JSON, or the mapping it was read into.
            where: name of the file, for errors.

        Raises:
            InputError: naming the field, its value, what was expected and what to do.
        """
        document = read_object(raw, where=where)
        execution = build(cls, document, where=where)
        execution._raw = copy.deepcopy(document)
        return execution

    @property
    def digest(self) -> str:
        """SHA-256 of the file's canonical JSON, as written (defaults are not filled in)."""
        return digest(self._raw)

    @property
    def raw(self) -> dict[str, Any]:
        """The file as it was given, without the defaults (a copy)."""
        return copy.deepcopy(self._raw)

    @property
    def roles(self) -> dict[str, str]:
        """Role to arm name, e.g. ``{"treatment": "dppo", "baseline": "grpo"}``."""
        return {arm.role: name for name, arm in self.arms.items()}

    def advantage_of(self, arm: str) -> Any:
        """The advantage settings of an arm: its own, else the file's."""
        return self.arms[arm].advantage or self.advantage


_NEEDED = {
    "judge": "a judge, since an advantage reads its feedback",
    "simulator": "a user simulator, since episodes have several turns",
}


def _conditional(raw: Mapping[str, Any]) -> Iterator[str]:
    """Names of optional sections that other settings make necessary and that are missing."""
    arms = raw.get("arms")
    arms = arms.values() if isinstance(arms, Mapping) else ()
    advantages = [raw.get("advantage"), *(_get(arm, "advantage") for arm in arms)]
    reads_judge = any(_get(advantage, "feedback") == "judge" for advantage in advantages)
    if reads_judge and raw.get("judge") is None:
        yield "judge"
    turns = _get(raw.get("rollout"), "max_turns")
    if isinstance(turns, int) and turns > 1 and raw.get("simulator") is None:
        yield "simulator"


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def missing_settings(spec: Spec, execution: ExecutionFile | Mapping[str, Any] | None) -> list[str]:
    """List every setting a run would have to guess, by its path in the execution file.

    Args:
        spec: the spec to be run.
        execution: its execution file, an incomplete one as read from JSON, or None.

    Returns:
        Paths such as ``rollout.group_size`` in the file's order; empty when nothing is missing.
    """
    raw = execution.raw if isinstance(execution, ExecutionFile) else dict(execution or {})
    given = raw.get("arms")
    arms = dict(given) if isinstance(given, Mapping) else {}
    raw["arms"] = {name: {} for name in spec.arm_names} | arms
    return [*_missing(ExecutionFile, raw, ""), *_conditional(raw)]


def _missing(model: type[BaseModel], value: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        if path == "arms":
            for arm, settings in value[name].items():
                yield from _missing_arm(settings, f"arms.{arm}.")
        elif name in value:
            yield from _missing_inside(field, value[name], path)
        elif field.is_required():
            yield from _missing_inside(field, {}, path)


def _missing_arm(settings: Any, prefix: str) -> Iterator[str]:
    if not isinstance(settings, Mapping):
        return
    yield from _missing(ArmSettings, settings, prefix)
    if settings.get("trained", True) and "loss" not in settings:
        yield f"{prefix}loss"


def _missing_inside(field: FieldInfo, value: Any, path: str) -> Iterator[str]:
    models = list(record_types(field.annotation))
    if not models:
        if value == {} and get_origin(field.annotation) is not dict:
            yield path
    elif isinstance(value, Mapping):
        chosen = [model for model in models if len(models) == 1 or _has_kind(model, value)]
        if chosen:
            yield from _missing(chosen[0], value, f"{path}.")
        elif "kind" not in value:
            yield f"{path}.kind"


def _has_kind(model: type[BaseModel], value: Mapping[str, Any]) -> bool:
    return value.get("kind") in get_args(model.model_fields["kind"].annotation)


@dataclass(frozen=True, slots=True)
class Finding:
    """A setting of the execution file that contradicts the spec.

    Attributes:
        field: path in the execution file.
        value: what stands there.
        expected: what the spec says, in words.
    """

    field: str
    value: Any
    expected: str

    def __str__(self) -> str:
        return str(InputError(self.field, self.value, self.expected))

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return {"field": self.field, "value": self.value, "expected": self.expected}


def contradictions(spec: Spec, execution: ExecutionFile) -> list[Finding]:
    """List every setting of the execution file that the spec contradicts.

    Nothing is corrected: a run with a contradiction is refused.

    Returns:
        Findings in the order of the file; empty when the two agree.
    """
    return [
        *_identity(spec, execution),
        *_schedule(spec, execution),
        *_optimizer(spec, execution),
        *_restoration(spec, execution),
        *_roles(spec, execution),
        *_warm_start(spec, execution),
    ]


def _differs(field: str, value: Any, planned: Any, name: str) -> Iterator[Finding]:
    if planned is not None and value != planned:
        yield Finding(field, value, f"{planned}, the spec's {name}")


def _identity(spec: Spec, execution: ExecutionFile) -> Iterator[Finding]:
    yield from _differs("spec_sha256", execution.spec_sha256, spec.digest, "digest")
    for name in spec.arm_names:
        if name not in execution.arms:
            yield Finding(f"arms.{name}", None, "settings of this arm of the spec")
    for name in execution.arms:
        if name not in spec.arm_names:
            yield Finding(f"arms.{name}", name, f"one of the spec's arms {list(spec.arm_names)}")


def _schedule(spec: Spec, execution: ExecutionFile) -> Iterator[Finding]:
    rollout = execution.rollout
    if rollout.batch_size != spec.batch_size:
        expected = f"groups * group_size = {spec.batch_size}, the spec's batch_size"
        yield Finding("rollout.groups", f"{rollout.groups} * {rollout.group_size}", expected)
    if execution.rollout_steps * rollout.updates_per_step != spec.steps:
        found = f"{execution.rollout_steps} * {rollout.minibatches} * {rollout.epochs}"
        expected = f"rollout_steps * minibatches * epochs = {spec.steps}, the spec's steps"
        yield Finding("rollout_steps", found, expected)
    for arm in spec.arms:
        yield from _differs(
            "rollout.minibatches * epochs",
            rollout.updates_per_step,
            arm.updates_per_batch,
            f"updates_per_batch of {arm.name}",
        )
    if rollout.max_tokens >= spec.max_seq_len:
        expected = f"less than {spec.max_seq_len}, the spec's max_seq_len"
        yield Finding("rollout.max_tokens", rollout.max_tokens, expected)
    items = execution.evaluation.items
    yield from _differs("evaluation.items", items, spec.eval.n_examples, "eval.n_examples")


def _optimizer(spec: Spec, execution: ExecutionFile) -> Iterator[Finding]:
    settings = execution.optimizer
    if _family(settings.name) != _family(spec.optimizer.name):
        expected = f"the family of {spec.optimizer.name}, the spec's optimizer"
        yield Finding("optimizer.name", settings.name, expected)
    rate = settings.learning_rate
    yield from _differs("optimizer.learning_rate", rate, spec.optimizer.lr, "optimizer.lr")
    for arm in spec.arms:
        yield from _differs("optimizer.learning_rate", rate, arm.lr, f"lr of {arm.name}")
    yield from _differs("lora.rank", execution.lora.rank, spec.lora_rank, "lora_rank")


def _restoration(spec: Spec, execution: ExecutionFile) -> Iterator[Finding]:
    """Compare with what the restoration preflight will demand of the server's answer."""
    known = execution.optimizer.model_dump()
    groups = spec.restoration_preflight.groups if spec.restoration_preflight else ()
    for arm in (arm for group in groups for arm in group.arms):
        for key, planned in arm.optimizer_config.items():
            if key in known and known[key] != planned:
                expected = f"{planned}, the restoration preflight's {key} of {arm.name}"
                yield Finding(f"optimizer.{key}", known[key], expected)


def _roles(spec: Spec, execution: ExecutionFile) -> Iterator[Finding]:
    for criterion in spec.decision_rule.criteria if spec.decision_rule else ():
        for name in criterion.weights:
            if name not in execution.roles and name not in execution.arms:
                expected = f"an arm of this name or role (criterion {criterion.id} weighs it)"
                yield Finding("arms", name, expected)


def _warm_start(spec: Spec, execution: ExecutionFile) -> Iterator[Finding]:
    """A warm start on generated demonstrations is declared in the spec, or it is none."""
    features = spec.experiment_features
    if execution.warm_start is None:
        if features.get("warmup_adaptation") is True:
            expected = "settings, since the spec declares warmup_adaptation"
            yield Finding("warm_start", None, expected)
        return
    for name in ("warmup_adaptation", "generated_training_data"):
        if features.get(name) is not True:
            expected = f"null, or experiment_features.{name}: true in the spec"
            yield Finding("warm_start", "a warm start", expected)


def _family(optimizer: str) -> str:
    return "adam" if optimizer.lower() == "adamw" else optimizer.lower()
