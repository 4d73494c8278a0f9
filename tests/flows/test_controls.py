"""Controls: the same arm twice differs by exactly nothing; a limited run settles nothing."""

from __future__ import annotations

from evidence.run import Run
from flows.run import run_comparison
from tests.flows import tiny_spec
from tests.flows.conftest import PlanMaker


def test_same_arm_twice_has_no_effect_at_all(plan_of: PlanMaker) -> None:
    """Both arms sample the same tokens: what an arm is named does not enter its seeds.

    No service has the mask built in, so that its baseline is compared with nothing stock.
    """
    document, execution = tiny_spec.same_arm_twice()
    plan = plan_of(document=document, execution=execution, accept_unverified=("correctness",))

    outcome = run_comparison(plan)

    run = Run.open(f"{plan.run_dir}/run")
    assert outcome.verdict == "inconclusive"
    assert run.read_table("decision")[0]["effect"] == 0.0
    for table in ("rollouts", "tokens", "updates"):
        first, second = (run.read_all(table, prefix=(arm, "train")) for arm in ("grpo", "dppo"))
        assert first.drop_columns(["arm"]).equals(second.drop_columns(["arm"]))


def test_limited_run_gives_no_verdict(plan_of: PlanMaker) -> None:
    plan = plan_of(limit=1)

    outcome = run_comparison(plan)

    run = Run.open(f"{plan.run_dir}/run")
    assert (outcome.verdict, outcome.outcome_reason) == ("inconclusive", "incomplete_execution")
    assert [key[2] for key in run.keys("updates", prefix=("grpo", "train"))] == [0, 1]
