"""What cannot be run is refused before anything is asked of a service, in one line."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from evidence.errors import ConflictError, InputError
from evidence.execution import ExecutionFile
from evidence.profile import unscaled
from evidence.spec import Spec
from flows.launch import read_experiment
from flows.plan import RunPlan, check_launchable
from flows.run import open_run
from tasks.service_settings import ServiceSettings
from tests.flows import tiny_spec
from tests.flows.conftest import make_plan

URL = "http://127.0.0.1:1"


def _check(document: dict[str, Any], execution: dict[str, Any]) -> None:
    check_launchable(Spec.parse(document), ExecutionFile.parse(execution))


def test_open_point_is_refused_by_its_path() -> None:
    document = tiny_spec.spec()
    document["correctness_preflight"]["paths"][0]["reference_revision"] = "UNRESOLVED: pin it"

    with pytest.raises(InputError, match=r"correctness_preflight.paths\[0\].reference_revision"):
        _check(document, tiny_spec.execution(document))


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("rollout", "groups"), 2, "rollout.groups"),
        (("optimizer", "learning_rate"), 0.1, "optimizer.learning_rate"),
        (("lora", "rank"), 8, "lora.rank"),
        (("rollout_steps",), 3, "rollout_steps"),
        (("spec_sha256",), "0" * 64, "spec_sha256"),
        (
            ("warm_start",),
            {"demonstrations": 1, "epochs": 1, "batch_size": 1, "learning_rate": 0.1, "seed": 0},
            "warm_start",
        ),
    ],
)
def test_contradiction_is_refused_by_its_field(
    path: tuple[str, ...], value: Any, field: str
) -> None:
    document = tiny_spec.spec()
    execution = tiny_spec.execution(document)
    target = execution
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = value

    with pytest.raises(InputError) as error:
        _check(document, execution)

    assert error.value.field == field


def test_loss_that_needs_top_k_in_training_is_refused() -> None:
    document = tiny_spec.spec()
    execution = tiny_spec.execution(document)
    execution["arms"]["dppo"]["loss"] |= {"divergence": "topk_tv", "top_k": 20}

    with pytest.raises(InputError, match=r"arms.dppo.loss.divergence"):
        _check(document, execution)


def test_missing_execution_file_names_what_it_would_hold(tmp_path: Path) -> None:
    path = tmp_path / "alone.json"
    path.write_text(json.dumps(tiny_spec.spec()))

    with pytest.raises(InputError, match="execution file"):
        read_experiment(str(path))


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_one_is_refused(limit: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--limit"):
        make_plan(tmp_path, URL, limit=limit)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "", "http://user:pw@host"])
def test_address_that_is_no_service_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="--service"):
        ServiceSettings(url=url)


def test_run_directory_of_another_spec_is_refused(tmp_path: Path) -> None:
    open_run(make_plan(tmp_path, URL))
    document = tiny_spec.spec(title="Another experiment")
    other = make_plan(tmp_path, URL, document=document)

    with pytest.raises(ConflictError, match="spec_sha256"):
        open_run(other)


def test_limited_and_whole_run_cannot_share_a_directory(tmp_path: Path) -> None:
    open_run(make_plan(tmp_path, URL, limit=1))

    with pytest.raises(ConflictError, match="limit"):
        open_run(make_plan(tmp_path, URL))


def test_plan_keeps_what_the_spec_says() -> None:
    document = tiny_spec.spec()
    before = copy.deepcopy(document)

    plan = RunPlan(
        scaled=unscaled(Spec.parse(document), ExecutionFile.parse(tiny_spec.execution(document))),
        service=ServiceSettings(url=URL),
        run_id="r",
        run_dir="runs",
    )

    assert plan.spec.raw == before
