"""The sections of an execution file: environment, arms, sampling, optimizer, models, limits.

Each setting's description says what it means and, where a bound can be missed, what to do instead;
it is repeated in the error that a wrong value gives.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from evidence.errors import InputError
from evidence.method_settings import AdvantageSettings, LossSettings
from evidence.parsing import ClosedRecord, Many, Name, Seed


class Environment(ClosedRecord):
    """The tasks that are trained and evaluated on."""

    name: Annotated[Name, Field(description="name of an environment of this program")]
    settings: Annotated[
        dict[str, Any], Field(description="its own settings; the environment checks them")
    ]


class ArmSettings(ClosedRecord):
    """What an arm of the spec is, in code."""

    role: Annotated[
        Name, Field(description="the name the decision's weights use: treatment or baseline")
    ]
    loss: LossSettings | None = None
    advantage: AdvantageSettings | None = None
    trained: Annotated[
        bool, Field(description="false: evaluated from the initial checkpoint as it is")
    ] = True

    @model_validator(mode="after")
    def _loss_where_trained(self) -> Self:
        if self.trained and self.loss is None:
            raise InputError("loss", None, "a loss (or trained: false)")
        return self


class Rollout(ClosedRecord):
    """How one batch is sampled and how it is used."""

    groups: Annotated[int, Field(ge=1, description="prompts per rollout step")]
    group_size: Annotated[
        int, Field(ge=1, description="samples per prompt; 1 leaves every advantage at 0")
    ]
    minibatches: Annotated[
        int, Field(ge=1, description="disjoint parts of complete groups, one optimizer step each")
    ]
    epochs: Annotated[int, Field(ge=1, le=100, description="passes over the same batch")]
    temperature: Annotated[
        float, Field(gt=0, le=10, description="above 0: greedy samples of a group are all equal")
    ]
    top_p: Annotated[
        float,
        Field(ge=1, le=1, description="1: a cut distribution is not the one the loss compares"),
    ]
    top_k: Annotated[
        int,
        Field(ge=-1, le=-1, description="-1: a cut distribution is not the one the loss compares"),
    ]
    max_tokens: Annotated[int, Field(ge=1, description="new tokens per turn")]
    max_turns: Annotated[
        int, Field(ge=1, le=1000, description="agent turns per episode; 1 for single-turn tasks")
    ] = 1

    @model_validator(mode="after")
    def _complete_groups(self) -> Self:
        if self.groups % self.minibatches:
            expected = f"a divisor of groups ({self.groups}), so that every group stays whole"
            raise InputError("minibatches", self.minibatches, expected)
        return self

    @property
    def batch_size(self) -> int:
        """Sequences per rollout step."""
        return self.groups * self.group_size

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per rollout step."""
        return self.minibatches * self.epochs


class OptimizerSettings(ClosedRecord):
    """The optimizer, whole: what a service falls back to is never relied on."""

    name: Annotated[Literal["adam", "adamw"], Field(description="adam and adamw are one family")]
    learning_rate: Annotated[float, Field(ge=0, description="the spec's learning rate")]
    beta1: Annotated[float, Field(ge=0, lt=1, description="first moment's decay")]
    beta2: Annotated[float, Field(ge=0, lt=1, description="second moment's decay")]
    eps: Annotated[float, Field(gt=0, description="added to the root of the second moment")]
    weight_decay: Annotated[float, Field(ge=0, description="0 for none")]
    grad_clip_norm: Annotated[float, Field(ge=0, description="0 for no clipping")]


class Lora(ClosedRecord):
    """The adapter that is trained."""

    rank: Annotated[int, Field(ge=1, description="the spec's lora_rank")]
    seed: Annotated[
        Seed | None,
        Field(description="seed of its initialization; null where no service takes one"),
    ]
    train_attn: Annotated[bool, Field(description="adapt attention layers")]
    train_mlp: Annotated[bool, Field(description="adapt feed-forward layers")]
    train_unembed: Annotated[bool, Field(description="adapt the output layer")]


