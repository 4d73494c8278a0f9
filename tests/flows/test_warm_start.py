"""A warm start: the same data every time, one checkpoint for both arms, and no adapter but its own."""

from __future__ import annotations

import asyncio
import copy
import json
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from deploy.adapter_export import write_record, write_tensors
from deploy.cli import main
from deploy.local_service.adapter import LoraConfig
from deploy.local_service.base_model import BaseModel
from deploy.local_service.launch import LocalService
from deploy.local_service.model_store import resolve
from deploy.local_service.optimizer import AdamWConfig
from deploy.local_service.training import TrainableModel, TrainingDatum
from envs.registry import make_environment
from evidence.canonical import digest
from evidence.errors import InputError
from evidence.execution import ExecutionFile, contradictions
from evidence.run import Run
from evidence.run_settings import WarmStart
from evidence.spec import Spec
from evidence.verify import verify_bundle
from flows.launch import read_experiment
from flows.outcome import Outcome
from flows.plan import RunPlan
from flows.run import open_run, run_comparison
from tasks.adapter_files import find_adapter
from tasks.context import RunContext
from tasks.datums import TrainedSequence
from tasks.demonstration_data import epoch_batches, make_demonstrations
from tasks.initialization import ensure_initialization
from tasks.service import Service
from tasks.tokenizers import load_tokenizer
from tests.flows import retail_spec
from tests.flows.conftest import make_plan
from tests.flows.tiny_spec import Document

WARM_START: Document = {
    "demonstrations": 3,
    "epochs": 2,
    "batch_size": 2,
    "learning_rate": 0.01,
    "seed": 0,
}
AUDIT: Document = {
    "required": True,
    "answer_comparison": "categorical_exact",
    "min_sample_size": 200,
    "max_label_errors": 0,
    "max_eval_overlaps": 0,
}


def warm_spec() -> Document:
    """The small shop comparison, with a warm start declared."""
    document = retail_spec.spec(generation_audit=AUDIT)
    document["experiment_features"] |= {"warmup_adaptation": True, "generated_training_data": True}
    return document


def warm_execution(document: Document, **changes: Any) -> Document:
    """Its execution file, with settings of the warm start changed."""
    return retail_spec.execution(document, warm_start=WARM_START | changes)


@pytest.fixture(scope="module")
def warm_run(
    tmp_path_factory: pytest.TempPathFactory, local_service: LocalService
) -> tuple[Run, Outcome]:
    """A whole run whose warm start is trained through the protocol."""
    folder, document = tmp_path_factory.mktemp("warm"), warm_spec()
    plan = make_plan(
        folder, local_service.url, document=document, execution=warm_execution(document)
    )
    outcome = run_comparison(plan)
    return Run.open(f"{folder}/run"), outcome


def report_of(service: LocalService, uri: str) -> dict[str, Any]:
    with httpx.Client(trust_env=False, base_url=service.url) as client:
        answer = client.get("/api/v1/local/checkpoints", params={"path": uri})
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


@pytest.fixture(scope="module")
def adapter(
    tmp_path_factory: pytest.TempPathFactory,
    warm_run: tuple[Run, Outcome],
    local_service: LocalService,
) -> Path:
    """The warm start's adapter, exported as it would be shipped."""
    folder = tmp_path_factory.mktemp("adapter")
    event = warm_run[0].events("warm_start")[0]
    blob = report_of(local_service, event["uri"])["blob"]
    record = write_tensors(local_service.settings.store / "blobs" / blob, folder)
    write_record(record | {"demonstrations_sha256": event["demonstrations_sha256"]}, folder)
    return folder


def record_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "adapter.json").read_text())
    return found


