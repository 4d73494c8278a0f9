"""Run the embedded service: ``python -m deploy.local_service.server --port 8100``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

import uvicorn
from pydantic import ValidationError

from deploy.exit_codes import ExitCode
from deploy.local_service.address import announce, bind
from deploy.local_service.app import build_app
from deploy.local_service.journal import StoreLock
from deploy.local_service.numerics import TorchNumerics
from deploy.local_service.service import Service
from deploy.local_service.settings import ServiceSettings, add_arguments, from_arguments

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "GATED_RL_LOCAL_API_KEY"
"""Environment variable of the API key, so that it need not stand in a command line."""
_GRACE_SECONDS = 5
_PARENT_CHECK_SECONDS = 0.5


class _Server(uvicorn.Server):
    """A server that wakes waiting polls when it is told to stop, and says when it answers."""

    def __init__(
        self, config: uvicorn.Config, *, service: Service, listener: socket.socket
    ) -> None:
        super().__init__(config)
        self._service = service
        self._listener = listener

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop, and let no poll hold that up; a second signal does not wait for connections."""
        del sig, frame
        # The base class would raise the signal again in the end; a stop on request is a success.
        self.force_exit = self.should_exit
        self.should_exit = True
        self._service.context.futures.wake_all()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start answering, then say so."""
        await super().startup(sockets=sockets)
        if not self.should_exit:
            announce(self._service.settings, self._listener)


async def _leave_with_parent(server: uvicorn.Server) -> None:
    parent = os.getppid()
    while not server.should_exit:
        await asyncio.sleep(_PARENT_CHECK_SECONDS)
        if os.getppid() != parent:
            logger.info("the starting process is gone; stopping")
            server.handle_exit(signal.SIGTERM, None)
            return


async def _serve(server: _Server, settings: ServiceSettings, listener: socket.socket) -> None:
    watch = asyncio.create_task(_leave_with_parent(server)) if settings.exit_with_parent else None
    try:
        await server.serve(sockets=[listener])
    finally:
        if watch is not None:
            watch.cancel()


def run_server(settings: ServiceSettings) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns:
        0 after a clean stop, 2 if the address or the store is taken.
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
        service = Service(settings, TorchNumerics(settings))
        config = uvicorn.Config(
            build_app(service),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            timeout_keep_alive=75,
            backlog=2048,
            lifespan="on",
        )
        server = _Server(config, service=service, listener=listener)
        asyncio.run(_serve(server, settings, listener))
    return 0


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