class Pilot(ClosedRecord):
    """The short training that the activation gate measures."""

    arm: Annotated[Name, Field(description="the arm whose training is piloted")]
    steps: Annotated[int, Field(ge=1, description="rollout steps")]
    other_arms: Annotated[
        Many[Name], Field(description="further arms piloted, where a metric needs them")
    ] = ()

    @property
    def arms(self) -> tuple[str, ...]:
        """Every piloted arm, the main one first."""
        return (self.arm, *self.other_arms)


class EvaluationSettings(ClosedRecord):
    """How held-out items are scored."""

    temperature: Annotated[float, Field(ge=0, le=10, description="0 for greedy decoding")]
    max_tokens: Annotated[int, Field(ge=1, description="new tokens per turn")]
    items: Annotated[int, Field(ge=1, description="held-out items, the spec's eval.n_examples")]
    every: Annotated[
        Annotated[int, Field(ge=1)] | None,
        Field(description="optional evaluations every so many rollout steps; null for none"),
    ] = None


class ServedModel(ClosedRecord):
    """A model that only samples: a user simulator or a judge."""

    kind: Literal["served"]
    model: Annotated[Name, Field(description="name of the served model")]
    prompt_template: Annotated[Name, Field(description="id of its prompt template")]
    temperature: Annotated[float, Field(ge=0, le=10, description="0 for greedy decoding")]
    max_tokens: Annotated[int, Field(ge=1, description="new tokens per answer")]
    renderer: Annotated[str | None, Field(description="null: the model's own")] = None
    reasoning_effort: Literal["low", "medium", "high"] | None = None
    current_date: Annotated[
        str | None,
        Field(
            pattern=r"^\d{4}-\d\d-\d\d$",
            description="date a prompt template prints, as 2026-01-31, so that it never changes",
        ),
    ] = None
    max_attempts: Annotated[
        int, Field(ge=1, le=20, description="answers asked for before it counts as a failure")
    ] = 3


class ScriptedSimulator(ClosedRecord):
    """The deterministic user of the embedded domain."""

    kind: Literal["scripted"]


class RuleJudge(ClosedRecord):
    """The deterministic judge of the embedded domain."""

    kind: Literal["rules"]


Simulator = Annotated[
    ServedModel | ScriptedSimulator,
    Field(discriminator="kind", description="who plays the user"),
]
Judge = Annotated[
    ServedModel | RuleJudge, Field(discriminator="kind", description="who scores an episode")
]


class Feasibility(ClosedRecord):
    """What the projection adds to measured timings."""

    recovery_seconds: Annotated[float, Field(ge=0, description="reserve for restores and retries")]
    gpu_count: Annotated[
        Annotated[int, Field(ge=0)] | None,
        Field(description="accelerators allotted, or null where nobody says"),
    ] = None
    allocation_source: Annotated[
        str | None, Field(description="where gpu_count comes from; needed with it")
    ] = None


class WarmStart(ClosedRecord):
    """Supervised steps before the comparison, the same checkpoint for every arm."""

    demonstrations: Annotated[int, Field(ge=1, description="demonstrations generated")]
    epochs: Annotated[int, Field(ge=1, le=100, description="passes over them")]
    batch_size: Annotated[int, Field(ge=1, description="demonstrations per optimizer step")]
    learning_rate: Annotated[float, Field(gt=0, description="of the supervised steps")]
    seed: Annotated[Seed, Field(description="of the demonstrations")]
    adapter: Annotated[
        str | None, Field(description="name of a shipped adapter that these steps gave")
    ] = None
    adapter_sha256: Annotated[
        str | None, Field(pattern=r"^[0-9a-f]{64}$", description="its digest, in hexadecimal")
    ] = None


class Fallback(ClosedRecord):
    """One change that may be tried when the activation gate fails, in the order listed."""

    kind: Literal["frozen_initial_teacher", "max_turns"]
    value: Annotated[int, Field(ge=1)] | None = None
    source: Annotated[Name, Field(description="what justifies it")]


class Calibration(ClosedRecord):
    """How much a fallback may be tried; train tasks only."""

    max_steps: Annotated[int, Field(ge=1, description="rollout steps in all")]
    max_wall_minutes: Annotated[float, Field(gt=0, description="minutes in all")]
