"""Checkpoints: exact resume, immutability, refusal of what is not what it was."""

import json

import pytest
import torch

from deploy.local_service.adapter import LoraConfig
from deploy.local_service.base_model import BaseModel
from deploy.local_service.checkpoint import load_checkpoint, read_record
from deploy.local_service.model_store import TINY, resolve
from deploy.local_service.optimizer import AdamWConfig
from deploy.local_service.training import TrainableModel, TrainingDatum
from evidence.errors import ConflictError, InputError

CONFIG = AdamWConfig(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return BaseModel.load(resolve(TINY, cache_dir=tmp_path_factory.mktemp("cache")).folder)


def step(model, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 259, (20,), generator=generator)
    datum = TrainingDatum(tokens[:-1].tolist(), {"target_tokens": tokens[1:]})
    model.forward_backward([datum], "cross_entropy")
    model.optim_step(CONFIG)


def trained(base, steps=3):
    model = TrainableModel(base, LoraConfig(rank=3, seed=1, train_unembed=False))
    for seed in range(steps):
        step(model, seed)
    return model


def test_resume_with_optimizer_is_exact(base, tmp_path):
    model = trained(base)
    model.save(tmp_path, with_optimizer=True)
    resumed = TrainableModel.from_checkpoint(base, tmp_path, with_optimizer=True)
    assert resumed.lora_config == model.lora_config
    assert resumed.optimizer_state() == model.optimizer_state()
    for each in (model, resumed):
        step(each, seed=9)
    assert resumed.adapter_sha256() == model.adapter_sha256()
    assert resumed.optimizer_state() == model.optimizer_state()


def test_resume_without_optimizer_starts_a_fresh_one(base, tmp_path):
    model = trained(base)
    model.save(tmp_path, with_optimizer=True)
    resumed = TrainableModel.from_checkpoint(base, tmp_path, with_optimizer=False)
    assert resumed.adapter_sha256() == model.adapter_sha256()
    assert resumed.optimizer_state().steps == 0
    for each in (model, resumed):
        step(each, seed=9)
    assert resumed.adapter_sha256() != model.adapter_sha256()


def test_loading_into_a_model_drops_its_gradient(base, tmp_path):
    trained(base).save(tmp_path, with_optimizer=True)
    model = trained(base, steps=1)
    datum = TrainingDatum([40, 41], {"target_tokens": torch.tensor([41, 42])})
    model.forward_backward([datum], "cross_entropy")
    model.load(tmp_path, with_optimizer=True)
    assert not model.adapter.gradient.any()
    assert model.optimizer_state().steps == 3


def test_record_says_what_the_checkpoint_belongs_to(base, tmp_path):
    model = trained(base)
    model.save(tmp_path, with_optimizer=True)
    record = read_record(tmp_path)
    assert record["base_model"] == "tiny"
    assert record["base_sha256"] == base.sha256
    assert record["adapter_sha256"] == model.adapter_sha256()
    assert record["optimizer"]["steps"] == 3
    assert record["optimizer"]["last_config"]["learning_rate"] == 0.01


def test_checkpoint_is_never_written_over(base, tmp_path):
    model = trained(base)
    model.save(tmp_path, with_optimizer=False)
    with pytest.raises(ConflictError, match="without a checkpoint"):
        model.save(tmp_path, with_optimizer=False)


def test_weights_alone_have_no_optimizer_to_load(base, tmp_path):
    trained(base).save(tmp_path, with_optimizer=False)
    assert not (tmp_path / "optimizer.safetensors").exists()
    with pytest.raises(InputError, match="a checkpoint with optimizer state"):
        load_checkpoint(tmp_path, base=base, with_optimizer=True)


def test_folder_without_a_record_is_incomplete(base, tmp_path):
    trained(base).save(tmp_path, with_optimizer=True)
    (tmp_path / "adapter.json").unlink()
    with pytest.raises(InputError, match="the record of a complete checkpoint"):
        load_checkpoint(tmp_path, base=base, with_optimizer=True)


@pytest.mark.parametrize("file", ["adapter.safetensors", "optimizer.safetensors"])
def test_changed_bytes_are_noticed(base, tmp_path, file):
    trained(base).save(tmp_path, with_optimizer=True)
    path = tmp_path / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    model = trained(base, steps=1)
    before = model.adapter_sha256()
    with pytest.raises(InputError, match=r"sha256: expected .* as written"):
        model.load(tmp_path, with_optimizer=True)
    assert model.adapter_sha256() == before


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("base_sha256", "0" * 64, "base_sha256: expected"),
        ("lora_config", {"rank": 3, "seed": 1}, "the parameters of its lora_config"),
    ],
)
def test_checkpoint_of_something_else_is_refused(base, tmp_path, field, value, message):
    trained(base).save(tmp_path, with_optimizer=True)
    record = json.loads((tmp_path / "adapter.json").read_text())
    (tmp_path / "adapter.json").write_text(json.dumps(record | {field: value}))
    with pytest.raises(InputError, match=message):
        load_checkpoint(tmp_path, base=base, with_optimizer=True)
