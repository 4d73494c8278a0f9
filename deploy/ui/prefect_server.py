"""A Prefect server, the deployments on it, and a worker, each a process of this program."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from deploy.local_service.launch import bypass_proxies
from deploy.ui import children
from deploy.ui.addresses import HOST
from deploy.ui.children import Child, ChildFailed

PROJECT_ROOT = Path(__file__).resolve().parents[2]
PREFECT_FILE = PROJECT_ROOT / "deploy" / "prefect.yaml"
POOL = "local"
_NOT_INHERITED = ("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_PROFILE")
_LEASES = "prefect.server.concurrency.lease_storage.filesystem"
_START_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class PrefectSettings:
    """Where a server is, and where it keeps what it knows.

    Attributes:
        home: its folder: database, leases, logs, the page's files.
        port: where it listens on this machine.
        database: address of a database; an SQLite file in its folder by default.
    """

    home: Path
    port: int
    database: str | None = None

    @property
    def page(self) -> str:
        """Address of its page."""
        return f"http://{HOST}:{self.port}"

    @property
    def api(self) -> str:
        """Address of its API."""
        return f"{self.page}/api"

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of everything that serves it or speaks to it.

        What the person set for Prefect counts where it is a matter of taste; where the program
        relies on a value, it is set.
        """
        found = {k: v for k, v in (base or os.environ).items() if k not in _NOT_INHERITED}
        bypass_proxies(found)
        for name, value in {
            "PREFECT_WORKER_QUERY_SECONDS": "3",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
            "OMP_WAIT_POLICY": "passive",
        }.items():
            found.setdefault(name, value)
        return found | {
            "PREFECT_HOME": str(self.home),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": self.database_url,
            # In memory, leases end with the server, and the flow runs that hold them are ended.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": _LEASES,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(self.home / "page"),
            "DO_NOT_TRACK": "1",
        }

    @property
    def database_url(self) -> str:
        """Address of the database."""
        return self.database or f"sqlite+aiosqlite:///{self.home}/prefect.db"


def start_server(settings: PrefectSettings) -> Child:
    """Start a server and wait until it answers.

    Raises:
        ChildFailed: if it ends or does not answer in time.
    """
    settings.home.mkdir(parents=True, exist_ok=True)
    server = children.start(
        "Prefect server",
        [*_prefect("server", "start"), "--host", HOST, "--port", str(settings.port)],
        environment=settings.environment(),
        log_file=settings.home / "logs" / "server.log",
        folder=PROJECT_ROOT,
    )
    try:
        await_answer(server, settings)
    except BaseException:
        server.stop(seconds=2.0)
        raise
    return server


def await_answer(
    server: Child, settings: PrefectSettings, *, seconds: float = _START_SECONDS
) -> None:
    """Wait until a server answers.

    Raises:
        ChildFailed: if it ends or does not answer in time.
    """
    deadline = time.monotonic() + seconds
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while time.monotonic() < deadline:
            if not server.running:
                break
            try:
                if client.get(f"{settings.api}/health").status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
    raise ChildFailed(f"the Prefect server did not come up:\n{server.log_tail()}")


def deploy_all(settings: PrefectSettings, *, run_dir: str, service: str) -> None:
    """Make the work pool and the deployments, or bring them up to date.

    Args:
        settings: the server.
        run_dir: folder of runs, the form's default.
        service: address of the service, or ``local``; the form's default.

    Raises:
        ChildFailed: if the server refuses.
    """
    _make_pool(settings)
    environment = settings.environment() | {
        "PROJECT_ROOT": str(PROJECT_ROOT),
        "GATED_RL_RUN_DIR": run_dir,
        "GATED_RL_SERVICE": service,
    }
    command = _prefect("--no-prompt", "deploy", "--prefect-file", str(PREFECT_FILE), "--all")
    done = subprocess.run(
        command, env=environment, cwd=PROJECT_ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ChildFailed(f"the deployments could not be made:\n{done.stdout}{done.stderr}")


def start_worker(
    settings: PrefectSettings, *, at_once: int, environment: Mapping[str, str]
) -> Child:
    """Start a worker that carries out flow runs as processes.

    Args:
        settings: the server.
        at_once: at most so many at a time.
        environment: what flow runs find in theirs beside Prefect's own.
    """
    return children.start(
        "worker",
        [*_prefect("worker", "start"), "--pool", POOL, "--limit", str(at_once)],
        environment={**settings.environment(), **environment},
        log_file=settings.home / "logs" / "worker.log",
        folder=PROJECT_ROOT,
    )


def _make_pool(settings: PrefectSettings) -> None:
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        answer = client.post(f"{settings.api}/work_pools/", json={"name": POOL, "type": "process"})
    if answer.status_code not in (httpx.codes.CREATED, httpx.codes.CONFLICT):
        raise ChildFailed(f"the work pool could not be made: {answer.text}")


def _prefect(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "prefect", *arguments]