def copied(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy of an adapter with fields of its record changed."""
    target.mkdir()
    (target / "adapter.safetensors").write_bytes((folder / "adapter.safetensors").read_bytes())
    write_record(record_of(folder) | changes, target)
    return target


def test_run_with_a_warm_start_reaches_a_verdict(warm_run: tuple[Run, Outcome]) -> None:
    run, outcome = warm_run

    assert (outcome.exit_kind, outcome.verdict) == ("inconclusive", "inconclusive")
    assert run.gates()["generation_audit"].status == "passed"
    assert run.gates()["restoration"].status == "passed"


def test_bundle_holds_what_the_generated_tasks_can_be_audited_again_with(
    warm_run: tuple[Run, Outcome],
) -> None:
    bundle = Path(warm_run[0].path) / "bundle"

    audited = json.loads((bundle / "audit.json").read_text())["generation_audit_validation"]

    assert audited["status"] == "passed"
    assert len((bundle / "generated-tasks.jsonl").read_text().splitlines()) == 102
    assert len((bundle / "heldout-tasks.jsonl").read_text().splitlines()) == 60
    assert verify_bundle(str(bundle)).ok


def test_both_arms_prove_by_its_uri_that_they_loaded_the_one_checkpoint(
    warm_run: tuple[Run, Outcome], local_service: LocalService
) -> None:
    """Immutable, full, optimizer without a step; and the adapter is that of the warm start."""
    run, _ = warm_run
    (made,), (warm,) = run.events("initialization"), run.events("warm_start")
    trained = report_of(local_service, warm["uri"])
    proofs = [
        json.loads(path.read_text())
        for path in Path(run.path).glob("files/initialization-provenance-*.json")
    ]
    starts = [arm["initialization"] for proof in proofs for arm in proof["arms"]]

    assert {start["checkpoint_uri"] for start in starts} == {made["uri"]}
    assert {start["loaded_checkpoint_uri"] for start in starts} == {made["uri"]}
    assert {start["checkpoint_scope"] for start in starts} == {"full_initialization"}
    assert {start["adapter_sha256"] for start in starts} == {trained["adapter_sha256"]}
    assert (made["report"]["immutable"], made["report"]["optimizer_steps"]) == (True, 0)
    assert (trained["scope"], trained["optimizer_steps"]) == ("training_state", 4)


def test_supervised_steps_lower_the_loss(warm_run: tuple[Run, Outcome]) -> None:
    """Three demonstrations in batches of two: two steps an epoch."""
    first, second = (event["losses"] for event in warm_run[0].events("warm_start_epoch"))

    assert (len(first), len(second)) == (2, 2)
    assert second[1] < first[0]


def test_steps_through_the_protocol_are_the_engine_s(
    warm_run: tuple[Run, Outcome], local_service: LocalService
) -> None:
    """The same batches, rate and order, in this process and without checkpoints in between."""
    folder, settings = resolve("tiny").folder, WarmStart.model_validate(WARM_START)
    environment = make_environment(
        "retail",
        {},
        tokenizer=load_tokenizer(str(folder)),
        renderer="qwen3_instruct",
        system_prompt="Help.",
    )
    data = asyncio.run(make_demonstrations(environment, settings))
    lora = LoraConfig(rank=4, seed=0, train_unembed=False)
    model = TrainableModel(BaseModel.load(folder), lora)

    for epoch in range(settings.epochs):
        for places in epoch_batches(settings, epoch):
            model.forward_backward([_datum(data.sequences[n]) for n in places], "cross_entropy")
            model.optim_step(AdamWConfig(learning_rate=0.01, eps=1e-8))

    (warm,) = warm_run[0].events("warm_start")
    assert model.adapter_sha256() == report_of(local_service, warm["uri"])["adapter_sha256"]


def _datum(sequence: TrainedSequence) -> TrainingDatum:
    return TrainingDatum(
        sequence.tokens[:-1].tolist(),
        {
            "target_tokens": torch.from_numpy(sequence.targets.copy()),
            "weights": torch.from_numpy(sequence.loss_mask[1:].astype("float32")),
        },
    )


def test_demonstrations_are_kept_and_are_of_training_tasks(warm_run: tuple[Run, Outcome]) -> None:
    run, _ = warm_run
    lines = run.read_bytes("files/warm-start-demonstrations.jsonl").splitlines()
    rows = [json.loads(line) for line in lines]

    assert [row["item_id"] for row in rows] == ["retail-W184", "retail-W137", "retail-W120"]
    assert rows[0]["text"].startswith("Please tell me your email.\n<tool_call>")


def test_shipped_adapter_takes_the_place_of_the_steps(
    adapter: Path, local_service: LocalService, tmp_path: Path
) -> None:
    """The initialization checkpoint holds exactly the adapter that the execution file names."""
    sha256 = record_of(adapter)["adapter_sha256"]
    document = warm_spec()
    execution = warm_execution(document, adapter=str(adapter), adapter_sha256=sha256)
    plan = make_plan(tmp_path, local_service.url, document=document, execution=execution)

    run = asyncio.run(_initialized(plan))

    (warm,), (made,) = run.events("warm_start"), run.events("initialization")
    assert (warm["how"], warm["why"], warm["adapter_sha256"]) == ("shipped adapter", None, sha256)
    assert run.events("warm_start_epoch") == []
    assert made["report"]["adapter_sha256"] == sha256
    assert (made["report"]["scope"], made["report"]["optimizer_steps"]) == (
        "full_initialization",
        0,
    )


def test_adapter_of_another_digest_is_refused_at_launch(adapter: Path, tmp_path: Path) -> None:
    document = warm_spec()
    execution = warm_execution(document, adapter=str(adapter), adapter_sha256="0" * 64)

    with pytest.raises(InputError) as error:
        make_plan(tmp_path, "http://127.0.0.1:1", document=document, execution=execution)

    assert error.value.field == "warm_start.adapter_sha256"


def test_changed_tensors_are_refused(adapter: Path, tmp_path: Path) -> None:
    folder = copied(adapter, tmp_path / "changed")
    tensors = bytearray((folder / "adapter.safetensors").read_bytes())
    tensors[-1] ^= 1
    (folder / "adapter.safetensors").write_bytes(tensors)

    with pytest.raises(InputError, match="file_sha256"):
        find_adapter(str(folder), sha256=None)


def test_missing_adapter_names_what_there_is() -> None:
    with pytest.raises(InputError, match=r"warm_start.adapter: .*one of: retail"):
        find_adapter("nowhere", sha256=None)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"base_sha256": "1" * 64}, "belongs to the base 1111111111111111"),
        ({"demonstrations_sha256": "2" * 64}, "was trained on other demonstrations"),
        ({"base_model": "large"}, "belongs to large"),
    ],
)
def test_adapter_that_does_not_fit_is_trained_again(
    adapter: Path,
    local_service: LocalService,
    tmp_path: Path,
    changes: dict[str, Any],
    why: str,
) -> None:
    """The reason is kept; nothing of the adapter is used."""
    folder = copied(adapter, tmp_path / "other", **changes)
    document = warm_spec()
    execution = warm_execution(document, adapter=str(folder), epochs=1)
    plan = make_plan(tmp_path, local_service.url, document=document, execution=execution)

    (warm,) = asyncio.run(_initialized(plan)).events("warm_start")

    assert warm["how"] == "trained through the protocol"
    assert why in warm["why"]
    assert warm["adapter_sha256"] is None


async def _initialized(plan: RunPlan) -> Run:
    """A plan's run up to its initialization checkpoint, without the gates around it."""
    run, service = open_run(plan), Service(plan.service)
    ctx = RunContext(
        run=run,
        spec=plan.spec,
        execution=plan.execution,
        service=service,
        server=await service.reach(),
    )
    try:
        await ensure_initialization(ctx)
    finally:
        await service.release_all()
    return run


@pytest.mark.parametrize(
    ("feature", "given", "field"),
    [
        ("warmup_adaptation", True, "warm_start"),
        ("generated_training_data", True, "warm_start"),
        ("warmup_adaptation", False, "warm_start"),
    ],
)
def test_warm_start_and_spec_must_agree(feature: str, given: bool, field: str) -> None:
    """Neither a warm start that is not declared nor a declared one without settings."""
    document = warm_spec()
    if given:
        document["experiment_features"][feature] = False
    execution = warm_execution(document)
    if not given:
        del execution["warm_start"]

    findings = contradictions(Spec.parse(document), ExecutionFile.parse(execution))

    assert [finding.field for finding in findings] == [field]


def test_batches_of_an_epoch_hold_every_demonstration_once() -> None:
    settings = WarmStart.model_validate(WARM_START | {"demonstrations": 5})

    assert epoch_batches(settings, 0) == [[2, 4], [3, 0], [1]]
    assert sorted(chain.from_iterable(epoch_batches(settings, 1))) == [0, 1, 2, 3, 4]
    assert epoch_batches(settings, 1) != epoch_batches(settings, 0)


def test_demonstrations_of_unaudited_tasks_are_refused(
    monkeypatch: pytest.MonkeyPatch, retail_environment: Any
) -> None:
    report = copy.deepcopy(retail_environment.generation_report())
    for row in report["tasks"]:
        row["disposition"] = "rejected"
    monkeypatch.setattr(type(retail_environment), "generation_report", lambda self: report)

    with pytest.raises(InputError, match="one of a task that the audit accepted"):
        asyncio.run(make_demonstrations(retail_environment, WarmStart.model_validate(WARM_START)))


@pytest.mark.slow
def test_command_makes_an_adapter_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the tiny model; a second call refuses to overwrite what the first has made."""
    document = warm_spec()
    (tmp_path / "shop.json").write_text(json.dumps(document))
    (tmp_path / "shop.execution.json").write_text(json.dumps(warm_execution(document)))
    command = ["warm-start", str(tmp_path / "shop.json"), "--out", str(tmp_path / "made")]

    assert main([*command, "--episodes", "2"]) == 0
    record = record_of(tmp_path / "made")
    assert record["measured"]["after"]["episodes"] == 2
    assert record["training"]["demonstrations"] == 3
    assert record["warm_start"] == WARM_START
    assert find_adapter(str(tmp_path / "made"), sha256=record["adapter_sha256"]).record == record
    assert "Warm start: composite_rubric_score" in capsys.readouterr().out

    assert main(command) == 2
    assert "a folder without adapter.json" in capsys.readouterr().err


def shipped() -> tuple[Spec, ExecutionFile, dict[str, Any]]:
    """The shipped experiment with a warm start, and its adapter's record."""
    spec, execution = read_experiment("retail")
    settings = execution.warm_start
    assert settings is not None
    assert settings.adapter is not None
    return (
        spec,
        execution,
        dict(find_adapter(settings.adapter, sha256=settings.adapter_sha256).record),
    )


def test_shipped_adapter_belongs_to_its_experiment() -> None:
    """Same model, same shape, same steps; at most 6 MB; made by the command it names."""
    spec, execution, record = shipped()
    settings, lora = execution.warm_start, execution.lora.model_dump()
    assert settings is not None

    assert record["base_model"] == spec.base_model
    assert {name: record["lora_config"][name] for name in lora} == lora
    assert record["warm_start"] == settings.model_dump(exclude={"adapter", "adapter_sha256"})
    assert record["file_bytes"] <= 6_000_000
    assert record["command"].startswith("gated-rl warm-start retail --out FOLDER")


def test_shipped_adapter_solves_a_third_of_the_training_tasks() -> None:
    """Measured at temperature 1 by the command that made it, on at least 30 episodes."""
    _, _, record = shipped()
    after = record["measured"]["after"]

    assert (after["temperature"], after["episodes"] >= 30) == (1.0, True)
    assert after["task_reward"] >= 1 / 3


def test_demonstrations_are_those_that_the_shipped_adapter_learned_from(
    retail_environment: Any,
) -> None:
    """If this digest changes, so does what the adapter stands for: make it again."""
    _, execution, _ = shipped()
    assert execution.warm_start is not None

    data = asyncio.run(make_demonstrations(retail_environment, execution.warm_start))

    texts = [[episode.item_id, episode.text] for episode in data.episodes]
    prompts = [retail_environment.system, *(e.turns[0].content for e in data.episodes)]
    assert digest([prompts, texts]) == (
        "4580d09a3b93c4630ec5d97439eed9cbae9c492f3c80a05ff078630ddf6304b7"
    )
