"""Which flow run a living process carries out: a file lock that ends with the process.

The run directory's own lock says that somebody works on a run. Between the start of a flow and
that lock (files are read, the service is looked up), and between its release and the flow's last
word, this one says that the flow run's process is alive. Where runs lie on an object store there
are no file locks: the lease of the run is then the only proof.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

from evidence.local_store import lock_soon

FOLDER = ".flow-runs"
_FLOW_RUN_ID = re.compile(r"[0-9a-f-]{36}")


class FlowRunTaken(Exception):
    """Another living process carries out the same flow run."""


@contextlib.contextmanager
def carrying_out(run_dir: str, flow_run_id: UUID) -> Iterator[None]:
    """Say for the length of a block that this process carries out a flow run.

    Raises:
        FlowRunTaken: if another process does.
    """
    place = _place(run_dir, flow_run_id)
    if place is None:
        yield
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        if not lock_soon(fd):
            raise FlowRunTaken(f"flow run {flow_run_id} is carried out by another process")
        yield
    finally:
        os.close(fd)


def is_carried_out(run_dir: str, flow_run_id: UUID) -> bool:
    """Whether a process on this machine carries out the flow run right now."""
    place = _place(run_dir, flow_run_id)
    if place is None:
        return False
    try:
        fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _place(run_dir: str, flow_run_id: UUID) -> Path | None:
    name = str(flow_run_id)
    if "://" in run_dir or not _FLOW_RUN_ID.fullmatch(name):
        return None
    return Path(run_dir) / FOLDER / f"{name}.lock"
