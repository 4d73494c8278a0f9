import json
from pathlib import Path

import pytest

from evidence.spec_preflight import validate

SEEDS = Path(__file__).parent / "seeds"
SPEC = json.loads((SEEDS / "sdpo_spec.json").read_text("utf8"))
FEATURES = ("experiment_features",)
CRITERION = ("decision_rule", "criteria", 0)
PATH = ("correctness_preflight", "paths", 0)
ARMS = ("restoration_preflight", "groups", 0, "arms")
CHECK = ("activation_gate", "checks", 1)


@pytest.mark.parametrize("name", ["dppo_spec", "dppo_launch_spec", "sdpo_spec", "sdpo_triage"])
def test_the_real_specs_pass_with_all_their_oddities(name):
    """Placeholders in revisions, weights that name roles and a hopeless margin are advisories."""
    document = json.loads((SEEDS / f"{name}.json").read_text("utf8"))
    assert validate(document).to_record() == {"findings": [], "status": "passed"}


@pytest.mark.parametrize(
    ("path", "value", "finding"),
    [
        ((*CHECK, "min"), 3.5, "activation_gate.checks[1].min: expected at most max, found 3.5 above 3.0."),
        ((*CHECK, "min"), float("nan"), "activation_gate.checks[1].min and max: expected finite numbers."),
        ((*CHECK, "max"), "3", "activation_gate.checks[1].min and max: expected finite numbers."),
        ((*CHECK, "max"), True, "activation_gate.checks[1].min and max: expected finite numbers."),
        ((*CHECK, "metric"), "", "activation_gate.checks[1].metric: expected text."),
        ((*CHECK,), {"metric": "m"}, "activation_gate.checks[1].min, max or one_of: expected an accepted range."),
        ((*CHECK,), {"metric": "m", "one_of": []}, "activation_gate.checks[1].one_of: expected a list with at least one value."),
        (("activation_gate", "checks"), [], "activation_gate.checks: expected a diagnostic (spec.activation_gate requires it)."),
        (("decision_rule",), None, "decision_rule: expected a rule (experiment_features: paired_comparison is true)."),
        (("decision_rule",), {}, "decision_rule: expected a rule (experiment_features: paired_comparison is true)."),
        (("decision_rule", "alpha"), 0, "decision_rule.alpha: expected a number between 0 and 1."),
        (("decision_rule", "alpha"), 1, "decision_rule.alpha: expected a number between 0 and 1."),
        (("decision_rule", "alpha"), "0.05", "decision_rule.alpha: expected a number between 0 and 1."),
        (("decision_rule", "seeds"), [], "decision_rule.seeds: expected whole numbers, each once."),
        (("decision_rule", "seeds"), [0, 0], "decision_rule.seeds: expected whole numbers, each once."),
        (("decision_rule", "seeds"), ["0"], "decision_rule.seeds: expected whole numbers, each once."),
        (("decision_rule", "seeds"), [[]], "decision_rule.seeds: expected whole numbers, each once."),
        (("decision_rule", "method"), "t_test", "decision_rule.method: expected paired_hoeffding or paired_betting."),
        (("decision_rule", "method"), [], "decision_rule.method: expected paired_hoeffding or paired_betting."),
        (("decision_rule", "criteria"), [], "decision_rule.criteria: expected at least one criterion."),
        ((*CRITERION, "id"), "reward_guard", "decision_rule.criteria: reward_guard is there 2 times, expected once."),
        ((*CRITERION, "id"), None, "decision_rule.criteria[0].id: expected text."),
        ((*CRITERION, "metric"), "", "decision_rule.criteria[0].metric: expected text."),
        ((*CRITERION, "weights"), {}, "decision_rule.criteria[0].weights: expected finite numbers, not all of them 0."),
        ((*CRITERION, "weights"), {"a": 0, "b": 0}, "decision_rule.criteria[0].weights: expected finite numbers, not all of them 0."),
        ((*CRITERION, "weights"), {"a": "1"}, "decision_rule.criteria[0].weights: expected finite numbers, not all of them 0."),
        ((*CRITERION, "margin"), None, "decision_rule.criteria[0].margin: expected a finite number."),
        ((*CRITERION, "margin"), 1.0, "decision_rule.criteria[0].margin: expected a value between -1 and 1."),
        ((*CRITERION, "margin"), -1.0, "decision_rule.criteria[0].margin: expected a value between -1 and 1."),
        ((*CRITERION, "margin"), float("inf"), "decision_rule.criteria[0].margin: expected a finite number."),
        ((*CRITERION, "bounds"), [1, 1], "decision_rule.criteria[0].bounds: expected two finite numbers, the lower one first."),
        ((*CRITERION, "bounds"), [1, 0], "decision_rule.criteria[0].bounds: expected two finite numbers, the lower one first."),
        ((*CRITERION, "bounds"), [0], "decision_rule.criteria[0].bounds: expected two finite numbers, the lower one first."),
        ((*CRITERION, "bounds"), [0, float("nan")], "decision_rule.criteria[0].bounds: expected two finite numbers, the lower one first."),
        (("correctness_preflight", "paths"), [], "correctness_preflight.paths: expected a path (experiment_features: custom_loss is true)."),
        (("correctness_preflight",), None, "correctness_preflight.paths: expected a path (experiment_features: custom_loss is true)."),
        ((*PATH, "id"), "sdpo_token_advantage", "correctness_preflight.paths: sdpo_token_advantage is there 2 times, expected once."),
        ((*PATH, "baseline_revision"), "", "correctness_preflight.paths[0].baseline_revision: expected text."),
        ((*PATH, "reference_revision"), None, "correctness_preflight.paths[0].reference_revision: expected text."),
        ((*PATH, "kind"), "losses", "correctness_preflight.paths[0].kind: expected loss or optimizer."),
        ((*PATH, "kind"), [], "correctness_preflight.paths[0].kind: expected loss or optimizer."),
        ((*PATH, "tolerances", "baseline_loss"), None, "correctness_preflight.paths[0].tolerances.baseline_loss: expected atol and rtol of at least 0."),
        ((*PATH, "tolerances", "baseline_loss", "atol"), -1, "correctness_preflight.paths[0].tolerances.baseline_loss: expected atol and rtol of at least 0."),
        ((*PATH, "tolerances", "baseline_loss", "rtol"), "0", "correctness_preflight.paths[0].tolerances.baseline_loss: expected atol and rtol of at least 0."),
        ((*PATH, "tolerances", "baseline_gradient", "min_cosine"), 1.1, "correctness_preflight.paths[0].tolerances.baseline_gradient.min_cosine: expected a number from -1 to 1."),
        (("restoration_preflight", "groups"), [], "restoration_preflight.groups: expected a group (experiment_features: paired_training_arms is true)."),
        ((*ARMS, 0, "name"), "grpo2", "restoration_preflight.groups[0].arms: grpo2 is no arm of the spec."),
        ((*ARMS, 0, "name"), None, "restoration_preflight.groups[0].arms: expected arms with a name each."),
        ((*ARMS, 0, "name"), "sdpo_token", "restoration_preflight.groups: sdpo_token is there 2 times, expected once."),
        ((*ARMS, 0, "optimizer"), None, "restoration_preflight.groups[0].arms: expected an optimizer for each arm."),
        (("arms",), [], "arms: expected a list of arms with a name each."),
        (("arms", 0, "name"), "sdpo_token", "arms: sdpo_token is there 2 times, expected once."),
        ((*FEATURES, "generated_training_data"), None, "experiment_features.generated_training_data: expected true or false."),
        ((*FEATURES, "custom_loss"), "true", "experiment_features.custom_loss: expected true or false."),
        (("primary_endpoint",), None, None),
        (("budget", "max_wall_minutes"), None, "budget.max_wall_minutes: expected a limit (feasibility is required)."),
        (("budget", "max_wall_minutes"), 0, "budget.max_wall_minutes: expected a number above 0."),
        (("budget", "gpu_hours"), -1, "budget.gpu_hours: expected a number above 0."),
        (("lora_rank",), 0, "lora_rank: expected a whole number above 0."),
        (("steps",), 20.0, "steps: expected a whole number above 0."),
        (("batch_size",), True, "batch_size: expected a whole number above 0."),
        (("max_seq_len",), "8192", "max_seq_len: expected a whole number above 0."),
        (("optimizer", "lr"), -1e-5, "optimizer.lr: expected a number of at least 0."),
        (("title",), "", "title: expected text."),
        (("hypothesis",), 1, "hypothesis: expected text."),
        (("base_model",), None, "base_model: expected text."),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else repr(value)[:40],
)  # fmt: skip
def test_each_contradiction_or_gap_is_a_finding(put, path, value, finding):
    result = validate(put(SPEC, path, value))
    if finding is None:
        assert result.findings == ()
    else:
        assert finding in result.findings
        assert result.status == "failed"


@pytest.mark.parametrize(
    ("weights", "bounds", "margin", "reachable"),
    [
        ({"t": 1, "b": -1}, [0, 1], 0.99, True),
        ({"t": 1, "b": -1}, [0, 1], 1, False),
        ({"t": 1, "b": -1}, [0, 1], -0.99, True),
        ({"t": 1, "b": -1}, [0, 1], -1, False),
        ({"t": 1, "b": -0.5, "c": -0.5}, [0, 100], 99, True),
        ({"t": 1, "b": -0.5, "c": -0.5}, [0, 100], 101, False),
        ({"t": 1}, [2, 3], 2.5, True),
        ({"t": 1}, [2, 3], 2, False),
    ],
)
def test_a_margin_lies_inside_the_possible_effects(put, weights, bounds, margin, reachable):
    """Weights 1 and -1 on [0, 1] give effects from -1 to 1; no effect is above 1."""
    changed = {**SPEC["decision_rule"]["criteria"][0], "weights": weights, "bounds": bounds}
    result = validate(put(SPEC, CRITERION, {**changed, "margin": margin}))
    assert (result.findings == ()) is reachable


def test_one_lone_arm_needs_a_resumed_arm(put):
    lone = put(SPEC, (*ARMS, 1))
    assert validate(lone).status == "failed"
    resumed = put(
        put(lone, (*FEATURES, "paired_training_arms"), False),
        (*FEATURES, "checkpoint_restore"),
        True,
    )
    assert validate(resumed).status == "passed"


def test_equal_bounds_are_a_range(put):
    assert validate(put(SPEC, (*CHECK, "min"), 3.0)).status == "passed"


def test_generated_training_data_needs_a_declared_comparison(put):
    generated = put(SPEC, (*FEATURES, "generated_training_data"), True)
    assert validate(generated).status == "passed"
    for value in (None, "fuzzy", 1, []):
        result = validate(put(generated, ("generation_audit", "answer_comparison"), value))
        assert result.findings == (
            "generation_audit.answer_comparison: expected numeric_exact or categorical_exact.",
        )
    for field, value in (
        ("max_label_errors", -1),
        ("max_eval_overlaps", "0"),
        ("min_sample_size", 0),
    ):
        result = validate(put(generated, ("generation_audit", field), value))
        assert result.findings[0].startswith(f"generation_audit.{field}: ")
    assert validate(put(SPEC, ("generation_audit",), {"required": False})).status == "passed"


def test_a_spec_may_name_its_endpoint_by_the_eval_metric(put):
    bare = put(put(SPEC, ("primary_endpoint",)), ("eval", "metric"), None)
    assert validate(bare).findings == (
        "primary_endpoint: expected text, or eval.metric in its place.",
    )


def test_no_budget_is_needed_where_feasibility_is_not_required(put):
    free = put(put(SPEC, ("feasibility_required",), False), ("budget",), None)
    assert validate(free).status == "passed"


@pytest.mark.parametrize("spec", [None, [], {}, "x", 1])
def test_what_is_no_spec_is_a_finding(spec):
    assert validate(spec).findings == ("spec: expected an object with the fields of a spec.",)


def test_the_gate_has_the_same_status(put):
    assert validate(SPEC).to_gate().status == "passed"
    assert validate(put(SPEC, ("arms",))).to_gate().status == "failed"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("optimizer", "lr"), 0),
        ((*PATH, "tolerances", "baseline_loss", "atol"), 0),
        ((*PATH, "tolerances", "baseline_loss", "rtol"), 0),
        ((*PATH, "tolerances", "baseline_gradient", "min_cosine"), 1),
        ((*PATH, "tolerances", "baseline_gradient", "min_cosine"), -1),
        (("decision_rule", "alpha"), 0.999),
        (("decision_rule", "seeds"), [0, 1, 2**63]),
    ],
    ids=repr,
)
def test_values_at_the_edge_are_accepted(put, path, value):
    assert validate(put(SPEC, path, value)).findings == ()


