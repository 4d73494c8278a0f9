import json

import pytest

from evidence.feasibility import generation_counts, validate

CONFIG = {
    "base_model": "Qwen/Qwen3.5-4B",
    "lora_rank": 32,
    "dataset": "retail",
    "steps": 20,
    "batch_size": 16,
    "max_seq_len": 8192,
    "arms": ["grpo", "sdpo"],
    "n_examples": 80,
}
FALSE = {"generated_training_data": False}
SPEC = {
    "experiment_features": FALSE,
    "generation_audit": {"required": False},
    "primary_endpoint": "score",
    "budget": {"max_wall_minutes": 120, "gpu_hours": 2.0},
}


def phase(seconds, units=1, planned=1, samples=0, gpus=None, source=None):
    return {
        "seconds": seconds,
        "units": units,
        "planned_units": planned,
        "samples": samples,
        "gpu_count": gpus,
        "allocation_source": source,
    }


REPORT = {
    "config": CONFIG,
    "effective_config": CONFIG,
    "primary_endpoint": "score",
    "source": "pilot.log",
    "measurements": {
        "setup": phase(20),
        "training": phase(280, units=28, planned=40, samples=448),
        "evaluation": phase(180, units=60, planned=120, samples=60),
    },
    "generation": None,
    "recovery": {"seconds": 100, "gpu_count": None, "allocation_source": None},
}
TRAINING = ("measurements", "training")


def test_a_projection_adds_the_scaled_phases_and_the_reserve():
    """20 + 280*40/28 + 180*120/60 + 100 = 20 + 400 + 360 + 100 = 880 s of 7200."""
    assert validate(SPEC, REPORT, recorded_at=1.5).to_record() == {
        "status": "feasible",
        "problems": [],
        "wall_seconds": 880.0,
        "gpu_hours": None,
        "known_gpu_hours": 0,
        "phases": {
            "setup": {
                "wall_seconds": 20.0,
                "planned_units": 1,
                "planned_samples": 0.0,
                "gpu_hours": None,
            },
            "training": {
                "wall_seconds": 400.0,
                "planned_units": 40,
                "planned_samples": 640.0,
                "gpu_hours": None,
            },
            "evaluation": {
                "wall_seconds": 360.0,
                "planned_units": 120,
                "planned_samples": 120.0,
                "gpu_hours": None,
            },
            "recovery": {"wall_seconds": 100, "gpu_hours": None},
        },
        "generation_counts": None,
        "generation_applicability": {
            "check": "generation_audit",
            "status": "not_applicable",
            "enforce": False,
            "reasons": ["spec.generation_audit opts out and no feature it covers is true"],
            "features": {"generated_training_data": False},
        },
        "record": REPORT,
        "recorded_at": 1.5,
    }


def test_nothing_measured_is_unknown():
    assert validate(SPEC, None).to_record() == {
        "status": "unknown",
        "problems": ["Measured feasibility not recorded"],
        "wall_seconds": None,
        "gpu_hours": None,
        "known_gpu_hours": 0,
        "phases": {},
    }


@pytest.mark.parametrize("key", list(CONFIG))
def test_each_setting_must_be_recorded_and_unchanged(put, key):
    expected = (f"Re-projection required: {key} changed or was not recorded",)
    for part in ("config", "effective_config"):
        for changed in (
            put(REPORT, (part, key)),
            put(REPORT, (part, key), None),
            put(REPORT, (part, key), "other"),
        ):
            result = validate(SPEC, changed)
            assert (result.status, result.problems) == ("unknown", expected)
            assert result.wall_seconds is None
            assert set(result.phases) == {"setup", "training", "evaluation", "recovery"}


def test_settings_that_both_configs_leave_out_are_not_recorded(put):
    """max_tokens does not stand in for max_seq_len, n_eval not for n_examples."""
    stand_ins = {**CONFIG, "max_tokens": 512, "n_eval": 60}
    for key in ("max_seq_len", "n_examples"):
        del stand_ins[key]
    result = validate(SPEC, {**REPORT, "config": stand_ins, "effective_config": stand_ins})
    assert result.problems == (
        "Re-projection required: max_seq_len changed or was not recorded",
        "Re-projection required: n_examples changed or was not recorded",
    )


def test_settings_are_compared_by_type_and_value(put):
    assert validate(SPEC, put(REPORT, ("config", "steps"), 20.0)).status == "feasible"
    assert validate(SPEC, put(REPORT, ("config", "steps"), "20")).status == "unknown"
    assert validate(SPEC, put(REPORT, ("config", "arms"), ["sdpo", "grpo"])).status == "unknown"
    nan = put(
        put(REPORT, ("config", "steps"), float("nan")), ("effective_config", "steps"), float("nan")
    )
    assert validate(SPEC, nan).status == "unknown"
    one = put(put(REPORT, ("config", "lora_rank"), 1), ("effective_config", "lora_rank"), True)
    assert validate(SPEC, one).status == "unknown"


