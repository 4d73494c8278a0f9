"""Eight comparison runs at once against one embedded service and one Prefect server."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from evidence.run import Run
from tests.ui.running_ui import running_ui

LOGGER = logging.getLogger(__name__)
AT_ONCE = 8
ENDED = ("Inconclusive", "StoppedByGate", "Failed", "Crashed", "OutOfTime", "ServiceRefused")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_runs_at_once_end_as_one_alone(
    tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    with running_ui(tmp_path, "--at-once", str(AT_ONCE)) as ui:
        started = time.monotonic()
        alone = ui.launch("alone")
        assert ui.await_state(alone, *ENDED) == "Inconclusive"
        seconds_alone = time.monotonic() - started

        started = time.monotonic()
        flow_runs = [ui.launch(f"load-{number}") for number in range(AT_ONCE)]
        ends = [ui.await_state(flow_run, *ENDED, seconds=600.0) for flow_run in flow_runs]
        seconds_together = time.monotonic() - started
        counts = [ui.flow_run(flow_run)["run_count"] for flow_run in flow_runs]

    record_property("seconds_alone", round(seconds_alone, 1))
    record_property("seconds_together", round(seconds_together, 1))
    LOGGER.warning("alone %.1f s, %d at once %.1f s", seconds_alone, AT_ONCE, seconds_together)
    assert ends == ["Inconclusive"] * AT_ONCE
    assert counts == [1] * AT_ONCE
    expected = Run.open(str(ui.run_dir / "alone"))
    for number in range(AT_ONCE):
        run = Run.open(str(ui.run_dir / f"load-{number}"))
        assert run.content_digests() == expected.content_digests()
        assert verdict_of(run) == verdict_of(expected)


def verdict_of(run: Run) -> tuple[object, ...]:
    result = run.result() or {}
    return tuple(result.get(name) for name in ("verdict", "outcome_reason", "summary", "metrics"))
