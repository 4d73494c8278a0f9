"""The import rule holds, and the light packages stay light."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HEAVY = ("torch", "prefect", "tinker", "transformers", "datasets", "pandas")

LIGHT_MODULES = (
    "evidence.audit",
    "evidence.correctness",
    "evidence.decision",
    "evidence.execution",
    "evidence.plan",
    "evidence.spec",
    "evidence.tables",
    "evidence.verify",
    "deploy.cli",
)


def test_import_rule_is_kept():
    """import-linter finds no import against deploy > flows > tasks > envs | losses | evidence."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_light_module_loads_nothing_heavy(module):
    """Importing a light module leaves torch, Prefect, Tinker, pyarrow and pandas unloaded."""
    heavy = (*HEAVY, "pyarrow")
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_packages_have_empty_init_files():
    """A package file with imports would load siblings that import-linter cannot see."""
    full = [
        str(path.relative_to(ROOT))
        for package in ("flows", "tasks", "losses", "envs", "evidence", "deploy")
        for path in (ROOT / package).rglob("__init__.py")
        if path.read_text().strip()
    ]

    assert full == []


def test_every_package_is_listed_for_installation():
    """A folder of modules that pyproject.toml does not name would be missing from a wheel."""
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in ("flows", "tasks", "losses", "envs", "evidence", "deploy")
        for path in (ROOT / package).rglob("*.py")
    }

    assert listed == found
