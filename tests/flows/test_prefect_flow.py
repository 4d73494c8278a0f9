"""Inside Prefect every gate and every step of a run is a task of its own flow run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local_service.launch import LocalService
from evidence.run import Run
from tests.flows import tiny_spec


@pytest.fixture(scope="module")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Prefect server of the test's own, in an empty home."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("prefect")
        patch.setenv("PREFECT_HOME", str(home))
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        patch.setenv("PREFECT_LOGGING_LEVEL", "ERROR")
        patch.setenv("DO_NOT_TRACK", "1")
        from prefect.testing.utilities import prefect_test_harness  # noqa: PLC0415 - reads its settings

        with prefect_test_harness(server_startup_timeout=240):
            yield


@pytest.mark.slow
def test_flow_shows_every_step_as_a_task(
    prefect_server: None, tmp_path: Path, local_service: LocalService
) -> None:
    from prefect.client.orchestration import get_client  # noqa: PLC0415 - after the settings

    from flows.comparison import comparison  # noqa: PLC0415

    document = tiny_spec.spec()
    (tmp_path / "small.json").write_text(json.dumps(document))
    (tmp_path / "small.execution.json").write_text(json.dumps(tiny_spec.execution(document)))

    async def run_and_look() -> tuple[dict[str, object], list[str]]:
        outcome = await comparison(
            spec="tiny",
            spec_file=str(tmp_path / "small.json"),
            service=local_service.url,
            run_id="shown",
            run_dir=str(tmp_path),
            limit=1,
        )
        async with get_client() as client:
            names = [run.name for run in await client.read_task_runs(limit=200)]
        return outcome, names

    outcome, names = asyncio.run(run_and_look())

    assert outcome["verdict"] == "inconclusive"
    kinds = {name.rsplit("-", 1)[0] for name in names}
    assert kinds == {
        *("spec-preflight", "service-probe", "conformance", "generation-audit"),
        "correctness-preflight",
        *("initialization-checkpoint", "restoration-preflight", "evaluator", "evaluation"),
        *("activation-pilot", "feasibility", "rollout", "update", "checkpoint"),
    }
    assert sum(name.startswith("update-") for name in names) == 4
    assert Run.open(f"{tmp_path}/shown").events("ended")


@pytest.mark.slow
def test_flow_refuses_a_name_that_is_no_name(prefect_server: None) -> None:
    from prefect.exceptions import ParameterTypeError  # noqa: PLC0415 - after the settings

    from flows.comparison import comparison  # noqa: PLC0415

    async def start() -> None:
        await comparison(spec="tiny", service="http://127.0.0.1:1", run_id="../elsewhere")

    with pytest.raises(ParameterTypeError, match="run_id"):
        asyncio.run(start())
