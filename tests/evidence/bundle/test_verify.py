"""Each way to tamper with a bundle is named; malformed files are problems, never tracebacks."""

import json
import os
import re
import shutil
import socket
import zipfile
from pathlib import Path

import pytest

from evidence import manifest
from evidence.bundle import build_bundle
from evidence.canonical import sha256_hex
from evidence.errors import InputError
from evidence.verify import verify_bundle
from tests.evidence.finished_run import initialization_provenance


@pytest.fixture(scope="module")
def sealed_once(tmp_path_factory):
    return tmp_path_factory.mktemp("sealed")


@pytest.fixture
def folder(make_finished_run, sealed_once, tmp_path):
    """A copy of one sealed bundle."""
    source = sealed_once / "r1" / "bundle"
    if not source.exists():
        build_bundle(make_finished_run(root=sealed_once), environment={})
    target = tmp_path / "copy"
    shutil.copytree(source, target)
    return target


def _edit_lines(path, number, pattern, replacement):
    lines = path.read_bytes().split(b"\n")
    changed = re.sub(pattern, replacement, lines[number])
    assert changed != lines[number]
    lines[number] = changed
    return b"\n".join(lines)


def test_untouched_copy_verifies_without_network(folder, monkeypatch):
    """No socket is opened and nothing is written."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    before = {
        path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir()
    }

    found = verify_bundle(folder)

    assert found.problems == ()
    after = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir()}
    assert after == before
    assert json.loads(json.dumps(found.to_record()))["ok"] is True


@pytest.mark.parametrize(
    ("actual", "status"), [("adamw", None), ("sgd", "failed"), (None, "unverified")]
)
def test_optimizer_after_a_restore_is_part_of_the_verdict(
    actual, status, make_finished_run, tmp_path
):
    """The restoration gate passed before training; one restore later the optimizer is another."""
    provenance = initialization_provenance(restores=1, actual_after_restore=actual)
    run = make_finished_run(root=tmp_path, initialization=provenance)
    build_bundle(run, environment={})

    found = verify_bundle(tmp_path / "r1" / "bundle")

    assert found.problems == ()
    assert found.verdict == ("supported" if status is None else "inconclusive")
    withheld = found.recomputed["verdict"]["withheld"]
    assert withheld == ([] if status is None else [f"restores is {status}."])


def test_edited_row_is_found_by_its_hash(folder):
    path = folder / "scored-observations.jsonl"
    path.write_bytes(
        _edit_lines(path, 3, rb'"value":0.0', b'"value":1.0')
        if b'"value":0.0' in path.read_bytes().split(b"\n")[3]
        else _edit_lines(path, 3, rb'"value":1.0', b'"value":0.0')
    )

    problems = verify_bundle(folder).problems

    assert "scored-observations.jsonl: its bytes are not those of the manifest" in problems


def test_edited_row_is_found_by_recomputation(folder, reseal):
    """Even with the manifest made to fit, the decision no longer follows from the rows."""
    data = _edit_lines(folder / "scored-observations.jsonl", 45, rb'"value":1.0', b'"value":0.0')
    reseal(folder, "scored-observations.jsonl", data)

    problems = verify_bundle(folder).problems

    assert any(problem.startswith("decision.json: does not follow") for problem in problems)
    assert any(problem.startswith("verdict.intoto.json: its subject") for problem in problems)
    assert any("'inconclusive' follows from the files" in problem for problem in problems)


def test_edited_prediction_is_found_by_its_mean(folder, reseal):
    """(39 of 40 right) is 0.975, the posted mean is 1.0."""
    data = _edit_lines(folder / "predictions-dppo.jsonl", 0, rb'"value":1.0', b'"value":0.0')
    reseal(folder, "predictions-dppo.jsonl", data)

    problems = verify_bundle(folder).problems

    assert "predictions-dppo.jsonl: mean of accuracy for dppo: 1.0 posted, 0.975 found" in problems


@pytest.mark.parametrize(
    ("name", "field", "value", "named"),
    [
        ("result.json", "verdict", "refuted", "result.json: verdict 'refuted' was posted"),
        ("result.json", "completed_arms", ["grpo"], "result.json: completed_arms: supported needs"),
        ("spec.json", "title", "another", "spec.json: its digest is not the spec_sha256"),
        ("execution.json", "version", 2, "execution.json: its digest is not the execution_sha256"),
        ("identity.json", "run_id", "other", "identity.json: its run_id"),
        ("code-revision.json", "source_sha256", "0" * 64, "code-revision.json: source_sha256"),
        ("gate-activation.json", "status", "failed", "verdict.intoto.json: does not follow"),
        ("audit.json", "decision_validation", {}, "audit.json: decision_validation does not"),
    ],
)
def test_edited_field_is_found(folder, reseal, name, field, value, named):
    """A forger who also fixes the manifest is found by what follows from the other files."""
    record = json.loads((folder / name).read_text())
    record[field] = value
    reseal(folder, name, (json.dumps(record, indent=1) + "\n").encode())

    assert any(problem.startswith(named) for problem in verify_bundle(folder).problems)


def test_edited_source_is_found(folder, reseal):
    data = (folder / "script-evidence.txt").read_bytes().replace(b"import", b"Import", 1)
    reseal(folder, "script-evidence.txt", data)

    assert any(p.startswith("sources: ") for p in verify_bundle(folder).problems)


def test_hidden_deviation_is_found(folder, reseal):
    """A deviation that appears with the final result alone was not recorded in time."""
    deviation = {"field": "steps", "original": "20", "effective": "14", "reason": "time"}
    lines = (folder / "ledger.jsonl").read_bytes().splitlines()
    events = [json.loads(line) for line in lines]
    final = [event for event in events if event["event"] == "result"][-1]
    final["result"]["deviations"] = [deviation]
    data = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    reseal(folder, "ledger.jsonl", data)

    problems = verify_bundle(folder).problems

    assert any("first posted in a final update" in problem for problem in problems)


def test_missing_file_is_found(folder):
    (folder / "predictions-grpo.jsonl").unlink()

    assert "predictions-grpo.jsonl: listed in the manifest, but missing" in (
        verify_bundle(folder).problems
    )


def test_extra_file_is_found(folder):
    (folder / "extra.txt").write_bytes(b"x")

    assert "extra.txt: not listed in the manifest" in verify_bundle(folder).problems


def test_symbolic_link_is_not_followed(folder, tmp_path):
    """A link to a file with the right bytes is a problem all the same."""
    outside = tmp_path / "outside.json"
    shutil.move(folder / "spec.json", outside)
    (folder / "spec.json").symlink_to(outside)

    problems = verify_bundle(folder).problems

    assert "spec.json: a symbolic link" in problems
    assert "spec.json: listed in the manifest, but missing" in problems


def test_bundle_folder_of_a_run_is_no_link(folder, tmp_path):
    """The folder that a person names may be a link; a run's own bundle folder may not."""
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert verify_bundle(link).ok

    run = tmp_path / "run"
    run.mkdir()
    (run / "bundle").symlink_to(folder)
    with pytest.raises(InputError, match="a bundle's folder"):
        verify_bundle(run)


