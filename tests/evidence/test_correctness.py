import json

import pytest

from evidence import correctness
from evidence.correctness import main, validate

NAMES = ("baseline_loss", "baseline_gradient", "reference_loss", "reference_gradient")
FEATURES = {
    "custom_loss": True,
    "custom_optimizer": False,
    "paired_training_arms": True,
    "checkpoint_restore": False,
    "generated_training_data": False,
    "paired_comparison": True,
    "adaptive_selection": False,
}
GOOD = {
    "max_abs_error": 0.0,
    "reference_max_abs": 1.0,
    "relative_l2_error": 0.0,
    "cosine_similarity": 1.0,
}


def path(name="p1"):
    tolerances = {check: {"atol": 0.25, "rtol": 0.5} for check in NAMES}
    for check in ("baseline_gradient", "reference_gradient"):
        tolerances[check]["min_cosine"] = 0.875
    return {
        "id": name,
        "kind": "loss",
        "baseline_revision": "base@1",
        "reference_revision": "ref@2",
        "tolerances": tolerances,
    }


def entry(name="p1"):
    return {
        "id": name,
        "fixed_input": {"sha256": "a" * 64, "description": "batch"},
        "baseline_revision": "base@1",
        "reference_revision": "ref@2",
        "implementation_revision": "impl@3",
        "precision": "float32",
        "normalization": "sum",
        "errors": {check: dict(GOOD) for check in NAMES},
        "lr_scaling": [],
    }


def spec(*paths, features=FEATURES):
    return {
        "experiment_features": features,
        "correctness_preflight": {"required": True, "paths": list(paths)},
    }


SPEC = spec(path())
REPORT = {"required": True, "paths": [entry()]}
ERRORS = ("paths", 0, "errors")


def test_everything_measured_within_tolerance_passes():
    result = validate(SPEC, REPORT)
    assert result.to_record() == {
        "status": "passed",
        "required": True,
        "checks": [
            {
                "path": "p1",
                "check": check,
                "status": "passed",
                "tolerance": path()["tolerances"][check],
                "measured": GOOD,
            }
            for check in NAMES
        ],
        "reason": None,
        "evidence_source": "executor report; remote execution is not attested",
        "applicability": "required",
    }


@pytest.mark.parametrize("check", NAMES)
@pytest.mark.parametrize(
    ("error", "status"),
    [(0.7499999999999999, "passed"), (0.75, "passed"), (0.7500000000000001, "failed")],
)
def test_the_error_bound_is_inclusive_for_every_check(put, check, error, status):
    """0.25 + 0.5 * 1.0 = 0.75 exactly in floats."""
    result = validate(SPEC, put(REPORT, (*ERRORS, check, "max_abs_error"), error))
    assert result.status == status
    rows = {row.check: row.status for row in result.checks}
    assert rows == {name: status if name == check else "passed" for name in NAMES}
    expected = None if status == "passed" else f"p1: {check} outside its tolerance"
    assert result.reason == expected


@pytest.mark.parametrize("check", ["baseline_gradient", "reference_gradient"])
@pytest.mark.parametrize(
    ("cosine", "status"),
    [(0.875, "passed"), (0.8749999999999999, "failed"), (-1.0, "failed"), (1.0000001, "passed")],
)
def test_a_prespecified_cosine_is_an_inclusive_minimum(put, check, cosine, status):
    result = validate(SPEC, put(REPORT, (*ERRORS, check, "cosine_similarity"), cosine))
    assert result.status == status


def test_a_cosine_that_was_not_prespecified_is_not_bounded(put):
    report = put(REPORT, (*ERRORS, "baseline_loss", "cosine_similarity"), -1.0)
    assert validate(SPEC, report).status == "passed"


@pytest.mark.parametrize("check", NAMES)
@pytest.mark.parametrize("field", ["max_abs_error", "reference_max_abs"])
def test_what_is_no_number_was_not_measured(put, no_number, check, field):
    result = validate(SPEC, put(REPORT, (*ERRORS, check, field), no_number))
    assert result.status == "unverified"
    assert result.reason == f"p1: measured {check} errors"
    json.dumps(result.to_record(), allow_nan=False)


