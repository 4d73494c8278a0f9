"""Whole runs on the tiny model, each in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.local_service.launch import LocalService
from deploy.local_service.model_store import resolve
from envs.protocols import Environment
from envs.registry import make_environment
from evidence.conformance import Measurement
from evidence.execution import ExecutionFile
from evidence.profile import unscaled
from evidence.run import Run
from evidence.spec import Spec
from flows.outcome import Outcome
from flows.plan import RunPlan
from flows.run import run_comparison
from tasks import conformance_gate
from tasks.conformance import measure
from tasks.service_settings import ServiceSettings
from tasks.tokenizers import load_tokenizer
from tests.evidence.conformance_cases import healthy
from tests.flows import tiny_spec

PlanMaker = Callable[..., RunPlan]


def make_plan(
    folder: Path,
    url: str,
    *,
    document: tiny_spec.Document | None = None,
    execution: tiny_spec.Document | None = None,
    run_id: str = "run",
    **options: Any,
) -> RunPlan:
    """A plan of the small spec, or of another one."""
    document = document if document is not None else tiny_spec.spec()
    execution = execution if execution is not None else tiny_spec.execution(document)
    return RunPlan(
        scaled=unscaled(Spec.parse(document), ExecutionFile.parse(execution)),
        service=ServiceSettings(url=url),
        run_id=run_id,
        run_dir=str(folder),
        **options,
    )


@pytest.fixture(scope="session", autouse=True)
def _conformance_at_once() -> Iterator[None]:
    """Answer the conformance gate with a healthy service's numbers: the kit has its own tests."""

    async def measured(*_: Any, **__: Any) -> list[Measurement]:
        return healthy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conformance_gate, "measure", measured)
        yield


@pytest.fixture
def real_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the conformance gate of this test's runs really ask the service."""
    monkeypatch.setattr(conformance_gate, "measure", measure)


@pytest.fixture
def plan_of(tmp_path: Path, local_service: LocalService) -> PlanMaker:
    """Makes plans for the shared service, in this test's folder."""

    def make(**options: Any) -> RunPlan:
        return make_plan(tmp_path, local_service.url, **options)

    return make


@pytest.fixture(scope="session")
def whole_run(
    tmp_path_factory: pytest.TempPathFactory, local_service: LocalService
) -> tuple[Run, Outcome]:
    """One undisturbed run of the small spec, for every test that only looks at it."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = run_comparison(make_plan(folder, local_service.url))
    return Run.open(f"{folder}/run"), outcome


@pytest.fixture(scope="module")
def retail_environment(local_service: LocalService) -> Environment:
    """The embedded shop, over the tiny model's tokenizer."""
    folder = resolve("tiny").folder
    return make_environment(
        "retail", {}, tokenizer=load_tokenizer(str(folder)), renderer="qwen3_instruct"
    )
