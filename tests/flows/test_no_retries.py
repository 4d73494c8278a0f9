"""Prefect repeats nothing by itself: the service layer owns every retry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from flows import audit, comparison, diagnostic, steps
from tasks.run_task import RunTask, _prefect_task

made = [value for value in vars(steps).values() if isinstance(value, RunTask)]
assert len(made) > 10
tasks = {one.name: _prefect_task(one.step, one.name).retries for one in made}
flows = {one.name: one.retries for one in (audit.audit, comparison.comparison, diagnostic.diagnostic)}
print({name: retries for name, retries in {**tasks, **flows}.items() if retries})
"""


def test_no_task_and_no_flow_is_retried_whatever_the_settings_say(tmp_path: Path) -> None:
    """Defaults of 3 in the environment, read when Prefect is imported, change nothing."""
    settings = {"PREFECT_TASKS_DEFAULT_RETRIES": "3", "PREFECT_FLOWS_DEFAULT_RETRIES": "3"}

    said = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        env=os.environ | settings | {"PREFECT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert said.stdout.strip().splitlines()[-1] == "{}"
