"""Settings of losses, advantages and denominators, as an execution file states them.

The code that computes them lives elsewhere and is given these values as a plain mapping
(`config`); what is checked here is that every setting is there and can be meant.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from evidence.errors import InputError
from evidence.parsing import ClosedRecord, Name

Divergence = Literal[
    "binary_tv",
    "binary_kl",
    "topk_tv",
    "topk_kl",
    "ratio",
    "none",
    "ratio_ablation_positive",
    "ratio_ablation_negative",
    "ratio_ablation_both",
]
Anchor = Literal["sampling", "recompute"]

Ratio = Annotated[float, Field(gt=0)]
_ANCHOR = Field(description="the ratio is taken against the sampler's or recomputed values")
TopK = Annotated[
    int, Field(ge=1, le=1000, description="log-probabilities per position the service must return")
]


class _Method(ClosedRecord):
    @property
    def config(self) -> dict[str, Any]:
        """The settings that were written down, as the code that computes the method takes them."""
        return self.model_dump(exclude_unset=True)


class ImportanceSampling(_Method):
    """``-ratio * advantage`` summed over loss tokens."""

    kind: Literal["importance_sampling"]


class GrpoClip(_Method):
    """PPO's clipped surrogate with bounds on the ratio itself."""

    kind: Literal["grpo_clip"]
    clip_low_threshold: Annotated[
        float, Field(gt=0, le=1, description="lower bound on the ratio: 0.8 for an epsilon of 0.2")
    ]
    clip_high_threshold: Annotated[
        float, Field(ge=1, description="upper bound on the ratio: 1.2 for an epsilon of 0.2")
    ]
    dual_clip: (
        Annotated[
            float,
            Field(gt=1, description="bound for negative advantages; null where there is none"),
        ]
        | None
    )
    anchor: Annotated[Anchor, _ANCHOR] = "sampling"
    log_ratio_limit_nats: Annotated[
        float | None, Field(gt=0, description="beyond it the gradient is 0; null for no limit")
    ] = None


class Cispo(_Method):
    """Policy gradient weighted by the clipped, detached ratio."""

    kind: Literal["cispo"]
    clip_low_threshold: Annotated[
        float, Field(ge=0, le=1, description="lower bound on the weight; 0 for none")
    ]
    clip_high_threshold: Annotated[float, Field(ge=1, description="upper bound on the weight")]


class Dppo(_Method):
    """Policy gradient with the tokens masked whose divergence left the trust region."""

    kind: Literal["dppo"]
    divergence: Annotated[Divergence, Field(description="how policies are compared at a token")]
    anchor: Annotated[
        Anchor,
        Field(description="the mask compares with the sampler's or with recomputed values"),
    ]
    delta_low: Annotated[
        float | None,
        Field(gt=0, description="divergence allowed downwards; it has no usual default"),
    ]
    delta_high: Annotated[
        float | None,
        Field(gt=0, description="divergence allowed upwards; it has no usual default"),
    ]
    ratio_cap: Annotated[
        Ratio | None,
        Field(description="C, the largest ratio used as a weight; null for no cap"),
    ]
    top_k: TopK | None = None

    @model_validator(mode="after")
    def _settings_where_needed(self) -> Self:
        for name in ("delta_low", "delta_high"):
            if self.divergence != "none" and getattr(self, name) is None:
                expected = f"a number above 0, for divergence {self.divergence}"
                raise InputError(name, None, expected)
        if self.divergence.startswith("topk") and self.top_k is None:
            raise InputError("top_k", None, f"a number of tokens, for divergence {self.divergence}")
        if not self.divergence.startswith("topk") and self.top_k is not None:
            raise InputError("top_k", self.top_k, f"nothing, for divergence {self.divergence}")
        return self


class SdpoTokenLoss(_Method):
    """Token-level self-distillation with the current student's log-probability in the advantage."""

    kind: Literal["sdpo_token"]
    is_clip: Annotated[
        Ratio | None, Field(description="cap of the importance ratio; null for none")
    ]
    anchor: Annotated[Anchor, _ANCHOR] = "sampling"


