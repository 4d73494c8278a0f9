"""The address of a service: taking it, and saying that it answers."""

from __future__ import annotations

import logging
import os
import socket

from deploy.local_service.journal import write_document
from deploy.local_service.settings import ServiceSettings

logger = logging.getLogger(__name__)


def announce(settings: ServiceSettings, listener: socket.socket) -> None:
    """Log the address, and write it to the ready file if there is one."""
    port = listener.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{port}"
    logger.info("the service answers on %s", url)
    if settings.ready_file is not None:
        document = {"url": url, "host": settings.host, "port": port, "pid": os.getpid()}
        write_document(settings.ready_file, document)


def bind(settings: ServiceSettings) -> socket.socket:
    """Return a socket on the address.

    Raises:
        OSError: if the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError:
        listener.close()
        raise
    return listener
