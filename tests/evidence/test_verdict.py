import pytest

from evidence.verdict import judge

GOOD = {"correctness": "passed", "generation_audit": "not_applicable"}


def output(verdict="supported", **changed):
    return {
        "status": "succeeded",
        "verdict": verdict,
        "original_hypothesis_tested": True,
        "deviations": [],
        **changed,
    }


def deviation(field):
    return {"field": field, "original": "a", "effective": "b", "reason": "c"}


@pytest.mark.parametrize("verdict", ["supported", "refuted", "inconclusive"])
def test_a_claim_stands_where_nothing_withholds_it(verdict):
    for gates in (None, {}, GOOD, {**GOOD, "decision": verdict}):
        if verdict == "inconclusive" or gates is None or "decision" not in gates:
            assert judge(output(verdict), gates=gates).to_record() == {
                "verdict": verdict,
                "reasons": [],
            }
        else:
            assert judge(output(verdict), gates=gates).verdict == verdict


@pytest.mark.parametrize(
    "status",
    [
        "failed",
        "unverified",
        "unknown",
        "invalid",
        "incomparable",
        "infeasible",
        "uncertain",
        "inconsistent",
        "",
        None,
        True,
        1,
        [],
        float("nan"),
    ],
    ids=repr,
)
def test_any_other_status_of_a_check_withholds_a_definitive_claim(status):
    for claim in ("supported", "refuted"):
        result = judge(output(claim), gates={**GOOD, "restoration": status})
        assert (result.verdict, result.reported_verdict) == ("inconclusive", claim)
        assert result.changed_experiment_verdict is None
        assert len(result.reasons) == 1
        assert result.reasons[0].startswith("restoration is ")


@pytest.mark.parametrize(
    "status", ["passed", "not_applicable", "valid", "comparable", "feasible", "consistent"]
)
def test_a_check_that_passed_or_does_not_apply_withholds_nothing(status):
    assert judge(output(), gates={"x": status}).verdict == "supported"


@pytest.mark.parametrize(
    ("claim", "decision", "verdict"),
    [
        ("supported", "supported", "supported"),
        ("refuted", "refuted", "refuted"),
        ("supported", "refuted", "inconclusive"),
        ("refuted", "supported", "inconclusive"),
        ("supported", "uncertain", "inconclusive"),
        ("supported", "unverified", "inconclusive"),
        ("supported", "passed", "inconclusive"),
        ("supported", "not_applicable", "supported"),
        ("supported", None, "inconclusive"),
        ("inconclusive", "supported", "inconclusive"),
        ("inconclusive", "unverified", "inconclusive"),
    ],
)
def test_a_definitive_claim_must_be_what_was_recomputed(claim, decision, verdict):
    """A claim is never upgraded: inconclusive stays inconclusive."""
    result = judge(output(claim), gates={"decision": decision})
    assert result.verdict == verdict
    assert result.reported_verdict == (claim if claim != verdict else None)


def test_late_deviations_are_flagged_but_withhold_nothing():
    assert judge(output(), gates={"deviations": "unrecorded"}).verdict == "supported"


@pytest.mark.parametrize("claim", ["supported", "refuted", "inconclusive"])
def test_another_hypothesis_leaves_the_specs_own_inconclusive(claim):
    changed = output(claim, original_hypothesis_tested=False, tested_instead="a shorter run")
    assert judge(changed).to_record() == {
        "verdict": "inconclusive",
        "reasons": ["The original hypothesis was not tested: a shorter run."],
        "changed_experiment_verdict": claim,
    }


@pytest.mark.parametrize("value", ["true", 0, 1, [], ""])
def test_only_true_says_that_the_hypothesis_was_tested(value):
    assert judge(output(original_hypothesis_tested=value)).verdict == "inconclusive"
    assert judge(output(original_hypothesis_tested=None)).verdict == "supported"


@pytest.mark.parametrize("field", ["objective", "endpoint"])
def test_another_objective_or_endpoint_is_another_hypothesis(field):
    result = judge(output(deviations=[deviation("steps"), deviation(field)]))
    assert (result.verdict, result.changed_experiment_verdict) == ("inconclusive", "supported")


@pytest.mark.parametrize("field", ["model", "effective_batch", "steps", "dataset", "evaluator"])
def test_other_deviations_leave_the_hypothesis_tested(field):
    assert judge(output(deviations=[deviation(field)])).verdict == "supported"


def test_both_kinds_of_doubt_are_kept():
    result = judge(output(original_hypothesis_tested=False), gates={"correctness": "failed"})
    assert (result.reported_verdict, result.changed_experiment_verdict) == (
        "supported",
        "supported",
    )
    assert len(result.reasons) == 2


@pytest.mark.parametrize(
    "report",
    [
        None,
        [],
        "x",
        {},
        {"verdict": "validated"},
        {"verdict": ["supported"]},
        {"status": "running"},
    ],
    ids=repr,
)
def test_without_a_valid_verdict_nothing_is_claimed(report):
    assert judge(report).verdict == "inconclusive"


@pytest.mark.parametrize("status", ["failed", "running", None, 1])
def test_a_definitive_claim_needs_a_successful_execution(status):
    assert judge(output(status=status)).verdict == "inconclusive"
    assert judge(output("inconclusive", status=status)).reasons == ()


def test_a_withheld_claim_is_in_the_record():
    record = judge(output("refuted"), gates={"correctness": "failed"}).to_record()
    assert record == {
        "verdict": "inconclusive",
        "reasons": ["correctness is failed."],
        "reported_verdict": "refuted",
    }
