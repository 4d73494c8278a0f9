"""A run in a process of its own that is killed at a chosen moment.

    python -m tests.flows.victim URL FOLDER MOMENT [SPEC]

SPEC is ``tiny`` (as if it were left out) or ``retail``. MOMENT is ``event:NAME:PHASE:N`` (at the Nth such event of the ledger, once it is written),
``part:FOLDER:N`` (once the Nth part of that kind is kept), ``write:N`` (at the Nth write of this process, before or after it takes place), or ``never``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from evidence.local_store import LocalStore
from evidence.run_files import RunFiles
from flows.run import run_comparison
from tests.flows import retail_spec
from tests.flows.conftest import make_plan

WRITES = ("append_line", "write_new", "replace")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_event(name: str, phase: str, number: int) -> None:
    append = RunFiles.append
    seen = 0

    def wrapped(self: RunFiles, event: str, **fields: Any) -> dict[str, Any]:
        nonlocal seen
        record = append(self, event, **fields)
        if event == name and fields.get("phase", "") == phase:
            seen += 1
            if seen == number:
                die()
        return record

    RunFiles.append = wrapped  # type: ignore[method-assign]


def die_at_write(number: int) -> None:
    count = 0

    def wrap(method: str) -> None:
        original = getattr(LocalStore, method)

        def wrapped(self: LocalStore, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                die()
            result = original(self, *args, **kwargs)
            count += 1
            if count == number:
                die()
            return result

        setattr(LocalStore, method, wrapped)

    for method in WRITES:
        wrap(method)


def die_at_part(folder: str, number: int) -> None:
    write = RunFiles.write_bytes
    seen = 0

    def wrapped(self: RunFiles, path: str, data: bytes) -> str:
        nonlocal seen
        written = write(self, path, data)
        seen += path.startswith(f"{folder}/")
        if seen == number:
            die()
        return written

    RunFiles.write_bytes = wrapped  # type: ignore[method-assign]


def plan_options(name: str) -> dict[str, Any]:
    """What a plan of the named spec is made of."""
    if name == "tiny":
        return {}
    document = retail_spec.spec()
    return {"document": document, "execution": retail_spec.hybrid_execution(document)}


def main(url: str, folder: str, moment: str, spec: str = "tiny") -> None:
    kind, *rest = moment.split(":")
    if kind == "event":
        die_at_event(rest[0], rest[1], int(rest[2]))
    elif kind == "part":
        die_at_part(rest[0], int(rest[1]))
    elif kind == "write":
        die_at_write(int(rest[0]))
    run_comparison(make_plan(Path(folder), url, **plan_options(spec)))


if __name__ == "__main__":
    main(*sys.argv[1:])
