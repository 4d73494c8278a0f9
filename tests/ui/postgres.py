"""A PostgreSQL server of a test's own, from the programs of Debian's package."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ACCOUNT = "postgres"


def find_postgres() -> Path | None:
    """The folder of the server's programs."""
    if os.geteuid() == 0:  # the server refuses to run as root; Debian's package makes an account
        try:
            pwd.getpwnam(_ACCOUNT)
        except KeyError:
            return None
    beside = [Path(found).resolve().parent] if (found := shutil.which("initdb")) else []
    for folder in [*beside, *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    return None


@contextlib.contextmanager
def running_postgres(programs: Path) -> Iterator[str]:
    """Run a server with an empty database and yield the address that Prefect takes."""
    account: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="gated-rl-postgres-"))
    try:
        if os.geteuid() == 0:
            account = {"user": _ACCOUNT}
            shutil.chown(folder, _ACCOUNT)
        data, port = folder / "data", _free_port()
        _call([programs / "initdb", "-D", data, "-U", "prefect", "-A", "trust"], account)
        process = subprocess.Popen(
            [programs / "postgres", "-D", data, "-k", folder, "-h", "127.0.0.1", "-p", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            start_new_session=True,
            **account,
        )
        try:
            _make_database(programs, port, process, account)
            yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/prefect"
        finally:
            process.send_signal(2)  # SIGINT: end sessions and stop
            process.wait(60)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_database(
    programs: Path, port: int, process: subprocess.Popen[bytes], account: dict[str, Any]
) -> None:
    command = [
        programs / "createdb",
        "-h",
        "127.0.0.1",
        "-p",
        str(port),
        "-U",
        "prefect",
        "prefect",
    ]
    deadline = time.monotonic() + 60.0
    while True:
        try:
            return _call(command, account)
        except subprocess.CalledProcessError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not come up: {error.stderr!r}") from error
            time.sleep(0.2)


def _call(command: list[Any], account: dict[str, Any]) -> None:
    subprocess.run(command, check=True, capture_output=True, cwd="/", **account)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
