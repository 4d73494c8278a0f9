"""Scale an experiment to a smaller machine, and say in the record what that changes.

A profile never loosens a gate. It replaces the model, caps sizes and says so: each change is a
deviation, the scaled spec keeps the original's digest and its activation gate beside its own, and
the original hypothesis counts as untested.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr

from evidence.canonical import digest
from evidence.errors import InputError
from evidence.execution import ExecutionFile
from evidence.parsing import ClosedRecord, Name, build, read_object
from evidence.run_settings import Judge, Simulator
from evidence.served_models import closest_served_model
from evidence.spec import Spec

__all__ = [
    "Profile",
    "ScaledPlan",
    "apply_profile",
    "closest_served_model",
    "substitute_served_model",
    "unscaled",
]

Count = Annotated[int, Field(ge=1)]


class ProfileModel(ClosedRecord):
    """The model that takes the place of the spec's, and what prompts fit it."""

    base_model: Annotated[Name, Field(description="name of a served model")]
    renderer: Annotated[Name, Field(description="renderer of its prompts")]
    system_prompt: Annotated[str | None, Field(description="null to keep the experiment's")] = None
    lora_rank: Annotated[Count | None, Field(description="null to keep the experiment's")] = None


class Profile(ClosedRecord):
    """How far an experiment is scaled down. Sizes are caps: what is smaller already stays."""

    version: Literal[1]
    name: Annotated[Name, Field(description="how records name this profile")]
    reason: Annotated[Name, Field(description="why, in words; it stands in every deviation")]
    model: ProfileModel | None = None
    max_groups: Annotated[Count | None, Field(description="prompts per rollout step")] = None
    max_group_size: Annotated[Count | None, Field(description="samples per prompt")] = None
    max_rollout_steps: Annotated[Count | None, Field(description="rollout steps per arm")] = None
    max_items: Annotated[Count | None, Field(description="held-out items")] = None
    max_tokens: Annotated[Count | None, Field(description="new tokens per turn")] = None
    max_turns: Annotated[Count | None, Field(description="agent turns per episode")] = None
    max_pilot_steps: Annotated[Count | None, Field(description="rollout steps of the pilot")] = None
    learning_rate: Annotated[
        float | None, Field(gt=0, description="null to keep the experiment's")
    ] = None
    environment_settings: Annotated[
        dict[str, Any] | None, Field(description="settings of the environment that replace its own")
    ] = None
    simulator: Simulator | None = None
    judge: Judge | None = None

    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def parse(cls, raw: Mapping[str, Any] | bytes | str, *, where: str | None = None) -> Self:
        """Read a profile.

        Raises:
            InputError: naming the field, its value and what was expected.
        """
        document = read_object(raw, where=where)
        profile = build(cls, document, where=where)
        profile._raw = copy.deepcopy(document)
        return profile

    @property
    def digest(self) -> str:
        """SHA-256 of the profile's canonical JSON, as written."""
        return digest(self._raw)


@dataclass(frozen=True, slots=True)
class ScaledPlan:
    """What is run, and how it differs from what was planned.

    Attributes:
        spec: the spec that is run; its ``derived_from`` is the original's digest.
        execution: the execution file that belongs to it.
        deviations: one for each change, in the contract's form, to be posted before training.
        original_hypothesis_tested: False once anything was changed.
        tested_instead: the claim that the run tests, in words, if it is another.
        original_spec_sha256: digest of the spec as planned.
        original_activation_gate: the gate as planned, judged beside the scaled one.
    """

    spec: Spec
    execution: ExecutionFile
    deviations: tuple[Mapping[str, str], ...]
    original_hypothesis_tested: bool
    tested_instead: str | None
    original_spec_sha256: str
    original_activation_gate: Mapping[str, Any] | None

    def to_record(self) -> dict[str, Any]:
        """Return the fields that a structured output carries about changes."""
        return {
            "deviations": [dict(deviation) for deviation in self.deviations],
            "original_hypothesis_tested": self.original_hypothesis_tested,
            "tested_instead": self.tested_instead,
            "original_spec_sha256": self.original_spec_sha256,
            "original_activation_gate": self.original_activation_gate,
        }


def unscaled(spec: Spec, execution: ExecutionFile) -> ScaledPlan:
    """Return the plan that changes nothing."""
    return ScaledPlan(
        spec=spec,
        execution=execution,
        deviations=(),
        original_hypothesis_tested=True,
        tested_instead=None,
        original_spec_sha256=spec.digest,
        original_activation_gate=spec.raw.get("activation_gate"),
    )


