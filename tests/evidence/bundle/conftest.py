"""Finished and stopped runs, and a forger for their bundles."""

import json

import pytest

from evidence import sources
from evidence.canonical import sha256_hex
from evidence.gate import GateResult
from evidence.result import StructuredResult
from evidence.run import Run
from tests.evidence.finished_run import Ticking, build_finished_run, execution, spec

SMALL_SOURCES = {
    "flows/run.py": b"def run_comparison():\n    pass\n",
    "evidence/verify.py": b"import os\n",
}


@pytest.fixture(autouse=True)
def small_program(request, monkeypatch):
    """Seal two small files instead of the whole program, unless a test wants the real one."""
    if "real_program" not in request.fixturenames:
        monkeypatch.setattr(sources, "read_sources", lambda: dict(SMALL_SOURCES))
        monkeypatch.setattr(sources, "_git_in", lambda _root: lambda _arguments: None)


@pytest.fixture
def real_program():
    """Seal the program's own sources and git revision."""


@pytest.fixture
def make_finished_run(tmp_path):
    """Build a finished run; arguments change the scores, the gates or the deviations."""

    def make(root=tmp_path, **over):
        return build_finished_run(root, **over)

    return make


@pytest.fixture
def stopped_run(tmp_path):
    """A run that a gate stopped before anything was trained."""
    run = Run.create(
        str(tmp_path), run_id="stopped", spec=spec(), execution=execution(), clock=Ticking()
    )
    run.append("started", attempt=1)
    result = StructuredResult(run)
    result.start("Started.")
    run.write_gate(GateResult("correctness", "failed", reasons=("baseline_loss is too far off",)))
    result.finish(
        status="failed",
        verdict="inconclusive",
        outcome_reason="incomplete_execution",
        summary="Stopped before training by the gate correctness (failed).",
    )
    return run


@pytest.fixture
def finished_run(make_finished_run):
    return make_finished_run()


@pytest.fixture
def reseal():
    """Rewrite one file of a bundle, and its hash in the manifest, as a forger would."""

    def change(folder, name, data, *, fix_manifest=True):
        (folder / name).write_bytes(data)
        if fix_manifest:
            manifest = json.loads((folder / "manifest.json").read_text())
            for entry in manifest["files"]:
                if entry["name"] == name:
                    entry.update(sha256=sha256_hex(data), size=len(data))
                    if "rows" in entry:
                        entry["rows"] = data.count(b"\n")
            (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")

    return change
