"""Execution files: complete ones are read, and what is missing, wrong or contradictory is named."""

import json

import pytest
from pydantic import ValidationError

from evidence.errors import InputError
from evidence.execution import ExecutionFile, contradictions, missing_settings
from evidence.spec import Spec
from tests.evidence.execution_files import dppo_execution, real_spec, sdpo_execution

FILES = {"dppo": dppo_execution, "sdpo": sdpo_execution}


@pytest.fixture
def dppo():
    return dppo_execution()


@pytest.fixture
def sdpo():
    return sdpo_execution()


@pytest.mark.parametrize("name", ["dppo", "sdpo"])
def test_complete_file_is_read_and_agrees_with_its_spec(name):
    spec, execution = real_spec(name), ExecutionFile.parse(json.dumps(FILES[name]()).encode())
    assert missing_settings(spec, execution) == []
    assert contradictions(spec, execution) == []
    assert execution.raw == FILES[name]()


def test_settings_are_typed(dppo, sdpo):
    execution = ExecutionFile.parse(dppo)
    assert execution.roles == {"baseline": "grpo_seed0", "treatment": "dppo_seed0"}
    assert execution.rollout.batch_size == 256
    assert execution.rollout.updates_per_step == 2
    assert execution.arms["grpo_seed0"].trained is True
    assert execution.pilot.arms == ("dppo_seed0",)
    retail = ExecutionFile.parse(sdpo)
    assert retail.pilot.arms == ("sdpo_token", "grpo")
    assert retail.judge.current_date == "2026-01-01"
    assert retail.simulator.max_attempts == 3


def test_loss_settings_are_handed_on_as_they_were_written(dppo):
    """Defaults are not filled in: the code that computes a loss sees what the file says."""
    loss = ExecutionFile.parse(dppo).arms["dppo_seed0"].loss
    assert loss.config == dppo["arms"]["dppo_seed0"]["loss"]


def test_an_arm_may_have_an_advantage_of_its_own(sdpo):
    execution = ExecutionFile.parse(sdpo)
    assert execution.advantage_of("grpo").kind == "group_mean"
    assert execution.advantage_of("sdpo_token").solution_threshold == 0.8


def test_digest_is_that_of_the_file_as_written(dppo):
    before = ExecutionFile.parse(dppo).digest
    assert ExecutionFile.parse(dict(reversed(dppo.items()))).digest == before
    dppo["rollout"]["max_turns"] = 1  # the default, written out
    assert ExecutionFile.parse(dppo).digest != before


def test_file_is_frozen(dppo):
    execution = ExecutionFile.parse(dppo)
    execution.raw["rollout_steps"] = 1
    assert execution.raw["rollout_steps"] == 50
    with pytest.raises(ValidationError):
        execution.rollout_steps = 1


def test_untrained_arm_needs_no_loss(dppo, put):
    changed = put(
        put(dppo, ("arms", "grpo_seed0", "trained"), False), ("arms", "grpo_seed0", "loss")
    )
    assert ExecutionFile.parse(changed).arms["grpo_seed0"].loss is None
    assert missing_settings(real_spec("dppo"), changed) == []