def test_bundle_with_an_untouched_bundle_within_is_judged_itself(folder):
    """A forger puts the honest bundle into the tampered one, as a run directory holds it."""
    shutil.copytree(folder, folder / "bundle")
    assert verify_bundle(folder / "bundle").ok
    (folder / "result.json").write_bytes(b"{}")

    found = verify_bundle(folder)

    assert found.where == str(folder)
    assert "result.json: its bytes are not those of the manifest" in found.problems
    assert "bundle: not a plain file" in found.problems


def test_manifest_that_is_a_link_does_not_lead_elsewhere(folder):
    """Also a folder whose manifest cannot be read is the one that is judged."""
    shutil.copytree(folder, folder / "bundle")
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to("nowhere")

    assert "manifest.json: a symbolic link" in verify_bundle(folder).problems


def test_folder_and_pipe_inside_are_problems(folder):
    (folder / "inner").mkdir()
    os.mkfifo(folder / "pipe")

    problems = verify_bundle(folder).problems

    assert "inner: not a plain file" in problems
    assert "pipe: not a plain file" in problems


def test_archive_inside_is_a_problem(folder, reseal):
    """A zip is found by its first bytes, whatever its name."""
    with zipfile.ZipFile(folder / "notes.txt", "w") as archive:
        archive.writestr("../../escape.txt", "x")

    problems = verify_bundle(folder).problems

    assert "notes.txt: an archive (zip) inside a bundle" in problems
    assert not list(folder.parent.glob("escape*"))


