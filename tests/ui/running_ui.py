"""``gated-rl ui`` as a person starts it, in a process of its own, and what its servers say."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from deploy.ui.children import end_with_parent

EXHAUSTED = "engine refused work: trainer capacity exhausted"
_START_SECONDS = 240.0


@dataclass
class RunningUi:
    """One running ``gated-rl ui``."""

    process: subprocess.Popen[str]
    run_dir: Path
    output: Path
    page: str
    files: str
    service: str
    client: httpx.Client

    def api(self, method: str, path: str, **body: Any) -> Any:
        """Ask the Prefect server; again while its database is busy, as Prefect's client does."""
        deadline = time.monotonic() + 60.0
        while True:
            answer = self.client.request(method, f"{self.page}/api{path}", **body)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def deployment(self, name: str = "comparison/comparison") -> str:
        return str(self.api("GET", f"/deployments/name/{name}")["id"])

    def launch(self, run_id: str, **parameters: Any) -> str:
        """Create a flow run as ``prefect deployment run`` does, and return its id."""
        given = {"spec": "tiny", "run_id": run_id, **parameters}
        body = {"parameters": given, "idempotency_key": run_id}
        path = f"/deployments/{self.deployment()}/create_flow_run"
        return str(self.api("POST", path, json=body)["id"])

    def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        return dict(self.api("GET", f"/flow_runs/{flow_run_id}"))

    def state_names(self, flow_run_id: str) -> list[str]:
        """The names of all states that a flow run has had, oldest first."""
        states = self.api("GET", "/flow_run_states/", params={"flow_run_id": flow_run_id})
        return [state["name"] for state in sorted(states, key=lambda state: state["timestamp"])]

    def await_state(self, flow_run_id: str, *names: str, seconds: float = 240.0) -> str:
        """Wait until a flow run's state has one of these names; return it."""
        deadline = time.monotonic() + seconds
        found = ""
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                found = self.flow_run(flow_run_id)["state"]["name"]
                if found in names:
                    return found
            time.sleep(0.25)
        raise TimeoutError(f"state {found}, expected {names}\n{self.log('worker')}")

    def artifacts(self, flow_run_id: str) -> dict[str, Any]:
        """What a flow run's artifacts hold, by key."""
        return {one["key"]: one["data"] for one in self._artifacts(flow_run_id)}

    def artifact_ids(self, flow_run_id: str) -> dict[str, str]:
        """The ids of a flow run's artifacts, by key."""
        return {one["key"]: one["id"] for one in self._artifacts(flow_run_id)}

    def _artifacts(self, flow_run_id: str) -> list[dict[str, Any]]:
        body = {"artifacts": {"flow_run_id": {"any_": [flow_run_id]}}, "limit": 200}
        return list(self.api("POST", "/artifacts/filter", json=body))

    def faults(self, *rules: Mapping[str, Any]) -> None:
        """Make the embedded service misbehave, or behave again."""
        address = f"{self.service}/api/v1/local/faults"
        self.client.post(address, json={"rules": list(rules)}).raise_for_status()

    def children(self, words: str) -> list[psutil.Process]:
        """Processes below it whose command line holds some words."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def log(self, name: str, *, lines: int = 40) -> str:
        place = self.run_dir / ".prefect" / "logs" / f"{name}.log"
        return "\n".join(place.read_text().splitlines()[-lines:]) if place.is_file() else "(none)"

    def stop(self) -> int:
        """Press Ctrl-C."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(90)


def no_capacity(skip: int = 0) -> dict[str, Any]:
    """A rule: from some call on, no training client can be loaded."""
    action = {"kind": "fail_future", "error": EXHAUSTED, "message": EXHAUSTED}
    return {"path": "load_weights", "skip": skip, "count": None, "actions": [action]}


@contextlib.contextmanager
def running_ui(folder: Path, *options: str, **variables: str) -> Iterator[RunningUi]:
    """Start it on free ports, wait until everything is up, and press Ctrl-C at the end."""
    run_dir, output = folder / "runs", folder / "ui.log"
    ports = ("--port", "0", "--service-port", "0", "--files-port", "0")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    environment |= {"HF_HUB_OFFLINE": "1", "PREFECT_WORKER_PREFETCH_SECONDS": "1", **variables}
    with output.open("w") as log, httpx.Client(trust_env=False, timeout=30.0) as client:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "deploy.cli",
                "ui",
                "--run-dir",
                str(run_dir),
                *ports,
                "--allow-faults",
                *options,
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
            text=True,
        )
        try:
            said = _await_addresses(process, output)
            yield RunningUi(
                process,
                run_dir,
                output,
                page=said["Runs"].removesuffix("/runs"),
                files=said["Files"],
                service=said["Service"],
                client=client,
            )
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(90)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _await_addresses(process: subprocess.Popen[str], output: Path) -> dict[str, str]:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        text = output.read_text()
        if "Ctrl-C stops everything." in text:
            return dict(re.findall(r"^(Runs|Files|Service) +(\S+)$", text, re.MULTILINE))
        time.sleep(0.2)
    raise RuntimeError(f"gated-rl ui did not come up:\n{output.read_text()}")
