"""What an arm is, in code: its role, loss, advantage, and the identity its seeds derive from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evidence.canonical import derive_seed, digest
from evidence.execution import ExecutionFile
from evidence.spec import Spec


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """One arm as it is executed.

    Attributes:
        name: as the spec writes it.
        role: treatment, baseline, or what the decision's weights name.
        trained: whether it is trained at all.
        seed: training seed.
        loss: settings of its loss; None for an untrained arm.
        advantage: settings of its advantages.
        identity: digest of everything that makes the arm what it is, without its name: two arms
            that are the same thing sample the same tokens.
    """

    name: str
    role: str
    trained: bool
    seed: int
    loss: Mapping[str, Any] | None
    advantage: Mapping[str, Any]
    identity: str

    @property
    def distils(self) -> bool:
        """Whether its advantages come from a teacher that scores its tokens again."""
        return str(self.advantage["kind"]).startswith("sdpo_")

    @property
    def reads_teacher(self) -> bool:
        """Whether its loss itself is given the teacher's scores, beside the advantages."""
        return self.loss is not None and str(self.loss["kind"]).startswith("sdpo_")

    @property
    def top_k(self) -> int | None:
        """Tokens a position that its loss compares; None for a loss on the sampled token alone."""
        if self.loss is None or self.loss["kind"] != "sdpo_logit":
            return None
        return int(self.loss["top_k"])

    def sampling_seed(
        self, spec_sha256: str, phase: str, step: int | str, group: int, sample: int
    ) -> int:
        """Seed of one completion."""
        return derive_seed(spec_sha256, self.identity, self.seed, phase, step, group, sample)


def arm_plans(spec: Spec, execution: ExecutionFile) -> tuple[ArmPlan, ...]:
    """The arms of a spec with their settings, in the spec's order."""
    plans = []
    for arm in spec.arms:
        settings = execution.arms[arm.name]
        loss = settings.loss.config if settings.loss is not None else None
        advantage = execution.advantage_of(arm.name).config
        seed = arm.seed if arm.seed is not None else _only_seed(spec)
        identity = digest({"trained": settings.trained, "loss": loss, "advantage": advantage})
        plans.append(
            ArmPlan(
                name=arm.name,
                role=settings.role,
                trained=settings.trained,
                seed=seed,
                loss=loss,
                advantage=advantage,
                identity=identity,
            )
        )
    return tuple(plans)


def _only_seed(spec: Spec) -> int:
    return spec.rule.seeds[0] if spec.decision_rule is not None else 0