TREATMENT = ("arms", "dppo_seed0")
LOSS = (*TREATMENT, "loss")
WRONG = [
    ((*LOSS, "kind"), "ppo2", "arms.dppo_seed0.loss.kind", "'dppo'"),
    ((*LOSS, "delta_low"), 0, "arms.dppo_seed0.loss.delta_low", "above 0"),
    ((*LOSS, "delta_low"), "0.15", "arms.dppo_seed0.loss.delta_low", "a number"),
    ((*LOSS, "delta_high"), None, "arms.dppo_seed0.loss.delta_high", "binary_tv"),
    ((*LOSS, "ratio_cap"), -1.0, "arms.dppo_seed0.loss.ratio_cap", "above 0"),
    ((*LOSS, "divergence"), "tv", "arms.dppo_seed0.loss.divergence", "'binary_tv'"),
    ((*LOSS, "divergence"), "topk_tv", "arms.dppo_seed0.loss.top_k", "number of tokens"),
    ((*LOSS, "top_k"), 5, "arms.dppo_seed0.loss.top_k", "nothing"),
    ((*LOSS, "clip_ratio_c"), 3.0, "arms.dppo_seed0.loss.clip_ratio_c", "no such field"),
    (
        ("arms", "grpo_seed0", "loss", "clip_high_threshold"),
        0.9,
        "arms.grpo_seed0.loss.clip_high_threshold",
        "1.2 for an epsilon of 0.2",
    ),
    (("arms", "grpo_seed0", "loss", "dual_clip"), 1.0, "arms.grpo_seed0.loss.dual_clip", "above 1"),
    ((*TREATMENT, "role"), "baseline", "arms.dppo_seed0.role", "grpo_seed0 has this one"),
    ((*TREATMENT, "loss"), None, "arms.dppo_seed0.loss", "trained: false"),
    (("arms",), {}, "arms", "at least 1"),
    (("rollout", "minibatches"), 3, "rollout.minibatches", "divisor of groups (32)"),
    (("rollout", "temperature"), 0.0, "rollout.temperature", "greedy samples of a group"),
    (("rollout", "top_p"), 0.9, "rollout.top_p", "not the one the loss compares"),
    (("rollout", "top_k"), 20, "rollout.top_k", "not the one the loss compares"),
    (("rollout", "groups"), True, "rollout.groups", "whole number"),
    (("rollout", "max_turns"), 12, "simulator", "several turns"),
    (("optimizer", "name"), "sgd", "optimizer.name", "'adamw'"),
    (("optimizer", "beta1"), 1.0, "optimizer.beta1", "below 1"),
    (("optimizer", "eps"), 0.0, "optimizer.eps", "above 0"),
    (("lora", "seed"), 2**63, "lora.seed", "at most 9223372036854775807"),
    (("lora", "rank"), 0, "lora.rank", "at least 1"),
    (("pilot", "arm"), "somebody", "pilot.arm", "grpo_seed0, dppo_seed0"),
    (("pilot", "other_arms"), ["x"], "pilot.other_arms[0]", "grpo_seed0"),
    (("denominator", "kind"), "tokens", "denominator.kind", "loss_tokens"),
    (("denominator",), {"kind": "constant"}, "denominator.value", "required"),
    (("denominator",), {"kind": "constant", "value": 0.0}, "denominator.value", "above 0"),
    (("advantage",), {"std_norm": True}, "advantage.kind", "names its kind"),
    (("evaluation", "every"), 0, "evaluation.every", "at least 1"),
    (("max_seq_len_policy",), "truncate", "max_seq_len_policy", "'end_episode'"),
    (("spec_sha256",), "abc", "spec_sha256", "digest of the spec"),
    (("version",), 2, "version", "1"),
    (("surprise",), 1, "surprise", "no such field"),
    (("optimizer", "learning_rate"), float("nan"), "optimizer.learning_rate", "finite"),
]


@pytest.mark.parametrize(("path", "value", "field", "expected"), WRONG)
def test_wrong_setting_is_named_with_a_remedy(dppo, put, path, value, field, expected):
    with pytest.raises(InputError) as error:
        ExecutionFile.parse(put(dppo, path, value), where="x.execution.json")
    assert error.value.field == field
    assert expected in error.value.expected
    assert "\n" not in str(error.value)


WRONG_RETAIL = [
    (("judge",), None, "judge", "reads its feedback"),
    (("judge", "current_date"), "today", "judge.current_date", "2026-01-31"),
    (("judge", "kind"), "human", "judge.kind", "'rules'"),
    (("simulator", "max_tokens"), 0, "simulator.max_tokens", "at least 1"),
    (
        ("arms", "sdpo_token", "advantage", "solution_threshold"),
        1.5,
        "arms.sdpo_token.advantage.solution_threshold",
        "at most 1",
    ),
    (("arms", "sdpo_token", "advantage", "clip"), 0.0, "arms.sdpo_token.advantage.clip", "above 0"),
    (
        ("arms", "sdpo_token", "advantage", "kind"),
        "sdpo_hybrid",
        "arms.sdpo_token.advantage.grpo_weight",
        "required",
    ),
    (("fallbacks", 0, "kind"), "lower_the_threshold", "fallbacks[0].kind", "'max_turns'"),
    (("calibration", "max_steps"), 0, "calibration.max_steps", "at least 1"),
]


@pytest.mark.parametrize(("path", "value", "field", "expected"), WRONG_RETAIL)
def test_wrong_retail_setting_is_named(sdpo, put, path, value, field, expected):
    with pytest.raises(InputError) as error:
        ExecutionFile.parse(put(sdpo, path, value))
    assert error.value.field == field
    assert expected in error.value.expected


def test_without_a_file_every_setting_is_missing_by_name():
    """The two arms of the spec are asked for by name; what is optional is not listed."""
    names = missing_settings(real_spec("dppo"), None)
    assert names[:4] == ["version", "spec_sha256", "environment.name", "arms.grpo_seed0.role"]
    assert "arms.dppo_seed0.loss" in names
    assert "rollout.group_size" in names
    assert "optimizer.beta2" in names
    assert "evaluation.every" not in names
    assert "judge" not in names
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["dppo", "sdpo"])
def test_each_dropped_setting_is_the_one_that_is_missing(name, put):
    """Each required setting is dropped from a complete file in turn, and named, it alone."""
    spec, complete = real_spec(name), FILES[name]()
    wanted = [path for path in missing_settings(spec, None) if not path.startswith("arms.")]
    for path in wanted:
        parts = tuple(path.split("."))
        assert missing_settings(spec, put(complete, parts)) == [path]


