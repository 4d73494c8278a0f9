"""Files of the service that have to survive a kill."""

import os

import pytest

from deploy.local_service.journal import (
    AppendLog,
    StoreLock,
    read_document,
    read_log,
    write_document,
)


def test_log_returns_records_in_order(tmp_path):
    """Two appended records are read back as they were written."""
    log = AppendLog(tmp_path / "a" / "log.jsonl")
    log.append({"n": 1})
    log.append({"n": 2, "text": "ä\n"})
    log.close()

    assert list(read_log(tmp_path / "a" / "log.jsonl")) == [{"n": 1}, {"n": 2, "text": "ä\n"}]


def test_log_drops_a_line_cut_short_and_goes_on_after_it(tmp_path):
    """Half a record is no record, and does not swallow the next one."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2')
    assert list(read_log(path)) == [{"n": 1}]

    log = AppendLog(path)
    log.append({"n": 3})
    log.close()

    assert list(read_log(path)) == [{"n": 1}, {"n": 3}]


def test_log_without_a_file_is_empty(tmp_path):
    """A run that never applied anything has no log."""
    assert list(read_log(tmp_path / "none.jsonl")) == []


def test_refused_append_leaves_earlier_records(tmp_path, monkeypatch):
    """A full disk costs the record at hand, not the ones before it."""
    path = tmp_path / "log.jsonl"
    log = AppendLog(path)
    log.append({"n": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            log.append({"n": 2})
    log.append({"n": 3})
    log.close()

    assert list(read_log(path)) == [{"n": 1}, {"n": 3}]


def test_document_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    """A write that fails leaves the old document and no temporary file."""
    path = tmp_path / "run.json"
    write_document(path, {"a": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_document(path, {"a": 2})

    assert read_document(path) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_store_has_one_service_at_a_time(tmp_path):
    """A second lock on the same folder is refused until the first is released."""
    with StoreLock(tmp_path, wait_seconds=0), pytest.raises(TimeoutError, match="another service"):
        StoreLock(tmp_path, wait_seconds=0)

    StoreLock(tmp_path, wait_seconds=0).release()