def test_other_settings_may_change(put):
    assert validate(SPEC, put(REPORT, ("effective_config", "n_eval"), 3)).status == "feasible"


@pytest.mark.parametrize(
    "endpoint", [None, "", "score ", "Score", "score — not evaluated", 1, ["score"]]
)
def test_the_endpoint_is_the_specs_exact_text(put, endpoint):
    result = validate(SPEC, put(REPORT, ("primary_endpoint",), endpoint))
    assert result.problems == ("Primary endpoint changed or was not recorded",)


def test_a_spec_without_endpoint_is_held_to_its_eval_metric():
    spec = {**SPEC, "primary_endpoint": None, "eval": {"metric": "score"}}
    assert validate(spec, REPORT).status == "feasible"
    assert validate({**spec, "primary_endpoint": "other"}, REPORT).status == "unknown"
    assert validate({**SPEC, "primary_endpoint": None}, REPORT).status == "unknown"


def test_a_timing_without_source_is_a_problem(put, no_text):
    assert validate(SPEC, put(REPORT, ("source",), no_text)).problems == (
        "Timing source was not recorded",
    )


@pytest.mark.parametrize("name", ["setup", "training", "evaluation"])
def test_each_phase_must_be_timed(put, name):
    result = validate(SPEC, put(REPORT, ("measurements", name)))
    assert result.problems == (f"Measured timing not recorded for {name}",)
    assert name not in result.phases


def test_unknown_and_invalid_phases_come_in_the_order_of_the_report():
    measurements = {
        "evaluation": phase(0, units=0),
        "sampling": phase(1),
        "setup": phase(-1),
        "training": phase(1),
    }
    assert validate(SPEC, {**REPORT, "measurements": measurements}).problems == (
        "Invalid measured timing/counts for evaluation",
        "Unknown timing phase: sampling",
        "Invalid measured timing/counts for setup",
    )


@pytest.mark.parametrize("field", ["seconds", "units", "planned_units", "samples"])
def test_timings_and_counts_are_finite_numbers(put, no_number, field):
    result = validate(SPEC, put(REPORT, (*TRAINING, field), no_number))
    assert result.problems == ("Invalid measured timing/counts for training",)
    assert "training" not in result.phases
    json.dumps(result.to_record(), allow_nan=False)


@pytest.mark.parametrize(
    ("field", "value", "valid"),
    [
        ("seconds", 0, True),
        ("seconds", -0.001, False),
        ("units", 0, False),
        ("units", -1, False),
        ("units", 14.5, True),
        ("planned_units", 0, False),
        ("planned_units", -1, False),
        ("samples", 0, True),
        ("samples", -1, False),
        ("seconds", 1e307, False),
        ("gpu_count", -1, False),
        ("gpu_count", True, False),
        ("gpu_count", "2", False),
        ("gpu_count", float("nan"), False),
        ("gpu_count", 2, True),
    ],
)
def test_bounds_of_timings_and_counts(put, field, value, valid):
    result = validate(SPEC, put(REPORT, (*TRAINING, field), value))
    expected = () if valid else ("Invalid measured timing/counts for training",)
    assert result.problems == expected


@pytest.mark.parametrize("value", [None, [], "x", 1])
def test_measurements_of_another_form(put, value):
    assert validate(SPEC, put(REPORT, TRAINING, value)).problems == (
        "Invalid measured timing/counts for training",
    )
    assert len(validate(SPEC, put(REPORT, ("measurements",), value)).problems) == 3


@pytest.mark.parametrize(
    "recovery",
    [None, [], {}, {"seconds": None}, {"seconds": -1}, {"seconds": "600"}, {"seconds": True}],
)
def test_a_recovery_reserve_is_needed(put, recovery):
    result = validate(SPEC, put(REPORT, ("recovery",), recovery))
    assert result.problems == ("Recovery reserve was not recorded",)
    assert "recovery" not in result.phases


def test_a_projection_equal_to_the_budget_fits(put):
    """20 + 400 + 360 + 120 = 900 s = 15 minutes exactly; one second more does not fit."""
    spec = {**SPEC, "budget": {"max_wall_minutes": 15}}
    assert validate(spec, put(REPORT, ("recovery", "seconds"), 120)).status == "feasible"
    over = validate(spec, put(REPORT, ("recovery", "seconds"), 121))
    assert over.status == "infeasible"
    assert over.problems == ("Projected 901.0 s of wall time exceed the budget of 900 s",)
    assert over.wall_seconds == 901.0