def apply_profile(spec: Spec, execution: ExecutionFile, profile: Profile) -> ScaledPlan:
    """Scale a spec and its execution file.

    Raises:
        InputError: if the two contradict each other in a way that leaves no scaled plan, or a cap
            cannot hold one group per minibatch.
    """
    change = _Change(spec, execution, profile.reason)
    if profile.model is not None:
        change.model(profile.model)
    change.batch(profile.max_groups, profile.max_group_size)
    change.steps(profile.max_rollout_steps)
    change.items(profile.max_items)
    change.tokens(profile.max_tokens)
    change.turns(profile.max_turns)
    change.pilot(profile.max_pilot_steps)
    change.learning_rate(profile.learning_rate)
    change.environment(profile.environment_settings or {})
    change.other_models(profile)
    return change.plan(f"profile {profile.name}", {"name": profile.name, "sha256": profile.digest})


def substitute_served_model(
    plan: ScaledPlan, served: Iterable[str], *, strict: bool = False
) -> ScaledPlan:
    """Replace a base model that is not served by the closest served one of its family.

    Args:
        plan: an unscaled or scaled plan.
        served: names of the served models.
        strict: refuse instead of replacing.

    Returns:
        The plan itself where its model is served, else one with a further deviation, to be
        recorded before anything else happens.

    Raises:
        InputError: if the model is not served and replacing it is refused or impossible.
    """
    listed = list(served)
    requested = plan.spec.base_model
    chosen, reason = closest_served_model(requested, listed)
    if chosen == requested:
        return plan
    if chosen is None or strict:
        expected = f"one of the served models: {', '.join(sorted(listed)) or 'none'}"
        raise InputError("base_model", requested, expected)
    change = _Change(plan.spec, plan.execution, reason, earlier=plan)
    change.base_model(chosen)
    return change.plan("the closest served model", plan.spec.raw.get("profile"))


