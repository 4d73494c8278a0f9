"""tinker-cookbook's own RL training loop against the service, unchanged."""

import asyncio
import json

import httpx
import pytest

from deploy.local_service.model_store import resolve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def configuration(service, folder, **over):
    # Loaded here: the cookbook takes seconds to import, and most sessions do not run this file.
    tokenizer_utils = pytest.importorskip("tinker_cookbook.tokenizer_utils")
    arithmetic = pytest.importorskip("tinker_cookbook.recipes.math_rl.arithmetic_env")
    train = pytest.importorskip("tinker_cookbook.rl.train")
    auto_tokenizer = pytest.importorskip("transformers").AutoTokenizer
    tiny = resolve("tiny").folder
    tokenizer_utils.register_tokenizer("tiny", lambda: auto_tokenizer.from_pretrained(tiny))
    values = {
        "learning_rate": 1e-3,
        "dataset_builder": arithmetic.ArithmeticDatasetBuilder(
            batch_size=3,
            model_name_for_tokenizer="tiny",
            renderer_name="qwen3_instruct",
            n_batches=3,
            group_size=4,
        ),
        "model_name": "tiny",
        "recipe_name": "recipe_math_rl",
        "renderer_name": "qwen3_instruct",
        "max_tokens": 8,
        "lora_rank": 4,
        "log_path": str(folder / "log"),
        "base_url": service.url,
        "eval_every": 0,
        "save_every": 2,
        "compute_post_kl": True,
    }
    return train.Config(**(values | over))


def test_client_loads_the_tokenizer_offline(local_service):
    """get_tokenizer finds the base model's own tokenizer on disk."""
    tinker = pytest.importorskip("tinker")
    client = tinker.ServiceClient(base_url=local_service.url)
    model = client.create_lora_training_client("tiny", rank=4).result(timeout=60)

    assert model.get_tokenizer().decode([3 + ord("o"), 3 + ord("k")]) == "ok"


def metrics(folder):
    lines = (folder / "log" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def saved(service, uri):
    """Status of the question whether the service has a checkpoint."""
    query = {"path": uri}
    return httpx.get(f"{service.url}/api/v1/local/checkpoints", params=query).status_code


@pytest.mark.parametrize(
    "over",
    [
        {},
        {"loss_fn": "ppo", "num_substeps": 3, "loss_fn_config": {"clip_low_threshold": 0.9}},
        {"rolling_save_every": 1},
    ],
    ids=["plain", "ppo-substeps", "rolling-checkpoints"],
)
def test_rl_train_runs_unchanged(local_service, tmp_path, over):
    """Three steps. Sampler and trainer agree on every bit, where one update uses one policy."""
    train = pytest.importorskip("tinker_cookbook.rl.train")
    asyncio.run(train.main(configuration(local_service, tmp_path, **over)))
    rows = [row for row in metrics(tmp_path) if "optim/kl_sample_train_v1" in row]
    lines = (tmp_path / "log" / "checkpoints.jsonl").read_text().splitlines()
    checkpoints = {record["name"]: record for record in map(json.loads, lines)}

    assert len(rows) == 3
    if over.get("num_substeps", 1) == 1:
        assert [row["optim/kl_sample_train_v1"] for row in rows] == [0.0, 0.0, 0.0]
    # The cookbook awaits its last rolling save only after the final one: the order of lines varies.
    assert set(checkpoints) >= {"000002", "final"}
    assert saved(local_service, checkpoints["final"]["state_path"]) == 200
    if over.get("rolling_save_every"):
        assert saved(local_service, checkpoints["000003"]["state_path"]) == 404