def test_settings_that_others_make_necessary_are_missing(sdpo, put):
    spec = real_spec("sdpo")
    assert missing_settings(spec, put(sdpo, ("judge",), None)) == ["judge"]
    assert missing_settings(spec, put(sdpo, ("simulator",))) == ["simulator"]
    assert missing_settings(spec, put(sdpo, ("arms", "sdpo_token", "advantage", "clip"))) == [
        "arms.sdpo_token.advantage.clip"
    ]
    without_kind = put(sdpo, ("arms", "grpo", "loss"), {})
    assert missing_settings(spec, without_kind) == ["arms.grpo.loss.kind"]


@pytest.mark.parametrize("value", [[], 1, "text", None])
def test_missing_settings_survive_sections_of_another_kind(dppo, put, value):
    for section in ("arms", "rollout", "advantage", "pilot"):
        missing_settings(real_spec("dppo"), put(dppo, (section,), value))


CONTRADICTIONS = [
    (("spec_sha256",), "0" * 64, "spec_sha256", "digest"),
    (("rollout", "groups"), 16, "rollout.groups", "groups * group_size = 256"),
    (("rollout", "epochs"), 2, "rollout_steps", "rollout_steps * minibatches * epochs = 100"),
    (("rollout_steps",), 49, "rollout_steps", "= 100"),
    (("rollout", "max_tokens"), 1024, "rollout.max_tokens", "less than 1024"),
    (("optimizer", "learning_rate"), 1e-5, "optimizer.learning_rate", "2e-05"),
    (("optimizer", "beta2"), 0.999, "optimizer.beta2", "0.95"),
    (("lora", "rank"), 16, "lora.rank", "32"),
    (("evaluation", "items"), 100, "evaluation.items", "1319"),
    (("arms", "dppo_seed0", "role"), "candidate", "arms", "criterion primary weighs it"),
]


@pytest.mark.parametrize(("path", "value", "field", "expected"), CONTRADICTIONS)
def test_setting_that_contradicts_the_spec_is_found(dppo, put, path, value, field, expected):
    found = contradictions(real_spec("dppo"), ExecutionFile.parse(put(dppo, path, value)))
    assert field in [finding.field for finding in found]
    assert any(expected in finding.expected for finding in found if finding.field == field)
    assert all(finding.to_record()["expected"] in str(finding) for finding in found)


def test_arms_of_other_names_are_found_from_both_sides(dppo):
    dppo["arms"]["ppo"] = dppo["arms"].pop("grpo_seed0")
    found = contradictions(real_spec("dppo"), ExecutionFile.parse(dppo))
    assert [(f.field, f.value) for f in found[:2]] == [
        ("arms.grpo_seed0", None),
        ("arms.ppo", "ppo"),
    ]


def test_arm_that_states_another_number_of_updates_is_found(dppo, put):
    """Each arm of the spec says two updates per batch; one minibatch makes one."""
    changed = put(put(dppo, ("rollout", "minibatches"), 1), ("rollout_steps",), 100)
    found = contradictions(real_spec("dppo"), ExecutionFile.parse(changed))
    assert [f.field for f in found] == ["rollout.minibatches * epochs"] * 2


def test_optimizer_of_another_family_is_found(dppo, put):
    spec = real_spec("dppo").raw
    spec["optimizer"]["name"] = "trimuon"
    found = contradictions(Spec.parse(spec), ExecutionFile.parse(dppo))
    assert ("optimizer.name", "adamw") in [(f.field, f.value) for f in found]


def test_rollout_correction_is_handed_on_whole(dppo):
    dppo["rollout_correction"] = {"level": "token", "threshold": 2.0, "batch_normalize": False}
    assert ExecutionFile.parse(dppo).rollout_correction.config == dppo["rollout_correction"]


@pytest.mark.parametrize("settings", [None, 3, [], "loss"])
def test_missing_settings_survive_an_arm_of_another_kind(dppo, put, settings):
    missing_settings(real_spec("dppo"), put(dppo, ("arms", "grpo_seed0"), settings))


def test_unknown_kind_is_wrong_but_not_missing(dppo, put):
    changed = put(dppo, ("arms", "dppo_seed0", "loss"), {"kind": "ppo2"})
    assert missing_settings(real_spec("dppo"), changed) == []


def test_number_of_thousands_of_digits_is_refused(dppo):
    text = json.dumps(dppo).replace('"rollout_steps": 50', f'"rollout_steps": {"9" * 5000}')
    with pytest.raises(InputError, match="number literal"):
        ExecutionFile.parse(text)
    short = json.dumps(dppo).replace('"rollout_steps": 50', f'"rollout_steps": {"9" * 500}')
    with pytest.raises(InputError, match="number literal"):
        ExecutionFile.parse(short)