@pytest.mark.parametrize(
    "budget",
    [
        None,
        {},
        {"max_wall_minutes": None},
        {"max_wall_minutes": "120"},
        {"max_wall_minutes": 0},
        {"max_wall_minutes": True},
        {"max_wall_minutes": 120, "gpu_hours": "2"},
    ],
)
def test_without_a_budget_nothing_fits(budget):
    result = validate({**SPEC, "budget": budget}, REPORT)
    assert (result.status, result.wall_seconds) == ("unknown", None)
    assert result.problems[0].startswith("The spec's budget states no")


def with_gpus(put, source="allocation.json"):
    """Setup on no GPU, training on 2, evaluation on 1, recovery on 1."""
    report = REPORT
    for name, count in (("setup", 0), ("training", 2), ("evaluation", 1)):
        report = put(report, ("measurements", name, "gpu_count"), count)
        report = put(report, ("measurements", name, "allocation_source"), source)
    report = put(report, ("recovery", "gpu_count"), 1)
    return put(report, ("recovery", "allocation_source"), source)


def test_gpu_hours_count_with_an_allocation_source(put):
    """(400*2 + 360*1 + 100*1) / 3600 = 0.35 GPU-hours."""
    result = validate(SPEC, with_gpus(put))
    assert result.gpu_hours == pytest.approx(0.35)
    assert result.known_gpu_hours == pytest.approx(0.35)
    assert result.phases["setup"].gpu_hours == 0.0
    assert result.phases["training"].gpu_hours == pytest.approx(800 / 3600)


@pytest.mark.parametrize("source", [None, "", 1, []])
def test_a_gpu_count_without_source_is_not_counted(put, source):
    result = validate(SPEC, with_gpus(put, source))
    assert (result.status, result.gpu_hours, result.known_gpu_hours) == ("feasible", None, 0)


def test_known_gpu_hours_are_kept_where_some_are_unknown(put):
    report = put(with_gpus(put), ("recovery", "gpu_count"), None)
    result = validate(SPEC, report)
    assert result.gpu_hours is None
    assert result.known_gpu_hours == pytest.approx((800 + 360) / 3600)
    assert result.status == "feasible"


@pytest.mark.parametrize(
    ("limit", "status"), [(0.35, "feasible"), (0.34, "infeasible"), (None, "feasible")]
)
def test_known_gpu_hours_are_held_against_the_budget(put, limit, status):
    budget = {"max_wall_minutes": 120, "gpu_hours": limit}
    result = validate({**SPEC, "budget": budget}, with_gpus(put))
    assert result.status == status


def test_a_problem_hides_every_total(put):
    result = validate(SPEC, put(with_gpus(put), ("effective_config", "steps"), 14))
    assert (result.wall_seconds, result.gpu_hours, result.known_gpu_hours) == (None, None, 0)
    assert result.phases["training"].gpu_hours == pytest.approx(800 / 3600)


