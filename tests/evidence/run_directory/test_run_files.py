"""Identity, ledger, gates, attempts and kept files of a run directory."""

import json
from pathlib import Path

import pytest

from evidence.canonical import digest
from evidence.errors import ConflictError, InputError
from evidence.gate import GateResult
from evidence.run import Run

SPEC = {"title": "t", "steps": 2}


def test_run_is_created_once_and_opened_again(run, make_run):
    """Creating the same run again opens it; the files say what it belongs to."""
    again = make_run()

    assert again.path == run.path
    assert again.run_id == "r1"
    assert again.identity == {
        "version": 1,
        "run_id": "r1",
        "spec_sha256": digest(SPEC),
        "execution_sha256": digest({"version": 1}),
        "base_sha256": "b" * 64,
    }
    assert Run.open(run.path).spec == SPEC
    assert Run.open(run.path, spec_sha256=digest(SPEC)).execution == {"version": 1}


@pytest.mark.parametrize(
    ("over", "field"),
    [
        ({"spec": {"title": "t", "steps": 3}}, "spec_sha256"),
        ({"execution": {"version": 2}}, "execution_sha256"),
        ({"execution": None}, "execution_sha256"),
        ({"identity": {"base_sha256": "c" * 64}}, "base_sha256"),
        ({"identity": {}}, "base_sha256"),
    ],
)
def test_directory_of_another_run_is_refused(run, make_run, over, field):
    """The error names the field and both values, and changes nothing."""
    before = {path: run.read_bytes(path) for path in run.files()}

    with pytest.raises(ConflictError, match=field) as caught:
        make_run(**over)

    assert "another run" in str(caught.value)
    assert {path: run.read_bytes(path) for path in run.files()} == before


def test_conflict_names_both_digests(run, make_run):
    other = {"title": "t", "steps": 3}

    with pytest.raises(ConflictError) as caught:
        make_run(spec=other)

    assert digest(SPEC) in str(caught.value)
    assert digest(other) in str(caught.value)


def test_open_refuses_another_spec(run):
    with pytest.raises(ConflictError, match="spec_sha256"):
        Run.open(run.path, spec_sha256="0" * 64)


def test_spec_may_be_reformatted_but_not_changed(run):
    """A space more is the same spec; another number is not."""
    place = Path(run.path, "spec.json")
    place.write_text(json.dumps(SPEC) + "  \n")

    assert Run.open(run.path).spec == SPEC

    place.write_text(json.dumps({**SPEC, "steps": 3}))
    with pytest.raises(ConflictError, match=r"identity.json says; the file was changed"):
        Run.open(run.path)


def test_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"identity.json: expected a file of this run"):
        Run.open(str(tmp_path))


def test_creation_goes_on_after_a_crash(tmp_path, make_run):
    """A spec without an identity beside it is a creation that was cut short."""
    make_run()
    Path(tmp_path, "r1", "identity.json").unlink()

    assert make_run().run_id == "r1"


@pytest.mark.parametrize("run_id", ["", "..", "a/b", ".x", "a b", "x" * 129, "a\n"])
def test_run_id_that_is_no_folder_name_is_refused(make_run, run_id):
    with pytest.raises(InputError, match="run_id"):
        make_run(run_id=run_id)


def test_spec_with_nan_is_refused(make_run):
    with pytest.raises(InputError, match="finite numbers"):
        make_run(spec={"margin": float("nan")})


def test_ledger_numbers_its_events(run, clock):
    """Events are numbered from 1 and carry the time in UTC."""
    run.append("update_intended", arm="grpo", update=0)
    run.append("update_done", arm="grpo", text="\ud83d\x00")

    events = run.events()

    assert [event["n"] for event in events] == [1, 2]
    assert events[0] == {
        "n": 1,
        "at": "2026-01-02T03:04:06+00:00",
        "event": "update_intended",
        "token": 0,
        "arm": "grpo",
        "update": 0,
    }
    assert run.events("update_done")[0]["text"] == "\ud83d\x00"
    assert Run.open(run.path).events() == events


@pytest.mark.parametrize("torn", [b'{"n":', b'{"n":2,"event":"b"}', b"\x00\x00\x00"])
def test_torn_last_line_is_dropped_and_cut_off(run, torn):
    """What a crash left behind is not read, and the next event starts on its own line."""
    run.append("a")
    place = Path(run.path, "ledger.jsonl")
    with place.open("ab") as ledger:
        ledger.write(torn)

    fresh = Run.open(run.path)
    assert [event["event"] for event in fresh.events()] == ["a"]

    fresh.append("c")
    assert [event["event"] for event in Run.open(run.path).events()] == ["a", "c"]
    assert len(place.read_bytes().splitlines()) == 2


