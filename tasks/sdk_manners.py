"""Habits of the SDK that no setting changes and that would break the one retry policy.

A poll that is answered with 5xx is repeated at once, hundreds of times a second and without end; a
402 is slept on for an hour without a word. Here the first becomes the error that the SDK itself
backs off from (1, 2, 4, ... 30 s), and the second reaches whoever asked. And the SDK logs each
sample that fails or is given up as an error, one line each: this program says and records once
what became of all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tinker
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
from tinker.lib.internal_client_holder import InternalClientHolder

_MARK = "_gated_rl_manners"


def teach_manners() -> None:
    """Change them for every client of this process. Doing so again changes nothing."""
    holder: Any = InternalClientHolder
    if getattr(holder, _MARK, False):
        return
    logging.getLogger("tinker.lib.retry_handler").setLevel(logging.CRITICAL)
    open_client = holder.aclient

    def aclient(
        self: Any, pool: ClientConnectionPoolType, *args: Any, **options: Any
    ) -> AbstractContextManager[Any]:
        opened: AbstractContextManager[Any] = open_client(self, pool, *args, **options)
        return _paced(opened) if pool is ClientConnectionPoolType.RETRIEVE_PROMISE else opened

    holder.aclient = aclient
    if hasattr(holder, "_should_pause_on_billing"):
        holder._should_pause_on_billing = lambda self, status, detail: False
    setattr(holder, _MARK, True)


@contextmanager
def _paced(opened: AbstractContextManager[Any]) -> Iterator[Any]:
    """A client for polls, whose internal errors count as a broken connection."""
    try:
        with opened as client:
            yield client
    except tinker.InternalServerError as error:
        raise tinker.APIConnectionError(request=error.request, message=str(error)) from error
