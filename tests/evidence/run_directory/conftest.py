"""Builders for the run directory's tests."""

from datetime import UTC, datetime, timedelta

import fsspec
import pytest

from evidence.local_store import Disk
from evidence.run import Run

SPEC = {"title": "t", "steps": 2}
EXECUTION = {"version": 1}


class SteppingClock:
    """A clock that moves one second with every look."""

    def __init__(self):
        self.now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    def __call__(self):
        self.now += timedelta(seconds=1)
        return self.now


class FailingDisk(Disk):
    """A disk whose n-th call of some kind fails, after writing half of what it was given."""

    def __init__(self, error):
        self.error = error
        self.calls = 0
        self.fail_at = None
        self.only = None

    def _count(self, kind):
        if self.only is not None and kind != self.only:
            return False
        self.calls += 1
        return self.calls == self.fail_at

    def create(self, path):
        if self._count("create"):
            raise self.error
        return super().create(path)

    def open_log(self, path):
        if self._count("open_log"):
            raise self.error
        return super().open_log(path)

    def write(self, fd, data):
        if self._count("write"):
            super().write(fd, data[: len(data) // 2])
            raise self.error
        return super().write(fd, data)

    def fsync(self, fd):
        if self._count("fsync"):
            raise self.error
        super().fsync(fd)

    def link(self, source, target):
        if self._count("link"):
            raise self.error
        super().link(source, target)

    def rename(self, source, target):
        if self._count("rename"):
            raise self.error
        super().rename(source, target)


@pytest.fixture
def clock():
    return SteppingClock()


@pytest.fixture
def make_run(tmp_path, clock):
    """Create a run under a temporary folder; keyword arguments replace the defaults."""

    def make(root=tmp_path, **over):
        settings = {
            "run_id": "r1",
            "spec": SPEC,
            "execution": EXECUTION,
            "identity": {"base_sha256": "b" * 64},
            "clock": clock,
            **over,
        }
        return Run.create(str(root), **settings)

    return make


@pytest.fixture
def run(make_run):
    return make_run()


@pytest.fixture
def memory_root():
    """An empty prefix of the in-memory object store."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield "memory://bucket/runs"
    fs.store.clear()


def _rollout_row(**over):
    return {
        "group": 0,
        "sample": 0,
        "item_id": "i0",
        "policy_version": 0,
        "seed": 7,
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "turns": 1,
        "stop_reason": "stop",
        "truncated": False,
        "reward": 1.0,
        "native_reward": None,
        "correct": True,
        "format_ok": None,
        "parse_failures": 0,
        "tool_calls": 0,
        "tool_errors": 0,
        "advantage": 0.5,
        "completion_text": "4",
        "prompt_sha256": "a" * 64,
        "info_json": None,
        **over,
    }


@pytest.fixture
def rollout_row():
    """Build one row of the rollouts table without its file's key columns."""
    return _rollout_row


@pytest.fixture
def failing_disk():
    return FailingDisk