@pytest.mark.parametrize(
    "line", [b'{"n":1,"n":1,"event":"x"}', b"garbage", b"[]", b'{"n":2,"event":"x"}', b'{"n":1}']
)
def test_flawed_line_before_the_end_is_an_error(run, line):
    """Anything but a torn last line is named, never skipped."""
    place = Path(run.path, "ledger.jsonl")
    place.write_bytes(line + b'\n{"n":2,"event":"y"}\n')

    with pytest.raises(InputError, match="line 1"):
        run.events()


@pytest.mark.parametrize("fields", [{"n": 3}, {"value": float("inf")}, {"value": object()}])
def test_event_that_is_not_json_is_refused(run, fields):
    with pytest.raises(InputError):
        run._ledger.append("x", fields)

    assert run.events() == []


def test_two_views_of_one_run_share_the_ledger(run):
    """Tasks open the run each for themselves; their events do not collide."""
    other = Run.open(run.path)
    run.append("a")
    other.append("b")
    run.append("c")

    assert [event["event"] for event in other.events()] == ["a", "b", "c"]


def test_gate_asked_again_keeps_both_records(run):
    first = GateResult("correctness", "unverified", reasons=("missing",))
    second = GateResult("correctness", "passed")

    assert run.write_gate(first) == "gates/correctness.json"
    assert run.write_gate(first) == "gates/correctness.json"
    assert run.write_gate(second) == "gates/correctness.2.json"

    assert run.gate("correctness") == second
    assert run.gates() == {"correctness": second}
    assert run.read_json("gates/correctness.json")["status"] == "unverified"
    assert run.gate("restoration") is None


def test_json_is_written_once(run):
    """An equal value again changes nothing; another one names both digests."""
    run.write_json("effective-config.json", {"a": 1, "b": 2})
    run.write_json("effective-config.json", {"b": 2, "a": 1})

    with pytest.raises(ConflictError) as caught:
        run.write_json("effective-config.json", {"a": 1})

    assert digest({"a": 1}) in str(caught.value)
    assert digest({"a": 1, "b": 2}) in str(caught.value)


def test_kept_file_is_immutable(run):
    assert run.write_file("a.txt", b"x") == "files/a.txt"
    run.write_file("a.txt", b"x")

    with pytest.raises(ConflictError, match=r"files/a.txt"):
        run.write_file("a.txt", b"y")

    assert run.read_bytes("files/a.txt") == b"x"


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/../../x", "", ".", "a//b", "a\\b", ".lock", "a\x00b", "a\nb"]
)
def test_path_that_climbs_out_is_refused(run, path):
    with pytest.raises(InputError, match="path"):
        run.write_bytes(path, b"x")
    with pytest.raises(InputError, match="path"):
        run.read_bytes(path)


def test_symbolic_link_is_refused(run, tmp_path):
    """Neither a linked file nor a linked folder is followed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    Path(run.path, "files").symlink_to(outside)

    with pytest.raises(InputError, match="no symbolic link"):
        run.write_file("a.txt", b"x")
    assert list(outside.iterdir()) == []


def test_attempts_are_counted_by_their_final_records(run):
    assert run.attempt == 1
    assert run.close_attempt({"status": "failed"}) == 1
    assert run.attempt == 2
    assert run.read_json("attempts/1/result.json") == {"status": "failed"}
    assert run.events("attempt_closed")[0]["attempt"] == 1


def test_posted_results_are_all_kept(run):
    """Each posted result replaces the file as a whole and stays in the ledger."""
    run.replace_result({"status": "running", "metrics": {}})
    run.replace_result({"status": "running", "metrics": {"a": 1}})
    run.replace_result({"status": "running", "metrics": {"a": 1}})

    assert run.result() == {"status": "running", "metrics": {"a": 1}}
    assert [posted["metrics"] for posted in run.posted_results()] == [{}, {"a": 1}]


def test_lock_is_held_by_one(run):
    """A second holder is refused with the name of the first; then the token grows."""
    assert run.lock_holder() is None
    with run.lock() as lock:
        assert lock.token == 1
        assert run.lock_holder()["run_id"] == "r1"
        with pytest.raises(ConflictError, match=r"lock: expected no other process, found .*pid"):
            run.store.acquire_lock({})
        assert run.append("x")["token"] == 1
    assert run.lock_holder() is None
    with run.lock() as lock:
        assert lock.token == 2


def test_attempt_is_closed_once_whatever_the_crash(run):
    """Closing again after a crash, before or after the file was kept, is the same attempt."""
    final = {"status": "failed"}
    run.replace_result(final)
    run.append("attempt_closed", attempt=1)
    assert run.close_attempt(final) == 1
    assert run.close_attempt(final) == 1

    run.replace_result({"status": "running"})
    run.replace_result(final)
    assert run.close_attempt(final) == 2
    assert run.files("attempts") == ["attempts/1/result.json", "attempts/2/result.json"]
