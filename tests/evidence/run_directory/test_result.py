"""The structured result is posted in the contract's order, and what was posted stays."""

import pytest

from evidence.errors import InputError
from evidence.output import validate_history
from evidence.result import StructuredResult
from evidence.run import Run


@pytest.fixture
def run(tmp_path):
    """A run of two arms."""
    spec = {"arms": [{"name": "grpo"}, {"name": "dppo"}]}
    return Run.create(str(tmp_path), run_id="r", spec=spec)


@pytest.fixture
def result(run):
    made = StructuredResult(run)
    made.start("Started.")
    return made


DEVIATION = {"field": "steps", "original": "20", "effective": "14", "reason": "time"}


def _finish(result, **over):
    return result.finish(
        **{
            "status": "succeeded",
            "verdict": "inconclusive",
            "outcome_reason": "insufficient_evidence",
            "summary": "Both arms ran.",
            **over,
        }
    )


def test_whole_sequence_is_consistent(run, result):
    """From start to verdict every post is consistent with the one before it."""
    result.deviate([DEVIATION], original_hypothesis_tested=True)
    result.post_base({"accuracy": 0.5})
    result.post_metrics({"step": 1})
    result.complete_arm("grpo", {"accuracy": 0.6})
    result.complete_arm("dppo", {"accuracy": 0.7})
    result.post_usage(wall_seconds=12.5)
    final = _finish(result, verdict="supported", outcome_reason="supported")

    assert list(final)[:6] == [
        *("status", "summary", "metrics", "completed_arms", "verdict", "outcome_reason")
    ]
    assert final["completed_arms"] == ["grpo", "dppo"]
    assert final["metrics"] == {
        "step": 1,
        "arms": {"base": {"accuracy": 0.5}, "grpo": {"accuracy": 0.6}, "dppo": {"accuracy": 0.7}},
    }
    assert final["observed_usage"] == {"wall_seconds": 12.5, "gpu_hours": None}
    posted = run.posted_results()
    assert validate_history(posted, spec=run.spec, base_arm="base").issues == ()
    assert all(post.get("verdict") is None for post in posted[:-1])
    assert posted[1]["deviations"] == [DEVIATION]
    assert run.result() == final
    assert run.read_json("attempts/1/result.json") == final


def test_arm_before_the_base_is_refused(run, result):
    with pytest.raises(InputError, match=r"metrics.arms.base: expected the evaluation of base"):
        result.complete_arm("grpo", {"accuracy": 0.6})

    assert run.result()["completed_arms"] == []


def test_numbers_stay(result):
    """A later value replaces one of the same name; no name disappears."""
    result.post_metrics({"loss": 1.0, "step": 1})
    result.post_metrics({"step": 2})

    assert result.current["metrics"] == {"loss": 1.0, "step": 2}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", True, None])
def test_metric_that_is_no_number_is_refused(run, result, value):
    before = run.result()

    with pytest.raises(InputError):
        result.post_metrics({"loss": value})

    assert run.result() == before


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"verdict": "supported", "outcome_reason": "supported"}, "needs every arm, grpo"),
        ({"outcome_reason": "supported"}, "does not go with this verdict"),
        ({"verdict": "validated"}, "verdict: expected one of"),
        ({"outcome_reason": "looks_good"}, "outcome_reason: expected one of"),
        ({"status": "running"}, "succeeded or failed"),
        ({"capacity_block": {"error": "x"}}, "capacity_block"),
    ],
)
def test_final_that_contradicts_itself_is_refused(run, result, over, named):
    with pytest.raises(InputError, match=named):
        _finish(result, **over)

    assert run.result()["status"] == "running"
    assert run.attempt == 1


def test_final_result_is_not_changed(result):
    _finish(result)

    with pytest.raises(InputError, match="a final result is not changed"):
        result.post_metrics({"late": 1})
    with pytest.raises(InputError, match="a final result is not changed"):
        _finish(result, summary="Something else.")


def test_finishing_again_after_a_crash_is_the_same(run, result):
    """Whether the attempt was closed or not, the second call completes the first."""
    final = _finish(result)

    assert _finish(result) == final
    assert run.files("attempts") == ["attempts/1/result.json"]


def test_next_attempt_starts_from_all_numbers(run, result):
    """A capacity block ends an attempt; the next has its numbers, not its verdict."""
    result.post_base({"accuracy": 0.5})
    result.complete_arm("grpo", {"accuracy": 0.6})
    block = {"error": "429", "comparison_steps_completed": 3, "released_clients": True}
    _finish(
        result,
        status="failed",
        outcome_reason="incomplete_execution",
        capacity_block=block,
    )

    result.start("Going on.")

    assert run.attempt == 2
    assert result.current["status"] == "running"
    assert "verdict" not in result.current
    assert "capacity_block" not in result.current
    assert result.current["completed_arms"] == ["grpo"]
    assert result.current["metrics"]["arms"]["grpo"] == {"accuracy": 0.6}
    assert run.read_json("attempts/1/result.json")["capacity_block"] == block


def test_changed_hypothesis_needs_words(result):
    with pytest.raises(InputError, match="tested_instead"):
        result.deviate([DEVIATION], original_hypothesis_tested=False)

    result.deviate([DEVIATION], original_hypothesis_tested=False, tested_instead="Less.")
    assert result.current["tested_instead"] == "Less."


def test_deviation_of_another_form_is_refused(result):
    with pytest.raises(InputError, match="deviations"):
        result.deviate([{"field": "colour"}], original_hypothesis_tested=True)


@pytest.mark.parametrize("name", ["verdict", "metrics", "status", "deviations"])
def test_block_with_its_own_method_is_refused(result, name):
    with pytest.raises(InputError, match="a block that has no method"):
        result.post_block(name, {})


def test_post_before_the_start_is_refused(run):
    with pytest.raises(InputError, match="a started result"):
        StructuredResult(run).say("hello")
