"""Load tau-bench's retail domain from where the user has it, and check that it is the pinned one.

The package is never copied into this project. Of its imports only `litellm` is not needed here; it
is replaced by an empty module while the package loads, unless it is there already.
"""

import hashlib
import importlib
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.errors import EnvInputError

FOLDER_VARIABLE = "GATED_RL_TAU_BENCH"
"""Environment variable that names a checkout, where the package is not installed."""

COMMIT = "59a200c6d575d595120f1cb70fea53cef0632f6b"
"""The commit of sierra-research/tau-bench that the experiment names."""

PINNED_SHA256 = "5b23e554062ec7dc161de13165388cd70d931dbe60fc8e96dd46d4013fd5f8dd"
"""Digest of the domain's files at that commit; see `package_sha256`."""

_SHARED_FILES = ("types.py", "envs/base.py", "envs/tool.py", "envs/user.py")
_DOMAIN_FOLDER = "envs/retail"
_SUFFIXES = (".py", ".json", ".md")
_LOADING = threading.Lock()


@dataclass(frozen=True, slots=True)
class TauRetail:
    """What the adapter uses of the package.

    Attributes:
        make_env: `MockRetailDomainEnv`.
        action: the package's `Action` type.
        user_prompt: the original simulator's system prompt for an instruction.
        tasks: the tasks of `train` and `test`, in their order.
        wiki: the policy text.
        sha256: digest of the files it was loaded from.
    """

    make_env: Any
    action: Any
    user_prompt: Any
    tasks: dict[str, list[Any]]
    wiki: str
    sha256: str


def package_sha256(package: Path) -> str:
    """Return the SHA-256 over the files that decide what the retail domain does.

    For each of the shared modules and each .py, .json and .md file of the domain, sorted by path:
    its path below the package, a space, its SHA-256, a newline.

    Args:
        package: the folder `tau_bench`.

    Raises:
        EnvInputError: if a file is missing.
    """
    domain = package / _DOMAIN_FOLDER
    files = [package / name for name in _SHARED_FILES]
    files += sorted(path for path in domain.rglob("*") if path.suffix in _SUFFIXES)
    lines = []
    for path in sorted(files):
        if not path.is_file():
            raise EnvInputError("tau-bench", str(path), "a file of the retail domain")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(f"{path.relative_to(package).as_posix()} {digest}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def load_tau_retail(folder: Path | None, *, commit: str) -> TauRetail:
    """Import the retail domain and check its files.

    Args:
        folder: a checkout of tau-bench (it holds the folder `tau_bench`). Where None, the one that
            `GATED_RL_TAU_BENCH` names, and without that the installed package.
        commit: the commit the caller expects; only `COMMIT` is known.

    Raises:
        EnvInputError: if the package is not there, or is another version.
    """
    if commit != COMMIT:
        raise EnvInputError("environment.settings.commit", commit, COMMIT)
    named = os.environ.get(FOLDER_VARIABLE)
    folder = folder or (Path(named) if named else None)
    with _LOADING:
        package = _import_package(folder)
        location = Path(str(package.__file__)).parent
        if folder is not None and location.resolve() != (folder / "tau_bench").resolve():
            raise EnvInputError("tau-bench", str(location), f"the one in {folder}, loaded first")
        found = package_sha256(location)
        if found != PINNED_SHA256:
            raise EnvInputError(
                "tau-bench", found, f"files of commit {COMMIT} ({PINNED_SHA256})", str(location)
            )
        return _contents(found)


def _import_package(folder: Path | None) -> ModuleType:
    """Import `tau_bench` with an empty `litellm` where there is none."""
    stub = None
    if "litellm" not in sys.modules:
        stub = ModuleType("litellm")
        stub.completion = None  # type: ignore[attr-defined]
        sys.modules["litellm"] = stub
    if folder is not None:
        sys.path.insert(0, str(folder))
    try:
        importlib.import_module("tau_bench.envs.retail.env")
        return importlib.import_module("tau_bench")
    except ModuleNotFoundError as error:
        where = f"a checkout in {folder}" if folder else "an installed package"
        raise EnvInputError("tau-bench", str(error), f"{where} of commit {COMMIT}") from error
    finally:
        if folder is not None:
            sys.path.remove(str(folder))
        if stub is not None:
            del sys.modules["litellm"]


def _contents(sha256: str) -> TauRetail:
    """Collect what the adapter uses from the imported modules."""
    retail = "tau_bench.envs.retail"
    train = importlib.import_module(f"{retail}.tasks_train").TASKS_TRAIN
    test = importlib.import_module(f"{retail}.tasks_test").TASKS_TEST
    users = importlib.import_module("tau_bench.envs.user")
    return TauRetail(
        make_env=importlib.import_module(f"{retail}.env").MockRetailDomainEnv,
        action=importlib.import_module("tau_bench.types").Action,
        user_prompt=lambda text: users.LLMUserSimulationEnv.build_system_prompt(None, text),
        tasks={"train": list(train), "test": list(test)},
        wiki=str(importlib.import_module(f"{retail}.wiki").WIKI),
        sha256=sha256,
    )
