"""Ports on this machine: the one that was asked for, the usual one, or any that is free."""

from __future__ import annotations

import socket

from evidence.errors import InputError

HOST = "127.0.0.1"
_LAST_PORT = 65535


def choose_port(option: str, given: int | None, *, usual: int) -> int:
    """Return a port to listen on.

    Args:
        option: name of the option, for the message.
        given: the port that was asked for; 0 for any that is free.
        usual: the port that is taken without one, unless something listens there.

    Raises:
        InputError: if the port that was asked for is none, or is taken.
    """
    if given is not None and not 0 <= given <= _LAST_PORT:
        raise InputError(option, given, f"a port from 0 to {_LAST_PORT}")
    if given == 0:
        return _any_port()
    if given is not None:
        if not _is_free(given):
            raise InputError(option, given, "a port on which nothing listens")
        return given
    return usual if _is_free(usual) else _any_port()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _any_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