def test_one_bad_value_among_good_ones_is_a_finding(put):
    for path, value in (
        (("decision_rule", "seeds"), [0, -1]),
        (("decision_rule", "seeds"), [0, 1.5]),
        ((*CRITERION, "weights"), {"a": 1, "b": None}),
        ((*CRITERION, "bounds"), [0, None]),
        ((*PATH, "tolerances", "baseline_gradient", "min_cosine"), -1.01),
    ):
        assert len(validate(put(SPEC, path, value)).findings) == 1


def test_a_spec_that_compares_nothing_needs_no_rule(put):
    alone = put(put(SPEC, (*FEATURES, "paired_comparison"), False), ("decision_rule",), None)
    assert validate(alone).findings == ()


def test_a_lone_arm_needs_both_features(put):
    lone = put(SPEC, (*ARMS, 1))
    for paired, restored in ((True, True), (False, False)):
        features = put(
            put(lone, (*FEATURES, "paired_training_arms"), paired),
            (*FEATURES, "checkpoint_restore"),
            restored,
        )
        assert validate(features).findings == (
            "restoration_preflight.groups[0].arms: one arm alone needs checkpoint_restore and no "
            "paired training arms.",
        )


def test_a_budget_may_be_small_and_an_audit_of_one_task(put):
    small = put(put(SPEC, ("budget", "gpu_hours"), 0.5), ("budget", "max_wall_minutes"), 0.5)
    generated = put(small, (*FEATURES, "generated_training_data"), True)
    assert validate(put(generated, ("generation_audit", "min_sample_size"), 1)).findings == ()


@pytest.mark.parametrize("weight", [10**308, -(10**308), 1e308])
def test_effects_beyond_every_float_are_one_finding(put, weight):
    """10**308 times 10**308 is no 64-bit float, whether written as a whole number or not."""
    changed = {**SPEC["decision_rule"]["criteria"][0], "weights": {"t": weight}}

    found = validate(put(SPEC, CRITERION, {**changed, "bounds": [0, 10**308]}))

    assert found.findings == (
        "decision_rule.criteria[0].weights and bounds: expected effects within the range of a "
        "64-bit float.",
    )
