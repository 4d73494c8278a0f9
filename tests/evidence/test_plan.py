"""What a rule can settle before anything is spent, in numbers and in words."""

import json

import pytest

from evidence.errors import InputError
from evidence.plan import items_table, plan_check, weak_spots
from tests.evidence.execution_files import real_spec

BASE = {"composite_rubric_score": 0.9583333333333334, "tau_bench_task_reward": 0.05}


def test_retail_rule_cannot_fire_from_its_base_score():
    """60 items, two criteria: half width 0.382. 0.03 + 0.382 = 0.412 is needed, 1 - 0.958 = 0.042
    is left. The guard needs -0.1 + 0.382 = 0.282, and 1 - 0.05 = 0.95 is left."""
    plan = plan_check(real_spec("sdpo"), base_score=BASE)
    primary, guard = plan.criteria
    assert plan.can_support is False
    assert primary.half_width == pytest.approx(0.3821878523568343)
    assert primary.passes_above == pytest.approx(0.4121878523568343)
    assert primary.highest == pytest.approx(0.0416666666666666)
    assert (primary.can_pass, guard.can_pass) == (False, True)
    assert guard.passes_above == pytest.approx(0.2821878523568343)
    assert guard.highest == pytest.approx(0.95)


def test_retail_finding_is_said_in_plain_words():
    sentences = plan_check(real_spec("sdpo"), base_score=BASE).sentences
    assert sentences[0] == (
        "The rule cannot fire: no possible result of this size supports the claim."
    )
    assert sentences[1] == (
        "Criterion primary cannot pass: 60 units give a half width of 0.382, an effect above 0.412 "
        "is needed (margin 0.03), and from a base score of 0.958 the largest possible effect is "
        "0.042."
    )


def test_without_a_base_score_only_the_bounds_limit_the_effect():
    plan = plan_check(real_spec("sdpo").raw)
    assert plan.can_support is True
    assert (plan.criteria[0].lowest, plan.criteria[0].highest) == (-1, 1)
    assert "effects from -1.000 to 1.000 are possible" in plan.sentences[1]


def test_gsm8k_rule_needs_seven_and_a_half_points():
    plan = plan_check(real_spec("dppo"))
    assert plan.can_support is plan.can_refute is True
    assert round(plan.criteria[0].passes_above, 4) == 0.0748


@pytest.mark.parametrize(("units", "fires"), [(7, False), (8, True)])
def test_eight_units_are_the_fewest_that_can_fire(units, fires):
    plan = plan_check(real_spec("dppo"), n_units=units)
    assert plan.can_support is plan.can_refute is fires


def test_three_training_seeds_as_units_never_fire(put):
    spec = put(real_spec("dppo").raw, ("decision_rule", "unit"), "training_seeds")
    plan = plan_check(put(spec, ("decision_rule", "seeds"), [0, 1, 2]))
    assert plan.criteria[0].n_units == 3
    assert plan.can_support is False


def test_largest_effect_exactly_at_the_needed_one_does_not_pass(put):
    """Entirely above is strict. From a base of 0.5 the largest effect is 0.5; the margin is 0.5
    less the half width of 60 items, so that margin plus half width is 0.5 as well."""
    margin = 0.5 - 0.35066030352816463
    spec = put(real_spec("dppo").raw, ("decision_rule", "criteria", 0, "margin"), margin)
    plan = plan_check(spec, base_score=0.5, n_units=60)
    assert plan.criteria[0].passes_above == plan.criteria[0].highest == 0.5
    assert plan.can_support is False
    assert plan_check(spec, base_score=0.499, n_units=60).can_support is True


def test_betting_rule_can_fire_where_hoeffding_cannot(put):
    """From 0.9 the largest gain is 0.1. At 60 items Hoeffding needs 0.351, betting 0.07."""
    spec = real_spec("dppo").raw
    assert plan_check(spec, base_score=0.9, n_units=60).can_support is False
    betting = plan_check(
        put(spec, ("decision_rule", "method"), "paired_betting"), base_score=0.9, n_units=60
    )
    assert betting.can_support is True
    assert betting.criteria[0].passes_above is None
    assert "can pass" in betting.sentences[1]


def test_items_needed_are_listed_for_one_and_two_criteria():
    rows = items_table(value_range=2.0, alpha=0.05, distances=(0.03,))
    assert rows == [
        {"distance": 0.03, "k": 1, "just": 8198, "guaranteed": 22604, "realistic": 10284},
        {"distance": 0.03, "k": 2, "just": 9738, "guaranteed": 25118, "realistic": 12001},
    ]


def test_record_is_plain_json():
    record = plan_check(real_spec("sdpo"), base_score=BASE).to_record()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert len(record["items"]) == 10


def test_weak_spots_name_roles_without_arms_and_keys_no_server_reports():
    roles, rank = weak_spots(real_spec("sdpo").raw)
    assert roles.startswith("The decision weighs baseline, treatment")
    assert "lora_rank" in rank


def test_roles_that_the_execution_file_gives_are_no_weak_spot():
    (rank,) = weak_spots(real_spec("sdpo").raw, roles={"baseline", "treatment"})
    assert "lora_rank" in rank


def test_spec_whose_weights_are_its_arms_has_no_weak_spot():
    criteria = [{"weights": {"a": 1, "b": -1}}]
    assert (
        weak_spots(
            {"arms": [{"name": "a"}, {"name": "b"}], "decision_rule": {"criteria": criteria}}
        )
        == []
    )


@pytest.mark.parametrize(
    "value", [None, [], 3, "x", {"groups": 3}, {"groups": [None, {"arms": 1}]}]
)
def test_weak_spots_survive_malformed_parts(value):
    assert weak_spots({"arms": value, "decision_rule": value, "restoration_preflight": value}) == []


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("decision_rule",), None, "seeds"),
        (("eval", "n_examples"), None, "eval.n_examples"),
        (("decision_rule", "alpha"), float("nan"), "alpha"),
    ],
)
def test_rule_that_cannot_be_planned_with_is_named(put, path, value, field):
    with pytest.raises(InputError) as error:
        plan_check(put(real_spec("dppo").raw, path, value))
    assert error.value.field == field


@pytest.mark.parametrize("score", [1.2, -0.1, float("nan"), True, "0.9"])
def test_base_score_outside_the_bounds_is_refused(score):
    with pytest.raises(InputError, match="base score of accuracy"):
        plan_check(real_spec("dppo"), base_score=score)


def test_rule_that_can_only_support_says_so():
    """From a base score of 0.1 a fall of 0.351 is impossible, a gain of 0.9 is not."""
    plan = plan_check(real_spec("dppo"), base_score=0.1, n_units=60)
    assert (plan.can_support, plan.can_refute) == (True, False)
    assert plan.sentences[0] == "The rule can support the claim; no possible result refutes it."


def test_betting_rule_that_cannot_fire_says_so(put):
    """From 0.99 the largest gain is 0.01, which 60 items cannot show."""
    spec = put(real_spec("dppo").raw, ("decision_rule", "method"), "paired_betting")
    plan = plan_check(spec, base_score=0.99, n_units=60)
    assert plan.can_support is False
    assert "the interval cannot lie above the margin 0" in plan.sentences[1]