def test_file_above_the_limit_is_not_read(folder):
    with (folder / "big.jsonl").open("wb") as file:
        file.truncate(10 * 1024 * 1024 + 1)

    problems = verify_bundle(folder).problems

    assert "big.jsonl: 10485761 bytes, above the limit of a file" in problems


@pytest.mark.parametrize(
    "name", ["../spec.json", "/etc/passwd", "a/b", "..", "", "x\x00y", "manifest.json", "\ud83d"]
)
def test_manifest_name_that_climbs_out_is_a_problem(folder, name):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][0]["name"] = name
    (folder / "manifest.json").write_text(json.dumps(manifest))

    assert any("a plain file name" in problem for problem in verify_bundle(folder).problems)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"version":1,"version":1}',
        b"[]",
        b"\xff\xfe",
        b'{"version":1}' + b"x",
        b"[" * 100_000,
        b'{"version":' + b"9" * 1_000_000 + b"}",
        b'{"version":NaN}',
    ],
)
@pytest.mark.parametrize("name", ["manifest.json", "result.json", "verdict.intoto.json"])
def test_malformed_json_is_a_problem(folder, reseal, name, data):
    """Truncated, doubled, deep, huge and non-finite JSON: one line each, no traceback."""
    reseal(folder, name, data, fix_manifest=name != "manifest.json")

    found = verify_bundle(folder)

    assert found.problems
    assert all("\n" not in problem for problem in found.problems)


@pytest.mark.parametrize("line", [b'{"a":1', b"[1]", b'{"a":1,"a":2}', b"", b"\xff"])
def test_malformed_row_is_a_problem(folder, reseal, line):
    data = (folder / "predictions-dppo.jsonl").read_bytes() + line + b"\n"
    reseal(folder, "predictions-dppo.jsonl", data)

    problems = verify_bundle(folder).problems

    assert any("predictions" in problem for problem in problems)


def test_torn_last_row_is_a_problem(folder, reseal):
    reseal(folder, "ledger.jsonl", (folder / "ledger.jsonl").read_bytes()[:-1])

    assert any("a torn last line" in problem for problem in verify_bundle(folder).problems)


def test_deleted_manifest_entry_is_found(folder):
    """Whoever drops a file and its entry still contradicts the crate and the statement."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = [e for e in manifest["files"] if e["name"] != "predictions-grpo.jsonl"]
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (folder / "predictions-grpo.jsonl").unlink()

    found = verify_bundle(folder)

    assert any("in the crate but not in the bundle" in problem for problem in found.problems)
    assert any("its subject is not this manifest" in problem for problem in found.problems)
    assert "predictions-grpo.jsonl: predictions are not in the bundle" in found.unchecked


@pytest.mark.parametrize("path", ["nothing", "empty", "file"])
def test_path_without_a_bundle_is_refused(tmp_path, path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")

    with pytest.raises(InputError, match="a bundle's folder"):
        verify_bundle(tmp_path / path)


def test_verdict_is_withheld_by_a_failed_gate(make_finished_run):
    """A run whose gate failed seals and verifies as inconclusive, the computed verdict beside."""
    run = make_finished_run(gates={"activation": "failed"})
    build_bundle(run, environment={})

    found = verify_bundle(run.path)

    assert found.problems == ()
    assert found.verdict == "inconclusive"
    assert found.recomputed["verdict"]["computed"] == "supported"


def test_deviating_run_keeps_its_computed_verdict(make_finished_run):
    deviation = {"field": "dataset", "original": "40", "effective": "8", "reason": "laptop"}
    run = make_finished_run(deviations=[deviation])
    build_bundle(run, environment={})

    found = verify_bundle(run.path)

    assert found.problems == ()
    assert found.verdict == "inconclusive"
    assert found.recomputed["verdict"]["changed_experiment_verdict"] == "supported"


def test_claim_beyond_the_evidence_is_found(folder, reseal):
    """A supported posted where only 'inconclusive' follows is named with both words."""
    gate = json.loads((folder / "gate-activation.json").read_text())
    gate["status"] = "unverified"
    reseal(folder, "gate-activation.json", json.dumps(gate).encode())

    problems = verify_bundle(folder).problems

    assert (
        "result.json: verdict 'supported' was posted, 'inconclusive' follows from the files"
        in problems
    )


def test_resealed_hash_is_checked(folder):
    """The test's own forger works: only the statement notices an equal manifest entry."""
    data = (folder / "tables.json").read_bytes() + b"\n"
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["name"] == "tables.json":
            entry.update(sha256=sha256_hex(data), size=len(data))
    (folder / "tables.json").write_bytes(data)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")

    assert verify_bundle(Path(folder)).problems == (
        "verdict.intoto.json: its subject is not this manifest",
        "verdict.intoto.json: does not follow from decision, gates and result",
    )


