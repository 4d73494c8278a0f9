"""Start the embedded service: ``python -m deploy.local_service.server --port 8100``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from deploy.exit_codes import ExitCode
from deploy.local_service.address import bind
from deploy.local_service.journal import StoreLock
from deploy.local_service.settings import ServiceSettings, add_arguments, from_arguments

API_KEY_VARIABLE = "GATED_RL_LOCAL_API_KEY"
"""Environment variable of the API key, so that it need not stand in a command line."""


def run_server(settings: ServiceSettings) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns:
        0 after a clean stop; 2 if the address or the store is taken, or a model to be preloaded
        cannot be had; 1 if the start failed otherwise.
    """
    try:
        listener = bind(settings)
        lock = StoreLock(settings.store, wait_seconds=settings.lock_wait_seconds)
    except (OSError, TimeoutError) as error:
        sys.stderr.write(
            f"serve-local: {settings.host}:{settings.port}, store {settings.store}: {error}\n"
        )
        return int(ExitCode.BAD_INPUT)
    with lock:
        from deploy.local_service.running import serve  # noqa: PLC0415 - torch takes seconds to load

        return serve(settings, listener)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read options, serve, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if not hasattr(options, "api_key") and os.environ.get(API_KEY_VARIABLE):
        options.api_key = os.environ[API_KEY_VARIABLE]
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        settings = from_arguments(options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        sys.stderr.write(f"serve-local: {where}: {first['msg']}\n")
        return int(ExitCode.BAD_INPUT)
    return run_server(settings)


if __name__ == "__main__":
    code = main()
    # A computation that does not end must not keep the process: every file is whole at any time.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
