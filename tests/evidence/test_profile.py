"""A profile changes what it says, records each change, and leaves the original readable."""

import json

import pytest

from evidence.deviations import FIELDS
from evidence.errors import InputError
from evidence.execution import ExecutionFile, contradictions
from evidence.profile import (
    Profile,
    apply_profile,
    closest_served_model,
    substitute_served_model,
    unscaled,
)
from evidence.spec import Spec
from tests.evidence.execution_files import dppo_execution, real_spec, sdpo_execution

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"
NOTHING = {"version": 1, "name": "same", "reason": "none needed"}
LAPTOP = {
    "version": 1,
    "name": "laptop",
    "reason": "two cores, no GPU",
    "model": {"base_model": SMOL, "renderer": "qwen3_instruct", "lora_rank": 16},
    "max_groups": 9,
    "max_group_size": 4,
    "max_rollout_steps": 6,
    "max_items": 40,
}


@pytest.fixture
def dppo():
    return real_spec("dppo"), ExecutionFile.parse(dppo_execution())


@pytest.fixture
def laptop(dppo):
    return apply_profile(*dppo, Profile.parse(LAPTOP))


def test_scaled_plan_agrees_with_itself(laptop):
    """The execution file belongs to the scaled spec, and nothing between them contradicts."""
    assert laptop.execution.spec_sha256 == laptop.spec.digest
    assert contradictions(laptop.spec, laptop.execution) == []


def test_scaled_sizes_follow_from_the_caps(laptop):
    """At most 9 groups in 2 minibatches of complete groups: 8. Six rollout steps of 2 updates."""
    assert laptop.spec.base_model == SMOL
    assert laptop.spec.batch_size == 8 * 4
    assert laptop.spec.steps == 6 * 2
    assert laptop.spec.eval.n_examples == laptop.execution.evaluation.items == 40
    assert laptop.spec.lora_rank == laptop.execution.lora.rank == 16
    assert laptop.spec.dataset.n_examples == 6 * 8
    assert laptop.execution.renderer == "qwen3_instruct"


def test_each_change_is_a_deviation_in_the_contracts_form(laptop):
    assert [deviation["field"] for deviation in laptop.deviations] == [
        "model",
        "model",
        "effective_batch",
        "steps",
        "dataset",
        "evaluator",
    ]
    assert all(deviation["field"] in FIELDS for deviation in laptop.deviations)
    batch = laptop.deviations[2]
    assert batch["original"].startswith("128 sequences per optimizer step")
    assert batch["effective"].startswith("16 sequences per optimizer step")
    assert {deviation["reason"] for deviation in laptop.deviations} == {"two cores, no GPU"}


def test_original_hypothesis_counts_as_untested(laptop):
    assert laptop.original_hypothesis_tested is False
    for part in (SMOL, "12 optimizer steps", "40 held-out items", "profile laptop"):
        assert part in laptop.tested_instead


def test_original_gate_is_kept_beside_the_scaled_one(dppo, laptop):
    """Its ranges stay; only the model's name, which cannot be met, is another."""
    original = dppo[0].raw["activation_gate"]
    assert laptop.original_activation_gate == original
    assert laptop.spec.raw["original_activation_gate"] == original
    scaled = laptop.spec.raw["activation_gate"]
    assert scaled["checks"][:4] == original["checks"][:4]
    assert scaled["checks"][4]["one_of"] == [SMOL]
    assert original["checks"][4]["one_of"] == ["Qwen/Qwen3.5-2B"]


def test_scaled_spec_names_its_origin(dppo, laptop):
    assert laptop.spec.derived_from == laptop.original_spec_sha256 == dppo[0].digest
    assert laptop.spec.digest != dppo[0].digest
    assert laptop.spec.raw["profile"] == {"name": "laptop", "sha256": Profile.parse(LAPTOP).digest}
    assert laptop.spec.raw["deviations"] == list(laptop.deviations)
    json.dumps(laptop.to_record(), allow_nan=False)


def test_profile_that_changes_nothing_leaves_everything(dppo):
    plan = apply_profile(*dppo, Profile.parse(NOTHING | {"max_groups": 1000, "max_items": 5000}))
    assert plan == unscaled(*dppo)
    assert plan.original_hypothesis_tested is True
    assert plan.deviations == ()
    assert plan.spec.digest == dppo[0].digest


