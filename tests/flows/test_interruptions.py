"""A run that was interrupted ends exactly like one that was not."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from deploy.local_service.launch import LocalService
from evidence.run import Run
from flows.outcome import Outcome
from flows.run import run_comparison
from tasks.patience import RetryPolicy
from tests.flows.conftest import make_plan

ROOT = Path(__file__).resolve().parents[2]
QUICK = RetryPolicy(capacity_delays=(0.2, 0.4, 0.8), outage_delays=(0.2, 0.4, 0.8, 1.5))


def _process(url: str, folder: Path, moment: str) -> int:
    command = [sys.executable, "-m", "tests.flows.victim", url, str(folder), moment]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode


def _assert_same(run: Run, undisturbed: Run) -> None:
    """Same content, same result, same verdict, and no finished group sampled twice."""
    assert run.content_digests() == undisturbed.content_digests()
    mine, other = run.result(), undisturbed.result()
    assert mine is not None
    assert other is not None
    for name in ("status", "verdict", "outcome_reason", "metrics", "decision"):
        assert mine[name] == other[name], name
    # Arms are posted as they finish, and either may finish first.
    assert sorted(mine["completed_arms"]) == sorted(other["completed_arms"])
    applied = Counter(
        (event["arm"], event["update"])
        for event in run.events("step_outcome")
        if event["phase"] == "train"
    )
    assert set(applied) == {(arm, update) for arm in ("grpo", "dppo") for update in range(4)}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("event:step_outcome:train:7", id="after_a_step_was_applied"),
        pytest.param(
            "event:step_intent:train:6", id="before_a_step_is_sent", marks=pytest.mark.slow
        ),
    ],
)
def test_killed_run_goes_on_and_ends_the_same(
    moment: str, tmp_path: Path, local_service: LocalService, whole_run: tuple[Run, Outcome]
) -> None:
    assert _process(local_service.url, tmp_path, moment) == -9

    outcome = run_comparison(make_plan(tmp_path, local_service.url))

    run = Run.open(f"{tmp_path}/run")
    assert outcome.verdict == whole_run[1].verdict
    _assert_same(run, whole_run[0])
    restored = [event for event in run.events("client_opened") if event["restore"] > 0]
    assert restored
    assert {event["policy_version"] for event in restored} <= {2, 4}
    result = run.result()
    assert result is not None
    for arm in result["initialization_provenance"]["arms"]:
        checks = [check["after_restore"] for check in arm["optimizer_checks"]]
        assert checks == list(range(arm["restore_count"] + 1))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_run_killed_at_random_writes_ends_the_same(
    tmp_path: Path, local_service: LocalService, whole_run: tuple[Run, Outcome]
) -> None:
    """Killed again and again, each time after 60 to 180 writes, before or after one of them."""
    rng = random.Random(20)
    kills = 0
    while _process(local_service.url, tmp_path, f"write:{rng.randint(60, 180)}") != 0:
        kills += 1
        assert kills < 40

    assert kills >= 3
    _assert_same(Run.open(f"{tmp_path}/run"), whole_run[0])


@pytest.mark.slow
def test_run_on_a_service_that_fails_one_call_in_ten_ends_the_same(
    tmp_path: Path,
    start_service: Callable[..., LocalService],
    whole_run: tuple[Run, Outcome],
) -> None:
    """429, 503, 500, 410, lost requests, lost answers, late answers: none of them shows."""
    service = start_service(max_adapters=64)
    actions = [{"kind": "status", "status": status} for status in (429, 503, 500, 410)]
    actions += [{"kind": "drop_before"}, {"kind": "drop_after"}, {"kind": "delay", "seconds": 0.2}]
    rule = {"name": "one in ten", "rate": 0.1, "seed": 3, "actions": actions}
    control = f"{service.url}/api/v1/local/faults"
    httpx.post(control, json={"rules": [rule]}).raise_for_status()

    run_comparison(make_plan(tmp_path, service.url, policy=QUICK))

    assert httpx.get(control).json()["rules"][0]["hits"] > 20
    _assert_same(Run.open(f"{tmp_path}/run"), whole_run[0])


@pytest.mark.slow
def test_run_survives_a_kill_of_the_service(
    tmp_path: Path,
    start_service: Callable[..., LocalService],
    whole_run: tuple[Run, Outcome],
) -> None:
    """The service is killed while both arms train, and comes back on the same port and store."""
    service = start_service(max_adapters=64)
    plan = make_plan(tmp_path, service.url, policy=QUICK)
    worker = threading.Thread(target=run_comparison, args=(plan,))
    worker.start()
    run = _wait_for_training(tmp_path)
    service.kill()
    time.sleep(1.0)
    again = service.restart()
    try:
        worker.join(timeout=240)
        assert not worker.is_alive()
    finally:
        again.kill()
    _assert_same(run, whole_run[0])
    assert run.events("service_failure")


def _wait_for_training(folder: Path) -> Run:
    for _ in range(1200):
        time.sleep(0.1)
        if not (folder / "run" / "identity.json").exists():
            continue
        run = Run.open(f"{folder}/run")
        if any(event["phase"] == "train" for event in run.events("step_outcome")):
            return run
    raise AssertionError("training never began")