def test_split_and_omitted_files_are_handled(make_finished_run, monkeypatch):
    """Parts are put together for the means; what is left out is listed as not checked."""
    monkeypatch.setattr(manifest, "MAX_FILE_BYTES", 20_000)
    run = make_finished_run(prediction="4" * 600)
    run.write_file("blob.bin", b"x" * 20_001)
    bundle = build_bundle(run, environment={})

    found = verify_bundle(run.path)

    assert "predictions-dppo.part-01-of-02.jsonl" in bundle.files
    assert found.recomputed["per_arm_means"]["dppo"] == {"accuracy": 1.0}
    assert bundle.omitted[-1][0] == "blob.bin"
    assert found.problems == ()
    assert any(text.startswith("blob.bin: left out of the bundle") for text in found.unchecked)


def test_part_that_was_exchanged_is_found(make_finished_run, monkeypatch, reseal):
    """Parts that fit the manifest one by one must also give the whole."""
    monkeypatch.setattr(manifest, "MAX_FILE_BYTES", 20_000)
    run = make_finished_run(prediction="4" * 600)
    bundle = build_bundle(run, environment={})
    name = next(n for n in bundle.files if n.startswith("predictions-dppo.part-01"))
    folder = Path(run.path, bundle.folder)
    reseal(folder, name, (folder / name).read_bytes().replace(b"444", b"445", 1))

    problems = verify_bundle(folder).problems

    assert any("parts that give the whole file" in problem for problem in problems)


def test_bundle_without_a_ledger_says_what_it_could_not_check(folder):
    entries = json.loads((folder / "manifest.json").read_text())
    entries["files"] = [e for e in entries["files"] if e["name"] != "ledger.jsonl"]
    (folder / "manifest.json").write_text(json.dumps(entries))
    (folder / "ledger.jsonl").unlink()

    assert "posted results: the ledger is not in the bundle" in verify_bundle(folder).unchecked


def test_score_of_one_seed_is_the_mean_of_its_rows(folder, reseal):
    """A posted seed without predictions has no mean to compare with."""
    result = json.loads((folder / "result.json").read_text())
    result["evaluation"]["scores"][2]["seed"] = 7
    reseal(folder, "result.json", json.dumps(result).encode())

    problems = verify_bundle(folder).problems

    assert "predictions-dppo.jsonl: mean of accuracy for dppo: no such predictions" in problems


def test_wrong_row_count_is_found(folder):
    entries = json.loads((folder / "manifest.json").read_text())
    entry = next(e for e in entries["files"] if e["name"] == "predictions-base.jsonl")
    entry["rows"] = 41
    (folder / "manifest.json").write_text(json.dumps(entries))

    assert "predictions-base.jsonl: expected 41 rows" in verify_bundle(folder).problems


def test_tar_inside_is_a_problem(folder):
    (folder / "notes.txt").write_bytes(b"x" * 257 + b"ustar\x0000")

    assert "notes.txt: an archive (tar) inside a bundle" in verify_bundle(folder).problems


def test_too_many_files_are_a_problem(folder):
    for number in range(60):
        (folder / f"x{number}").write_bytes(b"")

    assert "more than 64 files" in verify_bundle(folder).problems


