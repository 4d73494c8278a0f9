"""A whole comparison whose user, and a judge, are models of the same service: noise, in this case.

The conversations are those of the small stand-in for tau-bench.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.local_service.launch import LocalService
from evidence.run import Run
from flows.run import run_comparison
from tests.envs.tau_stand_in import stand_in
from tests.flows import retail_spec
from tests.flows.conftest import make_plan
from tests.flows.tiny_spec import Document

SERVED: Document = {
    "kind": "served",
    "model": "tiny",
    "prompt_template": "rubric-judge-v1",
    "renderer": "qwen3_instruct",
    "temperature": 1.0,
    "max_tokens": 1500,
    "max_attempts": 6,
}


@pytest.fixture(autouse=True)
def package(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in, where a user's checkout would be."""
    with stand_in(tmp_path_factory.mktemp("tau"), monkeypatch) as folder:
        monkeypatch.setenv("GATED_RL_TAU_BENCH", str(folder))
        yield


def plan(folder: Path, url: str, **changes: Any) -> Any:
    document = retail_spec.spec()
    document["max_seq_len"] = 4000
    for criterion in document["decision_rule"]["criteria"]:
        criterion["metric"] = criterion["metric"].replace("task_reward", "tau_bench_task_reward")
    execution = retail_spec.execution(
        document,
        environment={"name": "tau_retail", "settings": {"train_tasks": 4, "eval_tasks": 2}},
        **changes,
    )
    return make_plan(folder, url, document=document, execution=execution)


@pytest.mark.slow
def test_served_user_plays_a_whole_comparison(tmp_path: Path, local_service: LocalService) -> None:
    """Its noise is taken for what a user says; what it cuts or leaves empty is asked for again."""
    user = SERVED | {"prompt_template": "tau-user-v1"}
    outcome = run_comparison(plan(tmp_path, local_service.url, simulator=user))
    run = Run.open(f"{tmp_path}/run")

    assert outcome.exit_kind == "inconclusive", outcome.reason
    rows = [
        json.loads(line) for line in run.read_bytes("bundle/metrics-episodes.jsonl").splitlines()
    ]
    assert {row["phase"] for row in rows} == {"pilot", "train", "eval"}
    for row in rows:
        assert row["simulator_answers"] >= row["episodes"]
        assert 0.0 < row["simulator_parse_rate"] <= 1.0
        assert row["judge_answers"] == 0
    assert b"User simulator: share of usable answers" in run.read_bytes("report.html")
    assert run.read_bytes("transcripts.html").count(b"<section") >= 4


@pytest.mark.slow
def test_judge_of_noise_closes_the_attempt_and_is_asked_anew_the_next_time(
    tmp_path: Path, local_service: LocalService
) -> None:
    """No episode gets a score; the failures are named and counted, and the run can go on."""
    judge = SERVED | {"max_attempts": 2, "max_tokens": 60}

    first = run_comparison(plan(tmp_path, local_service.url, judge=judge))
    second = run_comparison(plan(tmp_path, local_service.url, judge=judge))
    run = Run.open(f"{tmp_path}/run")

    assert (first.exit_kind, second.exit_kind) == ("capacity", "capacity")
    assert "judge failed after 2 attempts" in first.reason
    failed = run.events("partner_failed")
    assert [event["partner"] for event in failed] == ["judge", "judge"]
    assert {problem for event in failed for problem in event["problems"]} <= {
        "judge_prose",
        "judge_cut",
    }
    assert run.keys("rollouts") == []
