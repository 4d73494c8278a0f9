"""What the service finds out about a base model when it loads it."""

import logging
import subprocess
import sys

import pytest

from deploy.local_service import numerics
from deploy.local_service.numerics import TorchNumerics
from deploy.local_service.settings import ServiceSettings


@pytest.fixture
def loaded(tmp_path):
    return lambda: TorchNumerics(ServiceSettings(store=tmp_path)).load_base("tiny")


def test_repeatable_machine_has_nothing_to_say(loaded, caplog):
    with caplog.at_level(logging.WARNING):
        assert loaded().not_repeatable == ()
    assert caplog.messages == []


def test_results_that_depend_on_company_are_told(loaded, monkeypatch, caplog):
    monkeypatch.setattr(numerics, "find_differences", lambda base: ["head: a row differs"])
    with caplog.at_level(logging.WARNING):
        assert loaded().not_repeatable == ("head: a row differs",)
    (message,) = caplog.messages
    assert message == (
        "tiny: results may not repeat bit for bit on this machine: head: a row differs"
    )


LOAD_AND_COUNT = """
import os, sys, time
from pathlib import Path
import torch
from deploy.local_service.numerics import TorchNumerics
from deploy.local_service.settings import ServiceSettings

numerics = TorchNumerics(ServiceSettings(store=Path(sys.argv[1]), threads=2))
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
numerics.load_base("tiny")
deadline = time.monotonic() + 20
while threads() > before and time.monotonic() < deadline:
    time.sleep(0.05)  # a thread is joined shortly before it is gone
loaded = threads()
torch.ones(1 << 20).exp()
print(loaded - before, threads() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_loading_leaves_no_worker_threads_behind(tmp_path):
    """Two torch threads: none after loading, one more after the first large product.

    OpenMP lets its workers sleep between two operations once there are more than processors.
    """
    done = subprocess.run(
        [sys.executable, "-c", LOAD_AND_COUNT, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["0", "1"]