def test_bytes_beyond_the_limit_of_a_bundle_are_not_read(folder):
    for number in range(4):
        with (folder / f"big{number}").open("wb") as file:
            file.truncate(10 * 1024 * 1024)

    assert any("above the limit of a bundle" in p for p in verify_bundle(folder).problems)


def test_path_that_no_file_can_have_is_refused():
    with pytest.raises(InputError, match="a bundle's folder"):
        verify_bundle("a\x00b")


def test_run_with_as_many_files_as_a_bundle_holds_verifies(make_finished_run):
    """61 files were fitted in; with crate, manifest and statement they are 64."""
    run = make_finished_run()
    for number in range(60):
        run.write_file(f"a{number:02d}.txt", b"x")
    bundle = build_bundle(run, environment={})

    found = verify_bundle(run.path)

    assert len(bundle.files) == 64
    assert found.problems == ()


def test_ledger_is_kept_where_many_attempts_are_not(make_finished_run):
    """Of a run with 70 attempts only records of attempts are left out, the oldest first."""
    deviation = {"field": "dataset", "original": "40", "effective": "8", "reason": "laptop"}
    run = make_finished_run(deviations=[deviation])
    for number in range(2, 71):
        run.store.replace(f"attempts/{number}/result.json", b"{}\n")
    bundle = build_bundle(run, environment={})

    found = verify_bundle(run.path)

    assert found.problems == ()
    assert "ledger.jsonl" in bundle.files
    assert "attempt-70.json" in bundle.files
    assert {name.partition("-")[0] for name, _ in bundle.omitted} == {"attempt"}


def test_ledger_that_was_left_out_leaves_its_checks_open(make_finished_run, monkeypatch):
    """A ledger of one long line does not fit: whether deviations came in time stays open."""
    deviation = {"field": "dataset", "original": "40", "effective": "8", "reason": "laptop"}
    run = make_finished_run(deviations=[deviation])
    run.append("note", text="x" * 60_000)
    monkeypatch.setattr(manifest, "MAX_FILE_BYTES", 50_000)
    bundle = build_bundle(run, environment={})

    found = verify_bundle(run.path)

    assert [name for name, _ in bundle.omitted] == ["ledger.jsonl"]
    assert found.problems == ()
    assert "posted results: the ledger is not in the bundle" in found.unchecked
    assert "deviations: the ledger tells whether they were posted in time" in found.unchecked
    assert not any("deviations were recorded in time" in text for text in found.checked)


def test_ledger_that_nobody_left_out_is_missed(folder, reseal):
    """Whoever drops the ledger without a word is judged by the final result alone."""
    result = json.loads((folder / "result.json").read_text())
    result["deviations"] = [{"field": "steps", "original": "2", "effective": "1", "reason": "x"}]
    reseal(folder, "result.json", json.dumps(result).encode())
    entries = json.loads((folder / "manifest.json").read_text())
    entries["files"] = [e for e in entries["files"] if e["name"] != "ledger.jsonl"]
    (folder / "manifest.json").write_text(json.dumps(entries))
    (folder / "ledger.jsonl").unlink()

    assert any("first posted in a final update" in p for p in verify_bundle(folder).problems)


@pytest.mark.parametrize("part", ["x", None, [], -1, True])
def test_part_without_a_number_is_one_problem(folder, part):
    entries = json.loads((folder / "manifest.json").read_text())
    entry = next(e for e in entries["files"] if e["name"] == "timings.jsonl")
    entry["part_of"] = {"name": "all.jsonl", "sha256": "a" * 64, "parts": 1, "part": part}
    (folder / "manifest.json").write_text(json.dumps(entries))

    (problem,) = verify_bundle(folder).problems

    assert "part_of.part: expected a whole number" in problem


def test_observations_in_parts_are_judged_as_they_were_sealed(make_finished_run, monkeypatch):
    """The rule reads the whole file, so verification puts it together first."""
    run = make_finished_run(items=200, treatment=200, baseline=50)
    monkeypatch.setattr(manifest, "MAX_FILE_BYTES", 50_000)
    bundle = build_bundle(run, environment={})

    found = verify_bundle(run.path)

    assert "scored-observations.part-01-of-02.jsonl" in bundle.files
    assert found.problems == ()
    assert found.verdict == "supported"
