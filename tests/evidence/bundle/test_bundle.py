"""A bundle is sealed once, from the run directory alone, within limits and without secrets."""

import json
from pathlib import Path

import fsspec
import pytest

from evidence.bundle import build_bundle, bundle_folders, read_bundle
from evidence.canonical import sha256_hex
from evidence.errors import InputError
from evidence.report import write_reports
from evidence.result import StructuredResult
from evidence.run import Run
from evidence.verify import verify_bundle, verify_files


def _folder(run, bundle):
    return Path(run.path, bundle.folder)


def test_bundle_of_a_finished_run_verifies(finished_run, real_program):
    bundle = build_bundle(finished_run, environment={})

    found = verify_bundle(_folder(finished_run, bundle))

    assert found.problems == ()
    assert found.ok
    assert found.verdict == "supported"
    assert found.recomputed["per_arm_means"] == {
        "base": {"accuracy": 0.0},
        "grpo": {"accuracy": 0.25},
        "dppo": {"accuracy": 1.0},
    }
    assert found.recomputed["decision"]["criteria"][0]["effect"] == 0.75
    assert any("not attested" in line for line in found.unchecked)


def test_bundle_holds_what_the_contract_asks_for(finished_run):
    """Scripts, effective config, revision, predictions, metrics, checkpoints, records."""
    bundle = build_bundle(finished_run, environment={})

    manifest = json.loads((_folder(finished_run, bundle) / "manifest.json").read_text())
    kinds = {entry["kind"]: entry["name"] for entry in manifest["files"]}

    assert {
        *("script", "effective_config", "code_revision", "predictions", "metrics", "checkpoints"),
        *("gate", "decision", "spec", "execution", "result", "crate", "journal"),
    } <= set(kinds)
    assert "script-evidence.txt" in bundle.files
    assert {"scored-observations.jsonl", "predictions-dppo.jsonl"} <= set(bundle.files)
    assert manifest["per_arm_metrics"]["dppo"] == {"accuracy": 1.0}
    assert manifest["checkpoints"] == [
        {
            "arm": "dppo",
            "step": 4,
            "uri": "tinker://m/weights/s4",
            "phase": "train",
            "event": "checkpoint",
        }
    ]
    assert manifest["omitted"] == []


def test_manifest_names_every_file(finished_run):
    bundle = build_bundle(finished_run, environment={})
    folder = _folder(finished_run, bundle)
    manifest = json.loads((folder / "manifest.json").read_text())

    for entry in manifest["files"]:
        data = (folder / entry["name"]).read_bytes()
        assert (entry["sha256"], entry["size"]) == (sha256_hex(data), len(data))
    listed = {entry["name"] for entry in manifest["files"]}
    present = {path.name for path in folder.iterdir()}
    assert present == listed | {"manifest.json", "verdict.intoto.json"}


def test_sealing_again_changes_nothing(finished_run):
    first = build_bundle(finished_run, environment={})
    again = build_bundle(finished_run, environment={})

    assert again == first
    assert bundle_folders(finished_run) == ["bundle"]


def test_run_that_went_on_gets_a_second_bundle(finished_run):
    """The sealed one stays as it is."""
    first = build_bundle(finished_run, environment={})
    before = (_folder(finished_run, first) / "manifest.json").read_bytes()
    finished_run.append("resumed")

    second = build_bundle(finished_run, environment={})

    assert second.folder == "bundle-2"
    assert bundle_folders(finished_run) == ["bundle", "bundle-2"]
    assert (_folder(finished_run, first) / "manifest.json").read_bytes() == before
    assert verify_bundle(finished_run.path).where.endswith("bundle-2")


def test_half_written_bundle_is_completed(finished_run):
    """Without a manifest nothing is sealed: a crash's leftovers are written again."""
    bundle = build_bundle(finished_run, environment={})
    folder = _folder(finished_run, bundle)
    (folder / "manifest.json").unlink()
    (folder / "spec.json").write_bytes(b"half")

    assert build_bundle(finished_run, environment={}) == bundle
    assert verify_bundle(folder).ok


