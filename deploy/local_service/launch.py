"""Start the embedded service as a process of its own, wait until it answers, stop it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from deploy.local_service.journal import read_document
from deploy.local_service.settings import ServiceSettings, to_arguments

API_KEY_VARIABLE = "GATED_RL_LOCAL_API_KEY"
_POLL_SECONDS = 0.05
_STOP_SECONDS = 20.0
_LOG_TAIL_LINES = 15


class ServiceStartError(RuntimeError):
    """The service did not come up. The message ends with the last lines of its log."""


def bypass_proxies(environment: MutableMapping[str, str]) -> None:
    """Have HTTP clients reach this machine directly, whatever proxy is set.

    The first request of a Tinker client honours ``HTTP_PROXY``; without this it would be sent there.
    """
    local = ["127.0.0.1", "localhost", "::1"]
    for name in ("NO_PROXY", "no_proxy"):
        entries = [entry for entry in environment.get(name, "").split(",") if entry]
        environment[name] = ",".join([*entries, *(host for host in local if host not in entries)])


@dataclass(slots=True)
class LocalService:
    """A running service."""

    url: str
    """Base URL for clients."""
    pid: int
    settings: ServiceSettings
    log_file: Path
    _process: subprocess.Popen[bytes]

    @property
    def running(self) -> bool:
        """Whether the process is still there."""
        return self._process.poll() is None

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        return _tail(self.log_file)

    def stop(self, *, seconds: float = _STOP_SECONDS) -> int:
        """Ask the process to stop, insist after so many seconds, and return its exit code."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """End the process at once, as a crash would."""
        self._process.kill()
        return self._process.wait()

    def restart(self, *, seconds: float = 120.0) -> LocalService:
        """Start a service of the same settings, on the same port and store, after this one ended."""
        port = int(self.url.rpartition(":")[2])
        settings = self.settings.model_copy(update={"port": port, "ready_file": None})
        return start(settings, log_file=self.log_file, seconds=seconds)


def start(
    settings: ServiceSettings, *, log_file: Path | None = None, seconds: float = 120.0
) -> LocalService:
    """Start a service and wait until it answers.

    Args:
        settings: what it is told; its `ready_file` is set here if it has none.
        log_file: where its output goes; ``service.log`` in the store by default.
        seconds: how long to wait. Fetching a base model for the first time may take a minute.

    Raises:
        ServiceStartError: if it ends or does not answer in time.
    """
    settings.store.mkdir(parents=True, exist_ok=True)
    log_file = log_file or settings.store / "service.log"
    with tempfile.TemporaryDirectory(prefix="gated-rl-") as folder:
        ready = Path(folder) / "ready.json"
        process = _spawn(settings.model_copy(update={"ready_file": ready}), log_file)
        try:
            document = _await_ready(process, ready, log_file, seconds=seconds)
        except BaseException:
            process.kill()
            process.wait()
            raise
    url = str(document["url"])
    return LocalService(url, process.pid, settings, log_file, process)


def thread_environment(settings: ServiceSettings) -> dict[str, str]:
    """Return what tells a service's threads how to wait for each other.

    They spin for some 20 microseconds, which spans the gap between two operations, and then sleep.
    On two quiet cores a token takes 16 % less time than with threads that sleep at once (113 ms
    against 134 for six sequences, taking turns: `tests/benchmarks/test_thread_speed.py`);
    beside a process that keeps one core busy it takes about a quarter more, where threads that
    spin on take several times as long.
    """
    return {
        "OMP_NUM_THREADS": str(settings.threads),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "2000",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _spawn(settings: ServiceSettings, log_file: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | thread_environment(settings)
    if settings.api_key is not None:
        environment[API_KEY_VARIABLE] = settings.api_key
    command = [sys.executable, "-m", "deploy.local_service.server", *to_arguments(settings)]
    with log_file.open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )


def _await_ready(
    process: subprocess.Popen[bytes], ready: Path, log_file: Path, *, seconds: float
) -> dict[str, object]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        code = process.poll()
        if code is not None:
            raise ServiceStartError(f"the service ended with code {code}:\n{_tail(log_file)}")
        document = read_document(ready)
        if document is not None:
            return document
        time.sleep(_POLL_SECONDS)
    raise ServiceStartError(f"the service did not answer in {seconds:g} s:\n{_tail(log_file)}")


def _tail(log_file: Path) -> str:
    if not log_file.is_file():
        return "(no log)"
    lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_LOG_TAIL_LINES:])


def answers(url: str, *, seconds: float = 5.0) -> bool:
    """Say whether a service answers on an address."""
    try:
        with httpx.Client(trust_env=False, timeout=seconds) as client:
            return client.get(f"{url}/api/v1/healthz").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def running(
    settings: ServiceSettings, *, log_file: Path | None = None, seconds: float = 120.0
) -> Iterator[LocalService]:
    """Run a service for the length of a block.

    Raises:
        ServiceStartError: as `start`.
    """
    service = start(settings, log_file=log_file, seconds=seconds)
    try:
        yield service
    finally:
        service.stop()
