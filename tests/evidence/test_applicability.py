import pytest

from evidence.applicability import COVERED_FEATURES, check_applicability
from evidence.errors import InputError

FALSE = {name: False for names in COVERED_FEATURES.values() for name in names}


@pytest.mark.parametrize(
    ("check", "features"),
    [
        ("correctness_preflight", ("custom_loss", "custom_optimizer")),
        ("restoration_preflight", ("paired_training_arms", "checkpoint_restore")),
        ("generation_audit", ("generated_training_data",)),
        ("decision_rule", ("paired_comparison", "adaptive_selection")),
    ],
)
def test_each_covered_feature_requires_its_check(check, features):
    """Whatever the check's own block says, and whatever the other features are."""
    for name in features:
        spec = {"experiment_features": {**FALSE, name: True}, check: {"required": False}}
        found = check_applicability(spec, check)
        assert (found.status, found.enforce) == ("required", True)
        assert found.reasons == (f"experiment_features: {name} is true",)
        assert list(found.features) == list(features)


def test_other_features_do_not_require_a_check():
    """Records: a learned generator alone does not cover generated training data."""
    spec = {"experiment_features": {**FALSE, "learned_generator": True, "custom_loss": True}}
    assert check_applicability(spec, "generation_audit").status == "not_applicable"


@pytest.mark.parametrize("flag", ["required", "applicable"])
def test_an_explicit_contract_requires_a_check(flag):
    spec = {"experiment_features": FALSE, "restoration_preflight": {flag: True}}
    assert check_applicability(spec, "restoration_preflight").status == "required"


@pytest.mark.parametrize("flag", ["required", "applicable"])
def test_a_check_that_opts_out_does_not_apply_when_its_features_are_false(flag):
    spec = {"experiment_features": FALSE, "generation_audit": {flag: False}}
    assert check_applicability(spec, "generation_audit").to_record() == {
        "check": "generation_audit",
        "status": "not_applicable",
        "enforce": False,
        "reasons": ["spec.generation_audit opts out and no feature it covers is true"],
        "features": {"generated_training_data": False},
    }


def test_registered_diagnostics_require_the_activation_gate_unless_it_opts_out():
    """It covers no feature: that something is to be measured is the only sign it can have."""
    checks = [{"metric": "m", "min": 0, "max": 1}]

    registered = check_applicability({"activation_gate": {"checks": checks}}, "activation_gate")
    opted_out = {"activation_gate": {"checks": checks, "applicable": False}}
    elsewhere = {"experiment_features": FALSE, "generation_audit": {"checks": checks}}

    assert registered.status == "required"
    assert registered.reasons == ("spec.activation_gate is present",)
    assert check_applicability(opted_out, "activation_gate").status == "not_applicable"
    assert check_applicability(elsewhere, "generation_audit").status == "not_applicable"


@pytest.mark.parametrize("rule", [{"version": 1}, [1], "rule", 0])
def test_any_decision_rule_requires_a_decision(rule):
    spec = {"experiment_features": FALSE, "decision_rule": rule}
    assert check_applicability(spec, "decision_rule").status == "required"


@pytest.mark.parametrize("rule", [None, {}])
def test_no_decision_rule_needs_no_decision(rule):
    spec = {"experiment_features": FALSE, "decision_rule": rule}
    found = check_applicability(spec, "decision_rule")
    assert found.status == "not_applicable"
    assert found.reasons == (
        "spec.decision_rule does not ask for it and no feature it covers is true",
    )


@pytest.mark.parametrize("value", [None, "false", 0, [], "no"])
def test_a_feature_that_is_not_declared_leaves_the_check_unknown_and_enforced(value):
    """Opting out does not help: missing feature evidence stays unknown."""
    features = {**FALSE, "generated_training_data": value}
    spec = {"experiment_features": features, "generation_audit": {"required": False}}
    found = check_applicability(spec, "generation_audit")
    assert (found.status, found.enforce) == ("unknown", True)
    assert found.reasons == (
        "experiment_features: generated_training_data is not declared as true or false",
    )


@pytest.mark.parametrize("spec", [None, [], "x", 1, {}, {"experiment_features": [True]}])
def test_a_malformed_spec_leaves_every_check_unknown(spec):
    for check in set(COVERED_FEATURES) - {"activation_gate"}:
        assert check_applicability(spec, check).status == "unknown"


def test_a_flag_that_is_neither_true_nor_false_cannot_opt_out():
    spec = {"experiment_features": FALSE, "generation_audit": {"required": 0}}
    assert check_applicability(spec, "generation_audit").status == "unknown"


def test_an_unknown_check_is_a_mistake_of_the_caller():
    with pytest.raises(InputError, match="check: expected one of correctness_preflight"):
        check_applicability({}, "correctness_preflights")


@pytest.mark.parametrize(
    ("short", "check"),
    [
        ("correctness", "correctness_preflight"),
        ("restoration", "restoration_preflight"),
        ("activation", "activation_gate"),
        ("decision", "decision_rule"),
    ],
)
def test_a_check_may_be_asked_for_by_its_gates_name(short, check):
    assert check_applicability({}, short) == check_applicability({}, check)
    assert check_applicability({}, short).check == check
