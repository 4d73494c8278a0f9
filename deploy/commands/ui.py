"""``gated-rl ui``: Prefect's page with the run form, and everything behind it, on this machine."""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from deploy.exit_codes import ExitCode
from deploy.local_service.launch import ServiceStartError
from deploy.local_service.settings import ServiceSettings
from deploy.ui.addresses import choose_port
from deploy.ui.children import ChildFailed
from deploy.ui.prefect_server import PrefectSettings
from deploy.ui.stack import StackSettings, running
from evidence.errors import InputError
from tasks.service_settings import ServiceSettings as RemoteService

_PAGE_PORT, _SERVICE_PORT, _FILES_PORT = 4200, 8808, 8809
_MAX_THREADS = 2


def ui(args: argparse.Namespace) -> int:
    """Start everything, print where it is, and stop all of it on Ctrl-C or SIGTERM.

    Raises:
        InputError: if an option cannot be used: a port that is taken, a folder that is no local one.
    """
    settings = _settings(args)
    up, stop = threading.Event(), threading.Event()

    def end(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        if stop.is_set() or not up.is_set():
            raise KeyboardInterrupt  # nothing is worth waiting for: leave through the clean-up
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with running(settings, say=_say) as stack:
            print("\n".join(["", *stack.lines, "", "Ctrl-C stops everything."]), flush=True)
            up.set()
            stack.look_after(stop, _say)
            _say("stopping; runs that are not finished go on the next time")
    except (ChildFailed, ServiceStartError) as error:
        print(f"gated-rl: {error}", file=sys.stderr)
        return ExitCode.DEFECT
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return ExitCode.OK


def _settings(args: argparse.Namespace) -> StackSettings:
    if "://" in args.run_dir:
        raise InputError("--run-dir", args.run_dir, "a local folder (runs of the form lie there)")
    if args.at_once < 1:
        raise InputError("--at-once", args.at_once, "at least 1")
    run_dir = Path(args.run_dir).resolve()
    service = None
    if args.service == "local":
        service = ServiceSettings(
            store=run_dir / ".service" / "ui",
            port=choose_port("--service-port", args.service_port, usual=_SERVICE_PORT),
            threads=max(1, min(_MAX_THREADS, os.cpu_count() or 1)),
            allow_faults=args.allow_faults,
            exit_with_parent=True,
        )
    return StackSettings(
        run_dir=run_dir,
        prefect=PrefectSettings(
            home=run_dir / ".prefect",
            port=choose_port("--port", args.port, usual=_PAGE_PORT),
            database=args.database,
        ),
        files_port=choose_port("--files-port", args.files_port, usual=_FILES_PORT),
        service=service,
        service_url=None if service is not None else RemoteService(url=args.service).url,
        at_once=args.at_once,
    )


def _say(line: str) -> None:
    print(f"gated-rl: {line}", file=sys.stderr, flush=True)