class _Change:
    """Copies of a spec and an execution file, changed one setting after the other."""

    def __init__(
        self,
        spec: Spec,
        execution: ExecutionFile,
        reason: str,
        *,
        earlier: ScaledPlan | None = None,
    ) -> None:
        self.original = spec
        self.first = earlier or unscaled(spec, execution)
        self.planned = execution
        self.reason = reason
        self.spec = spec.raw
        self.execution = execution.raw
        self.deviations: list[dict[str, str]] = []

    def note(self, field: str, original: object, effective: object) -> None:
        self.deviations.append(
            {
                "field": field,
                "original": str(original),
                "effective": str(effective),
                "reason": self.reason,
            }
        )

    def base_model(self, name: str) -> None:
        """Replace the model, also where the activation gate asks for its name."""
        if name == self.original.base_model:
            return
        self.note("model", self.original.base_model, name)
        self.spec["base_model"] = name
        for check in (self.spec.get("activation_gate") or {}).get("checks", []):
            if check.get("metric") == "executed_base_model" and "one_of" in check:
                check["one_of"] = [name]

    def model(self, model: ProfileModel) -> None:
        replaced = model.base_model != self.original.base_model
        self.base_model(model.base_model)
        if replaced:
            self.execution["renderer"] = model.renderer
            if model.system_prompt is not None:
                self.execution["system_prompt"] = model.system_prompt
        rank = model.lora_rank
        if rank is not None and rank != self.original.lora_rank:
            self.note("model", f"LoRA rank {self.original.lora_rank}", f"LoRA rank {rank}")
            self.spec["lora_rank"] = self.execution["lora"]["rank"] = rank
            self._optimizer_config("lora_rank", rank)

    def batch(self, max_groups: int | None, max_group_size: int | None) -> None:
        rollout = self.planned.rollout
        groups = _capped(rollout.groups, max_groups)
        groups -= groups % rollout.minibatches
        if groups == 0:
            expected = f"at least {rollout.minibatches}, one group per minibatch"
            raise InputError("max_groups", max_groups, expected)
        size = _capped(rollout.group_size, max_group_size)
        if (groups, size) == (rollout.groups, rollout.group_size):
            return
        per_step = groups * size // rollout.minibatches
        planned = rollout.batch_size // rollout.minibatches
        self.note(
            "effective_batch",
            f"{planned} sequences per optimizer step ({rollout.groups} groups of "
            f"{rollout.group_size} in {rollout.minibatches} minibatches)",
            f"{per_step} sequences per optimizer step ({groups} groups of {size} in "
            f"{rollout.minibatches} minibatches)",
        )
        self.execution["rollout"] |= {"groups": groups, "group_size": size}
        self.spec["batch_size"] = groups * size

    def steps(self, max_rollout_steps: int | None) -> None:
        planned = self.planned.rollout_steps
        steps = _capped(planned, max_rollout_steps)
        per_step = self.planned.rollout.updates_per_step
        if steps != planned:
            self.note(
                "steps",
                f"{planned * per_step} optimizer steps per arm ({planned} rollout steps)",
                f"{steps * per_step} optimizer steps per arm ({steps} rollout steps)",
            )
            self.execution["rollout_steps"] = steps
            self.spec["steps"] = steps * per_step
        self._training_examples(steps)

    def items(self, max_items: int | None) -> None:
        planned = self.planned.evaluation.items
        items = _capped(planned, max_items)
        if items != planned:
            self.note("evaluator", f"{planned} held-out items", f"the first {items} of them")
            self.execution["evaluation"]["items"] = items
            self.spec["eval"]["n_examples"] = items

    def tokens(self, max_tokens: int | None) -> None:
        planned, scored = self.planned.rollout.max_tokens, self.planned.evaluation.max_tokens
        tokens, evaluated = _capped(planned, max_tokens), _capped(scored, max_tokens)
        if tokens != planned:
            self.note("dataset", f"rollouts of {planned} new tokens a turn", f"of {tokens}")
            self.execution["rollout"]["max_tokens"] = tokens
        if evaluated != scored:
            self.note("evaluator", f"answers of {scored} new tokens a turn", f"of {evaluated}")
            self.execution["evaluation"]["max_tokens"] = evaluated

    def turns(self, max_turns: int | None) -> None:
        planned = self.planned.rollout.max_turns
        turns = _capped(planned, max_turns)
        if turns != planned:
            self.note("dataset", f"episodes of {planned} agent turns", f"of {turns}")
            self.execution["rollout"]["max_turns"] = turns

    def pilot(self, max_pilot_steps: int | None) -> None:
        planned = self.planned.pilot.steps
        steps = _capped(planned, max_pilot_steps)
        if steps != planned:
            self.note("steps", f"a pilot of {planned} rollout steps", f"a pilot of {steps}")
            self.execution["pilot"]["steps"] = steps

    def learning_rate(self, rate: float | None) -> None:
        planned = self.planned.optimizer.learning_rate
        if rate is None or rate == planned:
            return
        self.note("objective", f"learning rate {planned}", f"learning rate {rate}")
        self.execution["optimizer"]["learning_rate"] = rate
        self.spec["optimizer"]["lr"] = rate
        for arm in self.spec["arms"]:
            if arm.get("lr") is not None:
                arm["lr"] = rate
        self._optimizer_config("learning_rate", rate)

    def environment(self, settings: Mapping[str, Any]) -> None:
        held = self.execution["environment"]["settings"]
        for name, value in settings.items():
            if held.get(name) != value:
                self.note("dataset", f"{name} {held.get(name)}", f"{name} {value}")
                held[name] = copy.deepcopy(value)

    def other_models(self, profile: Profile) -> None:
        for name in ("simulator", "judge"):
            given, planned = getattr(profile, name), getattr(self.planned, name)
            if given is None or planned is None or given == planned:
                continue
            self.note("evaluator", f"{name} {_named(planned)}", f"{name} {_named(given)}")
            self.execution[name] = given.model_dump(exclude_unset=True)

    def plan(self, what: str, profile: Mapping[str, str] | None) -> ScaledPlan:
        if not self.deviations:
            return self.first
        deviations = (*self.first.deviations, *self.deviations)
        gate = self.first.original_activation_gate
        instead = self._tested_instead(what)
        self.spec.update(
            derived_from=self.first.original_spec_sha256,
            original_activation_gate=copy.deepcopy(gate),
            deviations=[dict(deviation) for deviation in deviations],
            original_hypothesis_tested=False,
            tested_instead=instead,
        )
        if profile is not None:
            self.spec["profile"] = dict(profile)
        spec = Spec.parse(self.spec)
        self.execution["spec_sha256"] = spec.digest
        return ScaledPlan(
            spec=spec,
            execution=ExecutionFile.parse(self.execution),
            deviations=deviations,
            original_hypothesis_tested=False,
            tested_instead=instead,
            original_spec_sha256=self.first.original_spec_sha256,
            original_activation_gate=gate,
        )

    def _training_examples(self, steps: int) -> None:
        """Name fewer training examples where the scaled run cannot reach all of them."""
        planned = self.original.dataset.n_examples
        reached = steps * self.execution["rollout"]["groups"]
        if planned is not None and reached < planned:
            self.note("dataset", f"{planned} training examples", f"the first {reached} in order")
            self.spec["dataset"]["n_examples"] = reached

    def _optimizer_config(self, key: str, value: object) -> None:
        for group in (self.spec.get("restoration_preflight") or {}).get("groups", []):
            for arm in group["arms"]:
                if key in arm.get("optimizer_config", {}):
                    arm["optimizer_config"][key] = value

    def _tested_instead(self, what: str) -> str:
        rollout, rank = self.execution["rollout"], self.spec["lora_rank"]
        return (
            f"Whether {' and '.join(self.original.arm_names)} differ as the original claims, on "
            f"{self.spec['base_model']} (LoRA rank {rank}), with {rollout['groups']} groups of "
            f"{rollout['group_size']} per rollout step, {self.spec['steps']} optimizer steps per "
            f"arm and {self.execution['evaluation']['items']} held-out items ({what})."
        )


def _capped(planned: int, cap: int | None) -> int:
    return planned if cap is None else min(planned, cap)


def _named(model: Any) -> str:
    """Name a simulator or judge: its model where it is served, else its kind."""
    return str(getattr(model, "model", model.kind))
