"""Local writes survive a failure at any call: old or new content, never half of it."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evidence.errors import ConflictError, InputError
from evidence.local_store import LocalStore

FULL = OSError(errno.ENOSPC, "No space left on device")
CRASH = KeyboardInterrupt()


@pytest.fixture
def disk(failing_disk):
    return failing_disk(FULL)


@pytest.fixture
def store(tmp_path, disk):
    store = LocalStore(tmp_path / "run", disk=disk)
    store.replace("result.json", b"old")
    store.append_line("ledger.jsonl", b"one", number=1)
    disk.calls = 0
    return store


WRITES = {
    "write_new": lambda store: store.write_new("tables/new.parquet", b"new" * 1000),
    "replace": lambda store: store.replace("result.json", b"new" * 1000),
    "append": lambda store: store.append_line("ledger.jsonl", b"two" * 1000, number=2),
}


def _calls_of(what, tmp_path, failing_disk):
    disk = failing_disk(FULL)
    store = LocalStore(tmp_path / "dry", disk=disk)
    store.replace("result.json", b"old")
    store.append_line("ledger.jsonl", b"one", number=1)
    disk.calls = 0
    WRITES[what](store)
    return disk.calls


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("error", [FULL, CRASH], ids=["full", "killed"])
def test_failure_at_each_call_leaves_old_or_new(what, error, tmp_path, failing_disk):
    """Whichever call fails, every file is whole, and the same write succeeds afterwards."""
    calls = _calls_of(what, tmp_path, failing_disk)
    assert calls >= 3
    for fail_at in range(1, calls + 1):
        disk = failing_disk(error)
        root = tmp_path / f"run{fail_at}"
        store = LocalStore(root, disk=disk)
        store.replace("result.json", b"old")
        store.append_line("ledger.jsonl", b"one", number=1)
        disk.calls, disk.fail_at = 0, fail_at

        with pytest.raises((InputError, KeyboardInterrupt)):
            WRITES[what](store)

        again = LocalStore(root)
        assert again.read_if_exists("result.json") in (b"old", b"new" * 1000)
        assert again.read_if_exists("tables/new.parquet") in (None, b"new" * 1000)
        assert again.read_lines("ledger.jsonl") in ([b"one"], [b"one", b"two" * 1000])
        if again.read_lines("ledger.jsonl") == [b"one"]:
            WRITES[what](again)
        assert list(root.rglob(".tmp-*")) == []


def test_full_disk_is_one_line_with_path_and_need(store, disk):
    """The error says which file, what was lacking and how much."""
    disk.calls, disk.fail_at, disk.only = 0, 1, "write"

    with pytest.raises(InputError) as caught:
        store.write_new("tables/a.parquet", b"x" * 4096)

    message = str(caught.value)
    assert "tables/a.parquet" in message
    assert "room for 4096 more bytes" in message
    assert "No space left on device" in message
    assert "\n" not in message
    assert store.read_if_exists("result.json") == b"old"


def test_full_disk_during_append_keeps_the_log(store, disk):
    """Half a line is taken back at once, so the next event is whole."""
    disk.calls, disk.fail_at, disk.only = 0, 1, "write"
    with pytest.raises(InputError, match=r"ledger.jsonl"):
        store.append_line("ledger.jsonl", b"two", number=2)

    assert store.local_path("ledger.jsonl").read_bytes() == b"one\n"
    store.append_line("ledger.jsonl", b"three", number=2)

    assert store.read_lines("ledger.jsonl") == [b"one", b"three"]


def test_read_only_folder_is_one_line(tmp_path, failing_disk):
    disk = failing_disk(OSError(errno.EACCES, "Permission denied"))
    disk.fail_at = 1

    with pytest.raises(InputError, match="a file that can be written, found 'Permission denied'"):
        LocalStore(tmp_path, disk=disk).write_new("a", b"x")


def test_file_system_without_hard_links_is_used_all_the_same(tmp_path, failing_disk):
    disk = failing_disk(OSError(errno.EPERM, "Operation not permitted"))
    disk.fail_at, disk.only = 1, "link"
    store = LocalStore(tmp_path, disk=disk)

    assert store.write_new("a", b"x")
    assert not store.write_new("a", b"y")
    assert store.read_if_exists("a") == b"x"


def test_write_new_never_replaces(store):
    assert store.write_new("a", b"x")
    assert not store.write_new("a", b"y")
    assert store.read_if_exists("a") == b"x"


def test_lock_of_a_killed_process_is_free(tmp_path):
    """A process that dies without a word leaves the lock free; its leftovers are removed."""
    code = (
        "import os, sys; from pathlib import Path; from evidence.local_store import LocalStore\n"
        "store = LocalStore(Path(sys.argv[1])); store.acquire_lock({'pid': os.getpid()})\n"
        "Path(sys.argv[1], '.tmp-1-x').write_bytes(b'half'); os._exit(9)\n"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, check=False)
    store = LocalStore(tmp_path)
    assert (tmp_path / ".tmp-1-x").exists()

    lock = store.acquire_lock({"pid": os.getpid()})

    assert lock.token == 2
    assert not (tmp_path / ".tmp-1-x").exists()
    assert store.lock_holder()["pid"] == os.getpid()
    lock.release()
    with pytest.raises(ConflictError, match="released"):
        lock.check()


@pytest.mark.parametrize("call", ["ftruncate", "fsync", "pwrite"])
def test_token_survives_a_kill_while_the_lock_is_taken(call, tmp_path, monkeypatch):
    """Killed at any call of taking the lock: no later holder gets a token that was given out."""
    LocalStore(tmp_path).acquire_lock({"host": "a host with a long name"}).release()

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, call, killed)
        with pytest.raises(KeyboardInterrupt):
            LocalStore(tmp_path).acquire_lock({"host": "b"})

    assert LocalStore(tmp_path).acquire_lock({"host": "c"}).token >= 2


def test_hidden_files_are_not_listed(store, tmp_path):
    (tmp_path / "run" / ".tmp-1-x").write_bytes(b"")
    lock = store.acquire_lock({})

    assert store.paths() == ["ledger.jsonl", "result.json"]
    lock.release()


def test_rename_without_hard_links_does_not_replace(tmp_path, failing_disk):
    """Another writer that was faster is noticed also where links are not possible."""

    class Racing(failing_disk):
        def link(self, source, target):
            target.write_bytes(b"theirs")
            raise OSError(errno.EPERM, "Operation not permitted")

    store = LocalStore(tmp_path, disk=Racing(FULL))

    assert not store.write_new("a", b"ours")
    assert store.read_if_exists("a") == b"theirs"


def test_folder_where_a_file_should_be_is_one_line(store):
    store.write_new("a/b", b"x")

    with pytest.raises(InputError, match="a: expected a readable file"):
        store.read_if_exists("a")
    with pytest.raises(InputError, match="a/b/c: expected a file that can be written"):
        store.write_new("a/b/c", b"x")


def test_lock_in_a_place_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(InputError, match=r"\.lock: expected a file that can be written"):
        LocalStore(tmp_path / "file" / "run").acquire_lock({})


def test_torn_line_longer_than_a_block_is_cut_off(store):
    """The last line end is found however long the torn line is."""
    place = store.local_path("ledger.jsonl")
    place.write_bytes(b"one\n" + b"x" * 200_000)

    store.append_line("ledger.jsonl", b"two", number=2)

    assert place.read_bytes() == b"one\ntwo\n"


def test_log_that_has_not_grown_is_not_read_again(store, monkeypatch):
    """Asking for news of an unchanged log costs a look at its size; new lines are seen at once."""
    assert store.read_lines("ledger.jsonl") == [b"one"]
    monkeypatch.setattr(store, "read_if_exists", None)
    assert store.read_lines("ledger.jsonl", after=1) == []
    monkeypatch.undo()

    store.append_line("ledger.jsonl", b"two", number=2)

    assert store.read_lines("ledger.jsonl", after=1) == [b"two"]
    assert store.read_lines("nothing.jsonl") == []


def test_torn_log_is_read_again(store):
    """A torn line of the very length of the line that replaces it hides nothing."""
    place = store.local_path("ledger.jsonl")
    place.write_bytes(b"one\nto")
    assert store.read_lines("ledger.jsonl", after=1) == []

    place.write_bytes(b"one\nx\n")

    assert store.read_lines("ledger.jsonl", after=1) == [b"x"]
