"""Run a service on a listening socket until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from types import FrameType

import uvicorn

from deploy.exit_codes import ExitCode
from deploy.local_service.address import announce
from deploy.local_service.app import build_app
from deploy.local_service.numerics import TorchNumerics
from deploy.local_service.service import Service
from deploy.local_service.settings import ServiceSettings
from evidence.errors import InputError

logger = logging.getLogger(__name__)

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


def serve(settings: ServiceSettings, listener: socket.socket) -> int:
    """Serve until SIGTERM or SIGINT. The caller holds the store's lock.

    Returns:
        0 after a clean stop, 2 if a model to be preloaded cannot be had, 1 if the start failed.
    """
    numerics = TorchNumerics(settings)
    try:
        for name in settings.preload:
            numerics.load_base(name)
    except (InputError, OSError) as error:
        sys.stderr.write(f"serve-local: {error}\n")
        return int(ExitCode.BAD_INPUT)
    service = Service(settings, numerics)
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
    # A server that never started has said why in the log.
    return 0 if server.started else int(ExitCode.DEFECT)
