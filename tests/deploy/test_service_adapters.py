"""Adapters from elsewhere: taken in once, and only on the base model that they belong to."""

import base64

import httpx
import pytest
import torch
from safetensors.torch import save

from deploy.local_service.adapter import Adapter, LoraConfig
from deploy.local_service.base_model import BaseModel
from deploy.local_service.model_store import resolve

LORA = LoraConfig(rank=2, seed=3, train_unembed=False)


@pytest.fixture(scope="module")
def base():
    return BaseModel.load(resolve("tiny").folder)


@pytest.fixture
def client(local_service):
    with httpx.Client(trust_env=False, base_url=f"{local_service.url}/api/v1") as found:
        yield found


def trained(base, value=0.25):
    """An adapter whose B is not zero, in values that bfloat16 holds exactly."""
    adapter = Adapter(base.shape, LORA)
    for name, parameter in adapter.parameters.items():
        parameter.copy_(parameter.to(torch.bfloat16))
        if name.endswith(".B"):
            parameter.fill_(value)
    return adapter


def document(base, adapter, **changes):
    tensors = {name: value.to(torch.bfloat16) for name, value in adapter.parameters.items()}
    return {
        "base_model": "tiny",
        "base_sha256": base.sha256,
        "lora_config": {"rank": 2, "seed": 3, "train_unembed": False},
        "adapter_sha256": adapter.sha256(),
        "safetensors": base64.b64encode(save(tensors)).decode(),
    } | changes


def test_adapter_becomes_a_checkpoint_without_optimizer(client, base):
    """bfloat16 bytes come back as the float32 values of the digest."""
    adapter = trained(base)

    found = client.post("/local/adapters", json=document(base, adapter)).raise_for_status().json()

    assert found["adapter_sha256"] == adapter.sha256()
    assert (found["kind"], found["with_optimizer"], found["immutable"]) == (
        "training",
        False,
        False,
    )
    assert found["path"] == f"tinker://adapter-{adapter.sha256()[:32]}/weights/imported"


def test_same_adapter_again_is_the_same_checkpoint(client, base):
    sent = document(base, trained(base, value=0.5))

    first, again = (client.post("/local/adapters", json=sent).json() for _ in range(2))

    assert first == again


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_sha256": "0" * 64}, "base_sha256 0000000000000000: the adapter belongs to other"),
        ({"adapter_sha256": "0" * 64}, "adapter_sha256: "),
        ({"adapter_sha256": "short"}, "adapter_sha256: 'short'"),
        ({"safetensors": "!"}, "safetensors: "),
        ({"safetensors": base64.b64encode(b"no tensors at all").decode()}, "adapter.safetensors: "),
        (
            {"lora_config": {"rank": 4, "train_unembed": False}},
            "layers.0.down_proj.A: [2, 32], expected shape [4, 32]",
        ),
        ({"lora_config": {"rank": 2}}, "the parameters of its lora_config"),
        ({"base_model": "none"}, "base_model 'none': not served here"),
    ],
)
def test_wrong_adapter_is_refused_by_its_field(client, base, changes, words):
    answer = client.post("/local/adapters", json=document(base, trained(base, 0.375), **changes))

    assert answer.status_code == 400
    assert words in answer.json()["message"]


def test_refused_adapter_leaves_nothing_behind(client, base, local_service):
    store = local_service.settings.store
    before = sorted(path.name for path in (store / "blobs").iterdir())

    client.post(
        "/local/adapters", json=document(base, trained(base, 0.75), adapter_sha256="1" * 64)
    )

    assert sorted(path.name for path in (store / "blobs").iterdir()) == before
    assert list(store.glob(".import-*")) == []
