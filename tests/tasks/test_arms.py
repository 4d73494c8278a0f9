"""What an arm is named does not enter its seeds; what it is does."""

from __future__ import annotations

import copy

from evidence.execution import ExecutionFile
from evidence.spec import Spec
from tasks.arms import ArmPlan, arm_plans
from tests.flows import tiny_spec


def _arms(execution: tiny_spec.Document, document: tiny_spec.Document) -> dict[str, ArmPlan]:
    plans = arm_plans(Spec.parse(document), ExecutionFile.parse(execution))
    return {plan.name: plan for plan in plans}


def test_arms_keep_the_spec_s_order_and_the_execution_file_s_roles() -> None:
    document = tiny_spec.spec()

    arms = _arms(tiny_spec.execution(document), document)

    assert list(arms) == ["grpo", "dppo"]
    assert (arms["grpo"].role, arms["dppo"].role) == ("baseline", "treatment")


def test_same_arm_under_two_names_samples_the_same() -> None:
    document, execution = tiny_spec.same_arm_twice()

    arms = _arms(execution, document)

    seeds = [arm.sampling_seed("0" * 64, "train", 3, 1, 2) for arm in arms.values()]
    assert seeds[0] == seeds[1]


def test_seeds_differ_by_loss_phase_step_group_and_sample() -> None:
    document = tiny_spec.spec()
    grpo, dppo = _arms(tiny_spec.execution(document), document).values()
    spec = "0" * 64

    seeds = {
        grpo.sampling_seed(spec, "train", 0, 0, 0),
        dppo.sampling_seed(spec, "train", 0, 0, 0),
        grpo.sampling_seed(spec, "pilot", 0, 0, 0),
        grpo.sampling_seed(spec, "train", 1, 0, 0),
        grpo.sampling_seed(spec, "train", 0, 1, 0),
        grpo.sampling_seed(spec, "train", 0, 0, 1),
        grpo.sampling_seed("1" * 64, "train", 0, 0, 0),
    }

    assert len(seeds) == 7


def test_delta_is_part_of_what_an_arm_is() -> None:
    document = tiny_spec.spec()
    execution = tiny_spec.execution(document)
    other = copy.deepcopy(execution)
    other["arms"]["dppo"]["loss"]["delta_low"] = 0.2

    one, two = (_arms(made, document)["dppo"] for made in (execution, other))

    assert one.identity != two.identity