def test_leftovers_of_another_bundle_are_left_alone(finished_run):
    folder = Path(finished_run.path, "bundle")
    folder.mkdir()
    (folder / "other.txt").write_bytes(b"x")

    bundle = build_bundle(finished_run, environment={})

    assert bundle.folder == "bundle-2"


@pytest.mark.parametrize("place", ["file", "ledger", "config"])
def test_planted_key_is_refused(finished_run, place):
    """Wherever the key is planted, nothing is written, and the message does not hold it."""
    key = "".join(("tm", "l-AbCdEf0123456789"))
    if place == "file":
        finished_run.write_file("notes.txt", f"first\nkey {key}\n".encode())
        name = "notes.txt, line 2"
    elif place == "ledger":
        finished_run.append("failed", error=f"401 for {key}")
        name = "ledger.jsonl, line"
    else:
        finished_run.write_json("files/settings.json", {"key": key})
        name = "settings.json, line 2"

    with pytest.raises(InputError, match=f"{name}.*no secret in any file") as caught:
        build_bundle(finished_run, environment={})

    assert key not in str(caught.value)
    assert bundle_folders(finished_run) == []
    assert not Path(finished_run.path, "bundle").exists()


def test_environment_value_in_an_exception_is_refused(finished_run):
    finished_run.append("failed", error="cannot log in with hunter2-hunter2")

    with pytest.raises(InputError, match="value of environment variable SERVICE_PASSWORD"):
        build_bundle(finished_run, environment={"SERVICE_PASSWORD": "hunter2-hunter2"})


def test_run_without_a_final_result_has_no_bundle(tmp_path):
    run = Run.create(str(tmp_path), run_id="r", spec={})
    with pytest.raises(InputError, match="a run that has posted its final result"):
        build_bundle(run)

    StructuredResult(run).start("Started.")
    with pytest.raises(InputError, match="its final result, found 'running'"):
        build_bundle(run)


def test_credentials_of_a_checkpoint_uri_are_dropped(finished_run):
    """A signed query is cut off; the reference stays."""
    finished_run.append("published", arm="grpo", policy_version=4, uri="tinker://m/w/s4?ticket=9")

    manifest = json.loads(
        (
            _folder(finished_run, build_bundle(finished_run, environment={})) / "manifest.json"
        ).read_text()
    )

    assert manifest["checkpoints"][-1]["uri"] == "tinker://m/w/s4"


def test_run_on_an_object_store_is_sealed_and_reported(make_finished_run):
    """Bundle, verification and report work where the run directory is no folder."""
    fsspec.filesystem("memory").store.clear()
    run = make_finished_run(root="memory://bucket/runs")

    bundle = build_bundle(run, environment={})
    report = write_reports(run)

    found = verify_files(read_bundle(run))
    assert found.problems == ()
    assert found.where == f"{run.path}/bundle"
    assert set(read_bundle(run).data) == set(bundle.files)
    assert run.read_bytes(report.html).startswith(b"<!doctype html>")
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("variable", ["PROXY_TENANT", "MY_SERVICE"])
def test_value_of_a_variable_that_the_run_named_is_refused(finished_run, variable):
    """Headers and the key come from variables with free names, which the ledger tells."""
    service = {
        "api_key_env": "MY_SERVICE",
        "header_env": [{"header": "X-Tenant", "variable": "PROXY_TENANT"}],
    }
    finished_run.append("started", attempt=2, service=service)
    finished_run.write_file("note.txt", b"tenant-4711-blue\n")

    with pytest.raises(InputError, match=rf"line 1: value of environment variable {variable}"):
        build_bundle(finished_run, environment={variable: "tenant-4711-blue"})
    assert bundle_folders(finished_run) == []
    assert build_bundle(finished_run, environment={"ELSEWHERE": "tenant-4711-blue"}).folder
