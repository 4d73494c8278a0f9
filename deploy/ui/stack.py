"""Everything behind ``gated-rl ui``: embedded service, file server, Prefect server, worker, sweeper.

They are started in the order in which they need each other, looked after while they run (one that
ends is started again on its old address), and stopped in reverse.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local_service import launch
from deploy.local_service.launch import LocalService, ServiceStartError
from deploy.local_service.settings import ServiceSettings
from deploy.ui import children, file_server, prefect_server
from deploy.ui.children import Child
from deploy.ui.prefect_server import PROJECT_ROOT, PrefectSettings
from flows.board import FILES_VARIABLE
from flows.form import LOCAL, LOCAL_SERVICE_VARIABLE

_LOOK_SECONDS = 1.0
_START_SECONDS = 900.0  # fetching and converting the base model for the first time is part of it
_SHORTEST_LIFE_SECONDS = 5.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StackSettings:
    """What is started, and where.

    Attributes:
        run_dir: folder of runs.
        prefect: the Prefect server.
        files_port: port of the file server.
        service: the embedded service; None where another service is used.
        service_url: address of the other service, the run form's default.
        at_once: flow runs at a time.
    """

    run_dir: Path
    prefect: PrefectSettings
    files_port: int
    service: ServiceSettings | None
    service_url: str | None = None
    at_once: int = 4


@dataclass(slots=True)
class Stack:
    """What is running.

    Attributes:
        settings: what was asked for.
        files: address of the file server.
        service: the embedded service, if there is one.
        parts: the processes, in the order of their start.
    """

    settings: StackSettings
    files: str
    service: LocalService | None
    parts: list[Child] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """What a person needs to know."""
        service = self.settings.service_url if self.service is None else self.service.url
        page = self.settings.prefect.page
        return [
            f"Run form  {page}/deployments (Comparison: ... > Custom run)",
            f"Runs      {page}/runs",
            f"Files     {self.files}",
            f"Service   {service}",
            f"Kept in   {self.settings.run_dir}",
            f"From a shell: PREFECT_API_URL={self.settings.prefect.api} prefect deployment run "
            "comparison/comparison --param spec=tiny --param run_id=first",
        ]

    def look_after(self, stop: threading.Event, say: Say) -> None:
        """Start again whatever ends, until told to stop."""
        since = {part.name: time.monotonic() for part in self.parts}
        while not stop.wait(_LOOK_SECONDS):
            self._look_after_service(say)
            for part in self.parts:
                if part.running:
                    continue
                if time.monotonic() - since[part.name] < _SHORTEST_LIFE_SECONDS:
                    stop.wait(_SHORTEST_LIFE_SECONDS)  # it does not come up: no busy loop
                say(f"{part.name} ended with status {part.process.returncode}; starting it again")
                since[part.name] = time.monotonic()
                part.restart()

    def _look_after_service(self, say: Say) -> None:
        if self.service is None or self.service.running:
            return
        say("the embedded service ended; starting it again")
        try:
            self.service = self.service.restart(seconds=_START_SECONDS)
        except ServiceStartError as error:
            say(str(error))


@contextlib.contextmanager
def running(settings: StackSettings, *, say: Say) -> Iterator[Stack]:
    """Run everything for the length of a block.

    Args:
        settings: what is started.
        say: is told what is being started.

    Raises:
        ChildFailed: if the Prefect server or a deployment cannot be started.
        ServiceStartError: if the embedded service cannot be started.
    """
    with contextlib.ExitStack() as end:
        settings.run_dir.mkdir(parents=True, exist_ok=True)
        files = end.enter_context(file_server.serving(settings.run_dir, port=settings.files_port))
        say("starting the Prefect server")
        server = prefect_server.start_server(settings.prefect)
        end.callback(server.stop)
        service = None
        if settings.service is not None:
            say("starting the embedded service")
            service = launch.start(settings.service, seconds=_START_SECONDS)
        stack = Stack(settings, files, service, [server])
        end.callback(_stop_service, stack)
        say("making the deployments")
        prefect_server.deploy_all(
            settings.prefect,
            run_dir=str(settings.run_dir),
            service=settings.service_url or LOCAL,
        )
        worker = prefect_server.start_worker(
            settings.prefect, at_once=settings.at_once, environment=_for_flow_runs(stack)
        )
        end.callback(worker.stop)
        sweeper = children.start(
            "sweeper",
            [sys.executable, "-m", "deploy.cli", "sweep", "--forever"],
            environment=settings.prefect.environment(),
            log_file=settings.prefect.home / "logs" / "sweeper.log",
            folder=PROJECT_ROOT,
        )
        end.callback(sweeper.stop)
        stack.parts += [worker, sweeper]
        yield stack


def _stop_service(stack: Stack) -> None:
    if stack.service is not None:
        stack.service.stop()


def _for_flow_runs(stack: Stack) -> dict[str, str]:
    found = {FILES_VARIABLE: stack.files}
    if stack.service is not None:
        found[LOCAL_SERVICE_VARIABLE] = stack.service.url
    return found
