"""Processes that belong to this one: started apart from the terminal, stopped with all they started."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_LOG_TAIL_LINES = 15


class ChildFailed(RuntimeError):
    """A process did not start. The message ends with the last lines of its log."""


@dataclass(slots=True)
class Child:
    """One process with a log file.

    It has a session of its own, so that Ctrl-C in the terminal reaches this program alone, which
    then stops its children in order. On Linux it is also told to stop when this program is killed.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log_file: Path
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def running(self) -> bool:
        """Whether the process is still there."""
        return self.process.poll() is None

    def restart(self) -> None:
        """Start the same command again, after the process has ended."""
        self.process = _spawn(self.command, self.environment, self.log_file, self.folder)

    def stop(self, *, seconds: float = 15.0) -> None:
        """Ask the process and whatever it started to stop; insist after so many seconds."""
        stop_tree(self.process, seconds=seconds)

    def log_tail(self) -> str:
        """The last lines of its log."""
        if not self.log_file.is_file():
            return "(no log)"
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])


def start(
    name: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log_file: Path,
    folder: Path,
) -> Child:
    """Start a process.

    Args:
        name: what it is called in messages.
        command: program and arguments.
        environment: its whole environment.
        log_file: where its output is added.
        folder: its working directory.
    """
    process = _spawn(command, environment, log_file, folder)
    return Child(name, command, environment, log_file, folder, process)


def stop_tree(process: subprocess.Popen[bytes], *, seconds: float = 15.0) -> None:
    """End a process and all its descendants: those below first, so that it can still note that.

    Args:
        process: the process.
        seconds: how long all of them have before they are ended by force.
    """
    below = _descendants(process.pid) if process.poll() is None else []
    deadline = time.monotonic() + seconds
    _signal(below, signal.SIGTERM)
    psutil.wait_procs(below, timeout=seconds / 2)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))
    if process.poll() is None:
        below += _descendants(process.pid)
        process.kill()
    process.wait()
    _signal(below, signal.SIGKILL)
    psutil.wait_procs(below, timeout=5.0)


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], log_file: Path, folder: Path
) -> subprocess.Popen[bytes]:
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as log:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )


def end_with_parent() -> None:
    """Have the kernel send SIGTERM when the starting thread's process is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
