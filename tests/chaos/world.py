"""What a run under chaos needs: a service that misbehaves, and a place for the run directory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import httpx

from deploy.local_service import launch
from deploy.local_service.request_log import read_request_log
from deploy.local_service.settings import ServiceSettings

FAULTS: Mapping[str, Mapping[str, Any]] = {
    "429": {"kind": "status", "status": 429},
    "503": {"kind": "status", "status": 503},
    "500": {"kind": "status", "status": 500},
    "410": {"kind": "status", "status": 410, "error": "model_lost"},
    "dropped before": {"kind": "drop_before"},
    "dropped after": {"kind": "drop_after"},
    "delayed": {"kind": "delay", "seconds": 0.2},
}
SHARE = 0.1
"""Of all calls that meet one of the faults."""


@dataclass
class World:
    """A service in a process of its own, with its faults and its log of requests."""

    service: launch.LocalService
    request_log: Path
    run_root: str
    environment: Mapping[str, str]
    seed: int = 0
    faulty: bool = False
    kills: int = 0
    calls: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def url(self) -> str:
        """Address of the service."""
        return self.service.url

    def home(self, machine: int) -> Path:
        """Home folder of a machine that works on runs; nothing of a run is kept there."""
        home = self.request_log.parent / f"machine-{machine}"
        home.mkdir(exist_ok=True)
        return home

    def misbehave(self) -> None:
        """Let one call in ten go wrong from now on."""
        self.faulty = True
        self._set_rules()

    def behave(self) -> None:
        """Let no call go wrong any more."""
        self._count()
        self.faulty = False
        self._local("DELETE", "faults")

    def kill_service(self, *, pause: float) -> None:
        """Kill the service, and start it again on the same store after a while."""
        self._count()
        self.service.kill()
        self.kills += 1
        time.sleep(pause)
        self.service = self.service.restart()
        if self.faulty:
            self._set_rules()

    def requests(self) -> list[dict[str, Any]]:
        """Every request that reached the service."""
        return read_request_log(self.request_log)

    def checkpoint(self, uri: str) -> dict[str, Any]:
        """What the service knows about a checkpoint, digests of weights and optimizer included."""
        return self._local("GET", f"checkpoints?path={quote(uri, safe='')}")

    def _set_rules(self) -> None:
        each = 1.0 - (1.0 - SHARE) ** (1.0 / len(FAULTS))
        rules = [
            {"name": name, "rate": each, "seed": self.seed + self.kills, "actions": [action]}
            for name, action in FAULTS.items()
        ]
        self._local("POST", "faults", {"rules": rules})

    def _count(self) -> None:
        if not self.faulty:
            return
        rules = self._local("GET", "faults")["rules"]
        self.calls += rules[0]["seen"] if rules else 0
        self.faults.update({rule["name"]: rule["hits"] for rule in rules})

    def _local(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        url = f"{self.url}/api/v1/local/{path}"
        with httpx.Client(trust_env=False, timeout=30.0) as client:
            answer = client.request(method, url, json=body)
        answer.raise_for_status()
        return dict(json.loads(answer.content or b"{}"))


def settle(environment: Mapping[str, str]) -> None:
    """Set variables of this process; fsspec reads its own when it is imported, and here again."""
    os.environ.update(environment)
    fsspec.config.set_conf_env(fsspec.config.conf)


@contextlib.contextmanager
def world(folder: Path, *, store: str, seed: int) -> Iterator[World]:
    """Start a service of its own, and an S3 server if the run directory shall lie on one.

    Args:
        folder: for everything that is written.
        store: ``local`` or ``s3``.
        seed: chooses the calls that go wrong.
    """
    launch.bypass_proxies(os.environ)
    log = folder / "requests.jsonl"
    settings = ServiceSettings(
        store=folder / "service",
        models=("tiny",),
        preload=("tiny",),
        allow_faults=True,
        max_adapters=256,
        session_timeout_seconds=60.0,
        request_log=log,
        exit_with_parent=True,
    )
    with contextlib.ExitStack() as stack:
        root, environment = str(folder / "runs"), {}
        if store == "s3":
            root, environment = stack.enter_context(s3_server(folder))
        made = World(launch.start(settings), log, root, environment, seed=seed)
        stack.callback(lambda: made.service.stop())
        yield made


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A local S3 server with one bucket; the variables through which fsspec finds it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "s3.log").open("ab") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    environment = {
        "FSSPEC_S3_KEY": "test",
        "FSSPEC_S3_SECRET": "test",
        "FSSPEC_S3_ENDPOINT_URL": endpoint,
        "GATED_RL_LEASE_SECONDS": "3",
        "GATED_RL_CLOCK_SKEW_SECONDS": "0.5",
    }
    try:
        _await_bucket(endpoint, server)
        yield "s3://runs/chaos", environment
    finally:
        server.terminate()
        server.wait()


def _await_bucket(endpoint: str, server: subprocess.Popen[bytes]) -> None:
    """Make the bucket as soon as the server answers."""
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        for _ in range(300):
            if server.poll() is not None:
                break
            with contextlib.suppress(httpx.HTTPError):
                if client.put(f"{endpoint}/runs").status_code == 200:
                    return
            time.sleep(0.1)
    raise RuntimeError("the S3 server did not start")