@pytest.mark.parametrize("field", ["max_abs_error", "reference_max_abs", "relative_l2_error"])
def test_negative_sizes_are_no_measurements(put, field):
    result = validate(SPEC, put(REPORT, (*ERRORS, "baseline_loss", field), -1e-9))
    assert result.reason == "p1: measured baseline_loss errors"


@pytest.mark.parametrize("field", list(GOOD))
def test_a_measure_that_is_not_reported_is_missing(put, field):
    result = validate(SPEC, put(REPORT, (*ERRORS, "baseline_loss", field)))
    assert result.status == "unverified"


@pytest.mark.parametrize("field", ["relative_l2_error", "cosine_similarity"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", True, [], 10**400])
def test_other_measures_must_be_numbers_or_null(put, field, value):
    result = validate(SPEC, put(REPORT, (*ERRORS, "baseline_loss", field), value))
    assert result.status == "unverified"


@pytest.mark.parametrize("cosine", [1.1, -1.1])
def test_a_cosine_beyond_one_is_no_cosine(put, cosine):
    report = put(REPORT, (*ERRORS, "baseline_loss", "cosine_similarity"), cosine)
    assert validate(SPEC, report).status == "unverified"


def test_relative_error_may_be_null_only_for_a_zero_reference(put):
    report = put(REPORT, (*ERRORS, "reference_loss", "relative_l2_error"), None)
    assert validate(SPEC, report).reason == "p1: measured reference_loss errors"
    report = put(report, (*ERRORS, "reference_loss", "reference_max_abs"), 0.0)
    assert validate(SPEC, report).status == "passed"


def test_with_a_zero_reference_only_atol_counts(put):
    zero = {"reference_max_abs": 0, "relative_l2_error": None, "cosine_similarity": None}
    report = put(REPORT, (*ERRORS, "reference_loss"), {"max_abs_error": 0.25, **zero})
    assert validate(SPEC, report).status == "passed"
    report = put(REPORT, (*ERRORS, "reference_loss"), {"max_abs_error": 0.26, **zero})
    assert validate(SPEC, report).status == "failed"


def test_a_null_cosine_cannot_meet_a_prespecified_minimum(put):
    report = put(REPORT, (*ERRORS, "baseline_gradient", "cosine_similarity"), None)
    assert validate(SPEC, report).reason == "p1: measured baseline_gradient errors"


def test_a_bound_that_overflows_bounds_nothing(put):
    wide = put(
        SPEC,
        ("correctness_preflight", "paths", 0, "tolerances", "baseline_loss"),
        {"atol": 0.0, "rtol": 1e200},
    )
    report = put(REPORT, (*ERRORS, "baseline_loss", "reference_max_abs"), 1e200)
    assert validate(wide, report).status == "unverified"


@pytest.mark.parametrize("field", ["atol", "rtol"])
@pytest.mark.parametrize("value", [None, "0.1", True, -0.1, float("nan"), float("inf")])
def test_a_tolerance_that_is_no_bound_verifies_nothing(put, field, value):
    keys = ("correctness_preflight", "paths", 0, "tolerances", "baseline_loss", field)
    assert validate(put(SPEC, keys, value), REPORT).reason == "p1: measured baseline_loss errors"


def test_a_required_check_without_tolerance_is_unverified(put):
    """Loss paths need loss and gradient against both references."""
    for check in NAMES:
        keys = ("correctness_preflight", "paths", 0, "tolerances", check)
        result = validate(put(SPEC, keys), REPORT)
        assert result.status == "unverified"
        assert result.reason == f"p1: measured {check} errors"


@pytest.mark.parametrize("check", NAMES)
def test_a_check_that_was_not_reported_is_unverified(put, check):
    result = validate(SPEC, put(REPORT, (*ERRORS, check)))
    assert result.reason == f"p1: measured {check} errors"
    row = next(row for row in result.checks if row.check == check)
    assert (row.status, row.measured) == ("unverified", None)


def test_a_further_check_that_the_plan_bounds_is_judged_after_the_required_ones(put):
    keys = ("correctness_preflight", "paths", 0, "tolerances")
    extra = {"packed_loss": {"atol": 0.0, "rtol": 0.0}, **path()["tolerances"]}
    result = validate(put(SPEC, keys, extra), REPORT)
    assert [row.check for row in result.checks] == [*NAMES, "packed_loss"]
    assert result.reason == "p1: measured packed_loss errors"


def test_optimizer_paths_need_update_errors(put):
    planned = path()
    planned["kind"] = "optimizer"
    names = ("baseline_update", "reference_update")
    planned["tolerances"] = {name: {"atol": 0.0, "rtol": 0.0} for name in names}
    measured = entry()
    measured["errors"] = {name: dict(GOOD) for name in names}
    report = {"paths": [measured]}
    assert validate(spec(planned), report).status == "passed"
    report = put(report, ("paths", 0, "errors", "reference_update"))
    assert validate(spec(planned), report).reason == "p1: measured reference_update errors"


@pytest.mark.parametrize("kind", [None, "", "losses", 1, [], {}])
def test_a_path_of_unknown_kind_is_unverified(put, kind):
    result = validate(put(SPEC, ("correctness_preflight", "paths", 0, "kind"), kind), REPORT)
    assert result.reason == "p1: a planned kind, loss or optimizer"


@pytest.mark.parametrize("field", ["reference_revision", "baseline_revision"])
@pytest.mark.parametrize("value", [None, "", "base@1 ", "BASE@1", 1, ["base@1"], True])
def test_revisions_must_equal_the_specs_text(put, field, value):
    """A row is still written and passes: only the status is withheld."""
    result = validate(SPEC, put(REPORT, ("paths", 0, field), value))
    assert result.status == "unverified"
    assert result.reason == f"p1: matching {field}"
    assert {row.status for row in result.checks} == {"passed"}


@pytest.mark.parametrize("field", ["reference_revision", "baseline_revision"])
def test_a_revision_that_neither_names_does_not_match(put, field):
    keys = ("correctness_preflight", "paths", 0, field)
    for value in (None, ""):
        report = put(REPORT, ("paths", 0, field), value)
        assert validate(put(SPEC, keys, value), report).reason == f"p1: matching {field}"


@pytest.mark.parametrize("field", ["implementation_revision", "precision", "normalization"])
def test_the_tested_code_and_its_modes_must_be_named(put, no_text, field):
    result = validate(SPEC, put(REPORT, ("paths", 0, field), no_text))
    assert result.reason == f"p1: {field}"


@pytest.mark.parametrize("value", [None, "", "a" * 63, "a" * 65, "g" * 64, 1, True])
def test_the_fixed_input_must_be_identified(put, value):
    result = validate(SPEC, put(REPORT, ("paths", 0, "fixed_input", "sha256"), value))
    assert result.reason == "p1: fixed_input sha256"
    assert validate(SPEC, put(REPORT, ("paths", 0, "fixed_input"), value)).reason == (
        "p1: fixed_input sha256"
    )


def test_reasons_come_in_the_order_of_the_records(put):
    """Paths as planned; reference revision before baseline revision before errors."""
    two = spec(path("b"), path("a"))
    bad = entry("b")
    bad.update(baseline_revision="x", reference_revision="y")
    bad["errors"]["reference_loss"]["reference_max_abs"] = None
    report = {"paths": [entry("a"), bad]}
    report = put(report, ("paths", 0, "errors", "baseline_loss", "max_abs_error"), 9.0)
    result = validate(two, report)
    assert result.reason == (
        "b: matching reference_revision; b: matching baseline_revision; "
        "b: measured reference_loss errors; a: baseline_loss outside its tolerance"
    )
    assert result.status == "failed"
    assert [row.path for row in result.checks] == ["b"] * 4 + ["a"] * 4


def test_a_failed_measurement_says_more_than_a_gap(put):
    report = put(REPORT, (*ERRORS, "baseline_loss", "max_abs_error"), 9.0)
    report = put(report, ("paths", 0, "precision"))
    assert validate(SPEC, report).status == "failed"


def test_a_missing_path_blocks_although_the_others_pass():
    result = validate(spec(path(), path("p2")), REPORT)
    assert result.status == "unverified"
    assert result.reason == "p2: reported path"
    assert [row.status for row in result.checks] == ["passed"] * 4 + ["unverified"] * 4


def test_a_path_reported_twice_is_not_chosen_from():
    result = validate(SPEC, {"paths": [entry(), entry()]})
    assert result.reason == "p1: exactly one reported path, found 2"
    assert {row.status for row in result.checks} == {"unverified"}


def test_a_path_planned_twice_is_no_plan():
    assert validate(spec(path(), path()), REPORT).status == "unverified"


@pytest.mark.parametrize("name", ["p9", None, 1, [], ""])
def test_a_path_that_is_not_planned_is_unverified(name):
    result = validate(SPEC, {"paths": [entry(), {**entry(), "id": name}]})
    assert result.status == "unverified"
    assert "a path that the spec's plan names" in result.reason


@pytest.mark.parametrize(
    "report", [None, {}, [], "x", 1, {"paths": None}, {"paths": "p1"}, {"paths": [1]}]
)
def test_nothing_reported_is_unverified(report):
    result = validate(SPEC, report)
    assert result.status == "unverified"
    assert result.required
    assert result.reason.startswith("p1: reported path")


@pytest.mark.parametrize("plan", [{"required": False, "paths": []}, None, {}, {"paths": [{}]}])
def test_a_custom_loss_without_a_plan_is_required_and_unverified(plan):
    bare = {"experiment_features": FEATURES, "correctness_preflight": plan}
    result = validate(bare, {"required": False, "paths": []})
    assert (result.status, result.required, result.applicability) == (
        "unverified",
        True,
        "required",
    )


STOCK = {
    "experiment_features": {**FEATURES, "custom_loss": False},
    "correctness_preflight": {"required": False, "paths": []},
}


@pytest.mark.parametrize("report", [None, {"required": False, "paths": []}])
def test_stock_only_execution_needs_no_preflight(report):
    result = validate(STOCK, report, reported_verdict="supported")
    assert result.to_record() == {
        "status": "not_applicable",
        "required": False,
        "checks": [],
        "reason": "spec.correctness_preflight opts out and no feature it covers is true",
        "evidence_source": "executor report; remote execution is not attested",
        "applicability": "not_applicable",
    }


@pytest.mark.parametrize("report", [{"required": True, "paths": []}, REPORT])
def test_a_custom_path_discovered_in_the_run_is_required_and_unverified(report):
    result = validate(STOCK, report)
    assert (result.status, result.required) == ("unverified", True)
    assert "the spec has no accepted preflight plan" in result.reason


def test_an_undeclared_feature_is_enforced():
    bare = {"correctness_preflight": {"required": False, "paths": []}}
    result = validate(bare, None)
    assert (result.status, result.applicability) == ("unverified", "unknown")


@pytest.mark.parametrize("verdict", ["supported", "refuted", "inconclusive"])
def test_any_reported_verdict_is_kept_unless_the_check_passed(verdict):
    record = validate(SPEC, None, reported_verdict=verdict).to_record()
    assert list(record)[-1] == "reported_verdict"
    assert record["reported_verdict"] == verdict
    assert "reported_verdict" not in validate(SPEC, REPORT, reported_verdict=verdict).to_record()
    assert "reported_verdict" not in validate(SPEC, None).to_record()


def test_lr_scaling_is_judged_against_the_planned_bound(put):
    planned = {**path(), "lr_scaling": {"rtol": 0.25}}
    probes = [
        {"learning_rate": 0.25, "update_norm": 1.0},
        {"learning_rate": 1.0, "update_norm": 5.0},
    ]
    report = put(REPORT, ("paths", 0, "lr_scaling"), probes)
    result = validate(spec(planned), report)
    assert result.status == "passed"
    assert result.to_record()["checks"][-1] == {
        "path": "p1",
        "check": "lr_scaling",
        "status": "passed",
        "tolerance": {"rtol": 0.25},
        "measured": {"max_relative_change": 0.25},
    }
    tight = {**path(), "lr_scaling": {"rtol": 0.2499999}}
    assert validate(spec(tight), report).reason == "p1: lr_scaling outside its tolerance"
    assert validate(spec(planned), REPORT).reason == "p1: measured lr_scaling probes"
    for bound in ({}, {"rtol": None}, {"rtol": -1}, {"rtol": float("nan")}, [], 1):
        result = validate(spec({**path(), "lr_scaling": bound}), report)
        assert result.status == "unverified"


def test_the_gate_has_the_same_status_and_the_contracts_answer():
    gate = validate(SPEC, None).to_gate()
    assert (gate.gate, gate.status, gate.may_proceed) == ("correctness", "unverified", False)
    assert gate.validation == validate(SPEC, None).to_record()


def run_main(tmp_path, spec_text, report_text):
    spec_file, report_file = tmp_path / "spec.json", tmp_path / "preflight.json"
    spec_file.write_text(spec_text)
    report_file.write_text(report_text)
    return main([str(spec_file), str(report_file)])


def test_the_command_exits_with_zero_only_if_passed_or_not_applicable(tmp_path, put, capsys):
    """Passed 0, not applicable 0, failed 1, unverified 1."""
    failing = put(REPORT, (*ERRORS, "baseline_loss", "max_abs_error"), 9.0)
    outcomes = [(SPEC, REPORT), (STOCK, None), (SPEC, failing), (SPEC, None)]
    codes = [run_main(tmp_path, json.dumps(s), json.dumps(r)) for s, r in outcomes]
    assert codes == [0, 0, 1, 1]
    assert '"status": "passed"' in capsys.readouterr().out


def test_the_command_reads_a_structured_output_and_a_triage_document(tmp_path, capsys):
    triage, output = {"spec": {**SPEC, "arms": []}}, {"correctness_preflight": REPORT}
    assert run_main(tmp_path, json.dumps(triage), json.dumps(output)) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "passed"


@pytest.mark.parametrize("text", ["", "{", '{"a": 1, "a": 1}', "[" * 100_000, "NaN"])
def test_the_command_refuses_files_that_are_no_json(tmp_path, capsys, text):
    assert run_main(tmp_path, json.dumps(SPEC), text) == 2
    assert "preflight.json: " in capsys.readouterr().err


def test_the_command_refuses_missing_files_and_arguments(tmp_path, capsys):
    assert main([str(tmp_path / "no.json"), str(tmp_path)]) == 2
    assert main(["one"]) == 2
    assert "usage" in capsys.readouterr().err


def test_the_module_keeps_the_public_names():
    assert correctness.parity_errors([1.0], [1.0])["max_abs_error"] == 0.0
    assert correctness.lr_scaling_error([]) is None


@pytest.mark.parametrize("minimum", ["0.9", True, [], float("nan")])
def test_a_minimum_that_is_no_number_verifies_nothing(put, minimum):
    keys = ("correctness_preflight", "paths", 0, "tolerances", "baseline_gradient", "min_cosine")
    result = validate(put(SPEC, keys, minimum), REPORT)
    assert result.reason == "p1: measured baseline_gradient errors"


def test_a_planned_path_without_id_is_named(put):
    result = validate(put(SPEC, ("correctness_preflight", "paths", 0, "id")), REPORT)
    assert result.reason == "a planned path has no id; p1: a path that the spec's plan names"


def test_rows_of_lr_scaling_have_a_status(put):
    """Exactly proportional updates meet a bound of 0."""
    exact = [{"learning_rate": rate, "update_norm": 4 * rate} for rate in (0.25, 0.5)]
    planned = spec({**path(), "lr_scaling": {"rtol": 0}})
    statuses = []
    for probes in (exact, [], [exact[0], {"learning_rate": 0.5, "update_norm": 9.0}]):
        result = validate(planned, put(REPORT, ("paths", 0, "lr_scaling"), probes))
        statuses.append(result.checks[-1].status)
    assert statuses == ["passed", "unverified", "failed"]
