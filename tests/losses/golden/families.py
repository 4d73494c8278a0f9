"""Which checker a golden case belongs to, by its parameters; an unknown form is a failure."""

from collections.abc import Callable
from typing import TypeAlias

from tests.losses.golden import policy, sdpo, service
from tests.losses.golden.compare import Computed
from tests.losses.golden.loading import Block

Implementation: TypeAlias = Callable[[Block], Computed]

FAMILIES: dict[str, dict[str, Implementation]] = {
    "policy": {"torch": policy.computed_by_torch, "reference": policy.computed_by_reference},
    "sdpo_loss": {"torch": sdpo.loss_by_torch, "reference": sdpo.loss_by_reference},
    "sdpo_siblings": {"project": sdpo.siblings},
    "sdpo_teacher": {"torch": sdpo.teacher_by_torch, "reference": sdpo.teacher_by_reference},
    "sdpo_advantage": {
        "torch": sdpo.advantage_by_torch,
        "reference": sdpo.advantage_by_reference,
    },
    "group_mean": {
        "torch": service.group_mean_by_torch,
        "reference": service.group_mean_by_reference,
    },
    "verl_advantage": {"torch": service.verl_by_torch, "reference": service.verl_by_reference},
    "rollout_correction": {
        "torch": service.correction_by_torch,
        "reference": service.correction_by_reference,
    },
    "datum_layout": {"project": service.layout},
    "custom_weights": {
        "torch": service.custom_weights_by_torch,
        "reference": service.custom_weights_by_reference,
    },
    "diagnostics": {"torch": service.counts_by_torch, "reference": service.counts_by_reference},
}


def family(block: Block) -> str:
    """Name the family of a case.

    Raises:
        AssertionError: if its parameters are of no known form.
    """
    params, inputs = block.params, block.inputs
    forms = {
        "policy": "loss_mode" in params or "loss_fn" in params,
        "sdpo_loss": "grad_with_respect_to" in params,
        "sdpo_siblings": "success_reward_threshold" in params,
        "sdpo_teacher": "teacher_update_rate" in params,
        "sdpo_advantage": "max_context_length" in params,
        "group_mean": "groups" in inputs,
        "verl_advantage": "norm_adv_by_std_in_grpo" in params,
        "rollout_correction": "rollout_is" in params,
        "datum_layout": "trajectory_advantage" in params,
        "custom_weights": "cross_entropy_weights" in block.expected and "loss_mode" not in params,
        "diagnostics": "quantile" in params,
    }
    names = [name for name, fits in forms.items() if fits]
    if len(names) != 1:
        raise AssertionError(f"{block.id}: of {len(names)} known forms {names}; expected one")
    return names[0]


def precision_matters(block: Block) -> bool:
    """Whether the published decisions themselves differ between float32 and float64."""
    other = block.other or {}
    return "keep_mask" in other and other["keep_mask"] != block.expected.get("keep_mask")