class SdpoLogitLoss(_Method):
    """Distillation of the teacher's next-token distribution over the student's top-K tokens."""

    kind: Literal["sdpo_logit"]
    alpha: Annotated[
        float, Field(ge=0, le=1, description="0 is KL(teacher||student), 1 is KL(student||teacher)")
    ]
    top_k: Annotated[TopK | None, Field(description="null for the whole vocabulary")]
    add_tail: Annotated[bool, Field(description="the rest of the mass as one more token")]
    is_clip: Annotated[
        Ratio | None, Field(description="cap of the importance ratio; null for none")
    ]
    anchor: Annotated[Anchor, _ANCHOR] = "sampling"


LossSettings = Annotated[
    ImportanceSampling | GrpoClip | Cispo | Dppo | SdpoTokenLoss | SdpoLogitLoss,
    Field(discriminator="kind", description="the loss of the arm, as code"),
]


class GroupMean(_Method):
    """Reward minus the mean of its group."""

    kind: Literal["group_mean"]
    std_norm: Annotated[bool, Field(description="divide by the group's standard deviation")]
    epsilon: Annotated[float, Field(gt=0, le=1, description="added to that standard deviation")] = (
        1e-6
    )


class _Sdpo(_Method):
    clip: Annotated[
        float | None,
        Field(gt=0, description="bound on |teacher - sampling| in nats; null for none"),
    ]
    solution_threshold: Annotated[
        float,
        Field(ge=0, le=1, description="smallest reward of an attempt shown as the solution"),
    ]
    solution_choice: Annotated[
        Literal["best", "first", "none"],
        Field(description="best reward (ties by sample index), first above the bound, or none"),
    ]
    exclude_self: Annotated[
        bool, Field(description="never show an attempt to itself as the solution")
    ]
    feedback: Annotated[
        Literal["judge", "environment", "none"],
        Field(description="whose words on the attempt the teacher reads"),
    ]
    feedback_only_without_solution: Annotated[
        bool, Field(description="leave the feedback out where a solution is shown")
    ]
    teacher: Annotated[
        Literal["current", "initial"],
        Field(description="the policy that sampled, or the frozen initial one"),
    ]
    prompt_template: Annotated[Name, Field(description="id of the teacher's prompt template")]
    max_teacher_tokens: Annotated[
        int, Field(ge=1, description="longest teacher sequence the service can score")
    ]
    over_length: Annotated[
        Literal["drop_solution", "zero_advantage"],
        Field(description="what happens to a longer teacher sequence; either way it is counted"),
    ]


class SdpoToken(_Sdpo):
    """Per-token teacher log-probability minus sampling log-probability."""

    kind: Literal["sdpo_token"]


class SdpoSequence(_Sdpo):
    """The token advantages of a trajectory averaged into one number."""

    kind: Literal["sdpo_sequence"]


class SdpoHybrid(_Sdpo):
    """``grpo_weight * group_mean + (1 - grpo_weight) * sdpo_token``."""

    kind: Literal["sdpo_hybrid"]
    grpo_weight: Annotated[float, Field(ge=0, le=1, description="lambda of the mixture")]


AdvantageSettings = Annotated[
    GroupMean | SdpoToken | SdpoSequence | SdpoHybrid,
    Field(discriminator="kind", description="what a token's loss is multiplied with"),
]


class SumDenominator(_Method):
    """No division: the sum over tokens, which is what a Tinker service computes."""

    kind: Literal["none"]


class TokenDenominator(_Method):
    """Divide by the loss tokens of the minibatch."""

    kind: Literal["loss_tokens"]


class SequenceDenominator(_Method):
    """Divide by the sequences of the minibatch."""

    kind: Literal["sequences"]


class ConstantDenominator(_Method):
    """Divide by a number stated beforehand."""

    kind: Literal["constant"]
    value: Annotated[float, Field(gt=0, description="the constant")]


DenominatorSettings = Annotated[
    SumDenominator | TokenDenominator | SequenceDenominator | ConstantDenominator,
    Field(discriminator="kind", description="what the summed loss is divided by"),
]


class RolloutCorrection(ClosedRecord):
    """Truncated importance weights between the sampler and the trainer."""

    level: Annotated[Literal["token", "sequence"], Field(description="per token or per sequence")]
    threshold: Annotated[float, Field(gt=0, description="largest weight, e.g. 2.0")]
    batch_normalize: Annotated[bool, Field(description="divide by the mean weight")]

    @property
    def config(self) -> dict[str, Any]:
        """The settings as a plain mapping."""
        return self.model_dump()