def test_learning_rate_counts_as_another_objective(dppo):
    plan = apply_profile(*dppo, Profile.parse(NOTHING | {"learning_rate": 2e-4}))
    assert [deviation["field"] for deviation in plan.deviations] == ["objective"]
    assert plan.spec.optimizer.lr == plan.execution.optimizer.learning_rate == 2e-4
    assert {arm.lr for arm in plan.spec.arms} == {2e-4}
    configs = [arm.optimizer_config for arm in plan.spec.restoration_preflight.groups[0].arms]
    assert {config["learning_rate"] for config in configs} == {2e-4}
    assert contradictions(plan.spec, plan.execution) == []


def test_answers_are_cut_for_training_and_for_evaluation():
    spec, execution = real_spec("sdpo"), ExecutionFile.parse(sdpo_execution())
    caps = {"max_tokens": 64, "max_turns": 6, "max_pilot_steps": 1}
    plan = apply_profile(spec, execution, Profile.parse(NOTHING | caps))
    assert [deviation["field"] for deviation in plan.deviations] == [
        "dataset",
        "evaluator",
        "dataset",
        "steps",
    ]
    assert plan.execution.rollout.max_tokens == plan.execution.evaluation.max_tokens == 64
    assert plan.execution.rollout.max_turns == 6
    assert plan.execution.pilot.steps == 1


def test_other_judge_and_simulator_are_other_evaluators():
    spec, execution = real_spec("sdpo"), ExecutionFile.parse(sdpo_execution())
    others = {"simulator": {"kind": "scripted"}, "judge": {"kind": "rules"}}
    plan = apply_profile(spec, execution, Profile.parse(NOTHING | others))
    assert [(d["field"], d["original"], d["effective"]) for d in plan.deviations] == [
        ("evaluator", "simulator Qwen/Qwen3-8B", "simulator scripted"),
        ("evaluator", "judge openai/gpt-oss-120b", "judge rules"),
    ]
    assert plan.execution.judge.kind == "rules"


def test_environment_settings_are_replaced_one_by_one(dppo):
    profile = Profile.parse(NOTHING | {"environment_settings": {"held_out": 40}})
    plan = apply_profile(*dppo, profile)
    assert plan.execution.environment.settings == {"held_out": 40}
    assert [deviation["field"] for deviation in plan.deviations] == ["dataset"]


def test_too_few_groups_for_the_minibatches_is_refused(dppo):
    with pytest.raises(InputError, match=r"max_groups.*at least 2") as error:
        apply_profile(*dppo, Profile.parse(NOTHING | {"max_groups": 1}))
    assert error.value.value == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_items": 0}, "max_items"),
        ({"name": ""}, "name"),
        ({"max_item": 4}, "max_item"),
        ({"version": 2}, "version"),
        ({"model": {"base_model": SMOL}}, "model.renderer"),
        ({"learning_rate": 0}, "learning_rate"),
    ],
)
def test_wrong_profile_is_named(change, field):
    with pytest.raises(InputError) as error:
        Profile.parse(NOTHING | change, where="laptop.json")
    assert error.value.field == field


SERVED = ["Qwen/Qwen3-8B", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "openai/gpt-oss-120b", SMOL]


@pytest.mark.parametrize(
    ("requested", "served", "chosen"),
    [
        ("Qwen/Qwen3.5-4B", SERVED, "Qwen/Qwen3.5-4B"),
        ("Qwen/Qwen3.5-0.8B", SERVED, "Qwen/Qwen3.5-4B"),
        ("Qwen/Qwen3.5-27B", SERVED, "Qwen/Qwen3.5-9B"),
        ("Qwen/Qwen2.5-7B", SERVED, "Qwen/Qwen3-8B"),
        ("openai/gpt-oss-20b", SERVED, "openai/gpt-oss-120b"),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", SERVED, SMOL),
        ("meta-llama/Llama-3.2-1B", SERVED, None),
        ("somebody/X-3B", ["somebody/X-9B", "somebody/X-1B"], "somebody/X-1B"),
        ("a/M-4B-Instruct", ["a/M-4B", "a/M-4B-Instruct-v2", "b/M-4B-Instruct"], "b/M-4B-Instruct"),
        ("tiny", ["Qwen/Qwen3-8B"], None),
        ("x", [], None),
    ],
)
def test_closest_served_model_is_of_the_family_and_nearest_in_size(requested, served, chosen):
    """From 3B both 1B and 9B are a factor of 3 away: the smaller one is taken."""
    for order in (served, served[::-1]):
        name, reason = closest_served_model(requested, order)
        assert name == chosen
        assert requested in reason