def test_generation_counts_by_hand():
    """Yield 20 of 50: 100 accepted tasks need 250 candidates and 4 * 250 filter samples."""
    yields = {
        "attempted": 50,
        "accepted": 20,
        "target_accepted": 100,
        "filter_samples_per_candidate": 4,
    }
    counts = generation_counts(yields)
    assert (counts.candidates, counts.filter_samples, counts.status) == (250, 1000, "projected")
    up = generation_counts({**yields, "target_accepted": 101})
    assert up.candidates == 253  # 252.5 rounded up
    assert generation_counts({**yields, "filter_samples_per_candidate": 0}).filter_samples == 0
    assert generation_counts({**yields, "accepted": 50}).candidates == 100
    huge = generation_counts({**yields, "target_accepted": 2**63 + 1})
    assert huge.candidates == -(-(2**63 + 1) * 50 // 20)


@pytest.mark.parametrize(
    "changed",
    [
        {"accepted": 0},
        {"accepted": 51},
        {"target_accepted": 0},
        {"accepted": -1},
        {"attempted": 0},
        {"attempted": "50"},
        {"accepted": True},
        {"filter_samples_per_candidate": None},
        {"filter_samples_per_candidate": 1.5},
        {"target_accepted": float("nan")},
    ],
)
def test_a_yield_that_cannot_be_projected(changed):
    yields = {
        "attempted": 50,
        "accepted": 20,
        "target_accepted": 100,
        "filter_samples_per_candidate": 4,
    }
    counts = generation_counts({**yields, **changed})
    assert (counts.status, counts.candidates, counts.filter_samples) == ("unknown", None, None)
    assert counts.problem


GENERATED = {**SPEC, "experiment_features": {"generated_training_data": True}}
YIELD = {"attempted": 50, "accepted": 20, "target_accepted": 100, "filter_samples_per_candidate": 4}


def sized(put, generation=250, filtering=1000):
    report = put(REPORT, ("generation",), YIELD)
    for name, planned in (("generation", generation), ("filter", filtering), ("audit", 20)):
        report = put(report, ("measurements", name), phase(1, planned=planned))
    return report


def test_generation_is_sized_where_generated_tasks_are_trained_on(put):
    result = validate(GENERATED, sized(put))
    assert (result.status, result.problems) == ("feasible", ())
    assert result.to_record()["generation_counts"] == {"candidates": 250, "filter_samples": 1000}
    assert list(result.phases)[-1] == "recovery"


def test_generation_that_was_not_sized_is_unknown():
    result = validate(GENERATED, REPORT)
    assert result.problems == (
        "Measured generation yield was not recorded",
        "Measured timing not recorded for generation",
        "Measured timing not recorded for filter",
        "Measured timing not recorded for audit",
    )


@pytest.mark.parametrize("name", ["generation", "filter", "audit"])
def test_each_generation_phase_must_be_timed(put, name):
    result = validate(GENERATED, put(sized(put), ("measurements", name)))
    assert result.problems == (f"Measured timing not recorded for {name}",)


def test_fewer_units_than_the_yield_asks_for_need_a_new_projection(put):
    assert validate(GENERATED, sized(put, generation=249)).problems == (
        "Re-projection required: generation needs 250 planned units",
    )
    assert validate(GENERATED, sized(put, filtering=999)).problems == (
        "Re-projection required: filter needs 1000 planned units",
    )


def test_no_filter_needs_no_filter_timing(put):
    report = put(sized(put), ("generation", "filter_samples_per_candidate"), 0)
    assert validate(GENERATED, put(report, ("measurements", "filter"))).status == "feasible"


def test_an_undeclared_feature_cannot_skip_the_sizing():
    spec = {**SPEC, "experiment_features": {}}
    result = validate(spec, REPORT)
    assert result.status == "unknown"
    assert "Measured generation yield was not recorded" in result.problems


def test_a_yield_that_was_reported_is_projected_although_not_required(put):
    result = validate(SPEC, put(sized(put), ("measurements", "audit")))
    assert result.problems == ()
    assert result.to_record()["generation_counts"] == {"candidates": 250, "filter_samples": 1000}


@pytest.mark.parametrize(
    ("moment", "valid"),
    [
        (1793812863.61, True),
        (None, True),
        ("2026-11-04T17:21:00+00:00", True),
        ("2026-11-04T17:21:00Z", True),
        ("2026-11-04T17:21:00", False),
        ("2026-11-04", False),
        ("yesterday", False),
        (float("nan"), False),
        (True, False),
        ([], False),
    ],
)
def test_the_moment_of_recording_has_a_zone(moment, valid):
    result = validate(SPEC, REPORT, recorded_at=moment)
    expected = () if valid else ("recorded_at must be seconds since 1970 or a date with its zone",)
    assert result.problems == expected
    assert list(result.to_record())[-1] == "recorded_at"
    assert "recorded_at" not in validate(SPEC, REPORT).to_record()


@pytest.mark.parametrize("report", [[], "x", 1, True, {}])
def test_a_report_of_another_form_is_unknown(report):
    result = validate(SPEC, report)
    assert (result.status, dict(result.phases)) == ("unknown", {})
    assert len(result.problems) >= 13


def test_totals_beyond_floats_are_no_projection(put):
    report = put(
        put(REPORT, ("measurements", "setup", "seconds"), 1.5e308), ("recovery", "seconds"), 1.5e308
    )
    result = validate(SPEC, report)
    assert result.problems == ("The projected total is no finite number",)
    json.dumps(result.to_record(), allow_nan=False)


@pytest.mark.parametrize(
    ("seconds", "status"), [(100, "passed"), (100_000, "failed"), (None, "unverified")]
)
def test_the_gate_has_a_gates_status(put, seconds, status):
    assert validate(SPEC, put(REPORT, ("recovery", "seconds"), seconds)).to_gate().status == status


def test_a_reserve_of_zero_is_recorded(put):
    result = validate(SPEC, put(REPORT, ("recovery", "seconds"), 0))
    assert (result.status, result.wall_seconds) == ("feasible", 780.0)


def test_the_smallest_budget_is_above_zero(put):
    tiny = validate({**SPEC, "budget": {"max_wall_minutes": 0.5}}, REPORT)
    assert (tiny.status, tiny.wall_seconds) == ("infeasible", 880.0)
