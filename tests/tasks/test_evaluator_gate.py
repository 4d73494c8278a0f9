"""The evaluator is held against the plan before it scores anything."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tasks.evaluation import check_canaries
from tests.flows import tiny_spec
from tests.tasks.fake_runs import FakeEnvironment, context

pytestmark = pytest.mark.anyio

NINE = tuple(f"item-{index}" for index in range(9))


async def test_evaluator_gate_passes_with_the_planned_items_and_metrics(tmp_path: Path) -> None:
    answer = await check_canaries(context(tmp_path))

    assert (answer.result.status, answer.result.reasons) == ("passed", ())


async def test_evaluator_gate_fails_with_fewer_items_than_planned(tmp_path: Path) -> None:
    answer = await check_canaries(context(tmp_path, FakeEnvironment(eval_ids=NINE)))

    assert answer.result.status == "failed"
    assert answer.result.reasons == ("held-out items: 9 items, planned are 10",)


async def test_evaluator_gate_lets_a_limited_run_do_with_fewer_items(tmp_path: Path) -> None:
    answer = await check_canaries(context(tmp_path, FakeEnvironment(eval_ids=NINE), limit=1))

    assert answer.result.status == "passed"


async def test_evaluator_gate_names_a_metric_that_the_environment_does_not_have(
    tmp_path: Path,
) -> None:
    rule = copy.deepcopy(tiny_spec.SPEC["decision_rule"])
    rule["criteria"][0]["metric"] = "acuracy"
    environment = FakeEnvironment(metrics=("accuracy", "format"))

    answer = await check_canaries(context(tmp_path, environment, decision_rule=rule))

    assert answer.result.status == "failed"
    assert answer.result.reasons == (
        "metric acuracy: the environment does not measure it; it measures accuracy, format",
    )