def test_model_that_is_not_served_is_replaced_and_recorded(dppo):
    plan = substitute_served_model(unscaled(*dppo), SERVED)
    assert plan.spec.base_model == "Qwen/Qwen3.5-4B"
    assert [deviation["field"] for deviation in plan.deviations] == ["model"]
    assert "closest served model" in plan.deviations[0]["reason"]
    assert plan.spec.activation_gate.checks[4].one_of == ("Qwen/Qwen3.5-4B",)
    assert plan.original_hypothesis_tested is False
    assert contradictions(plan.spec, plan.execution) == []


def test_replacement_after_a_profile_keeps_the_first_deviations_and_origin(dppo):
    scaled = apply_profile(*dppo, Profile.parse(NOTHING | {"max_items": 40}))
    plan = substitute_served_model(scaled, SERVED)
    assert [deviation["field"] for deviation in plan.deviations] == ["evaluator", "model"]
    assert plan.spec.raw["deviations"] == [dict(deviation) for deviation in plan.deviations]
    assert plan.spec.derived_from == dppo[0].digest
    assert plan.original_activation_gate == dppo[0].raw["activation_gate"]
    assert plan.spec.raw["profile"]["name"] == "same"


def test_served_model_is_left_alone(dppo):
    plan = unscaled(*dppo)
    assert substitute_served_model(plan, ["Qwen/Qwen3.5-2B", *SERVED]) is plan


@pytest.mark.parametrize(("served", "strict"), [(SERVED, True), ([SMOL], False), ([], False)])
def test_strict_launch_and_missing_family_are_refused(dppo, served, strict):
    with pytest.raises(InputError, match=r"base_model.*served models"):
        substitute_served_model(unscaled(*dppo), served, strict=strict)


def test_profile_with_the_model_of_the_spec_keeps_its_prompts(dppo):
    model = {"base_model": "Qwen/Qwen3.5-2B", "renderer": "another", "system_prompt": "x"}
    plan = apply_profile(*dppo, Profile.parse(NOTHING | {"model": model}))
    assert plan.deviations == ()
    assert plan.execution.renderer == "qwen3_5_disable_thinking"


def test_profile_may_bring_a_system_prompt(dppo):
    model = LAPTOP["model"] | {"system_prompt": "Answer with a number."}
    plan = apply_profile(*dppo, Profile.parse(NOTHING | {"model": model}))
    assert plan.execution.system_prompt == "Answer with a number."


def test_spec_without_gates_can_be_scaled(dppo, put):
    """No activation gate, no restoration preflight, no learning rate of an arm's own."""
    raw = dppo[0].raw
    for name in ("activation_gate", "restoration_preflight"):
        raw = put(raw, (name,), None)
    for arm in (0, 1):
        raw = put(raw, ("arms", arm, "lr"))
    profile = Profile.parse(LAPTOP | {"learning_rate": 2e-4})
    plan = apply_profile(Spec.parse(raw), dppo[1], profile)
    assert plan.original_activation_gate is None
    assert plan.spec.optimizer.lr == 2e-4


def test_setting_that_is_there_already_is_no_change(dppo):
    execution = ExecutionFile.parse(
        dppo_execution() | {"environment": {"name": "gsm8k", "settings": {"held_out": 40}}}
    )
    settings = {"environment_settings": {"held_out": 40}, "learning_rate": 2e-5}
    assert apply_profile(dppo[0], execution, Profile.parse(NOTHING | settings)).deviations == ()


def test_optimizer_settings_that_the_preflight_does_not_name_stay_out_of_it(dppo, put):
    raw = put(
        dppo[0].raw, ("restoration_preflight", "groups", 0, "arms", 0, "optimizer_config"), {}
    )
    plan = apply_profile(Spec.parse(raw), dppo[1], Profile.parse(NOTHING | {"learning_rate": 1e-3}))
    assert plan.spec.restoration_preflight.groups[0].arms[0].optimizer_config == {}
