"""What differs between tinker SDK 0.25 and 0.38, in one place; everything else is the same in both.

* Extra headers: ``default_headers`` in 0.25, later ``default_headers_overrides``.
* Settings of the optimizer at creation: only where `tinker.types.optimizer` exists.
* The optimizer that a service reports: not read by 0.25, made up by newer ones if it is silent.
* Futures: some calls return one in newer versions and the value itself in older ones.
* The end of a session: 0.25 has no call for it, the session is ended by a plain request then.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

import tinker
from tinker.lib.public_interfaces.api_future import APIFuture


def header_arguments(headers: Mapping[str, str]) -> dict[str, Any]:
    """The argument of `ServiceClient` that makes every request carry these headers."""
    if not headers:
        return {}
    known = inspect.signature(tinker.ServiceClient.__init__).parameters
    newer = "default_headers_overrides"
    return {newer if newer in known else "default_headers": dict(headers)}


def optimizer_arguments(optimizer: Mapping[str, float] | None) -> dict[str, Any]:
    """The argument of a client's creation that names the optimizer's settings.

    A version that cannot send them sends none: they are sent with every step all the same, and
    what the service reports is then what its last step used.
    """
    if optimizer is None or not takes_optimizer():
        return {}
    from tinker.types.optimizer import OptimizerConfigBase  # noqa: PLC0415 - not in 0.25

    settings: dict[str, Any] = dict(optimizer)
    return {"optimizer": OptimizerConfigBase(type="adamw", **settings)}


def takes_optimizer() -> bool:
    """Whether this version can send the optimizer's settings when a client is created."""
    return importlib.util.find_spec("tinker.types.optimizer") is not None


def reported_optimizer(info: Any) -> str | None:
    """The optimizer's type, where the service itself gave one.

    Newer versions fill in ``adamw`` for a service that says nothing, which is nobody's report;
    0.25 reads none at all.
    """
    if "optimizer_config" not in getattr(info, "model_fields_set", ()):
        return None
    found = getattr(info.optimizer_config, "type", None)
    return None if found is None else str(found)


def reads_optimizer() -> bool:
    """Whether this version passes on what a service reports about the optimizer."""
    return "optimizer_config" in tinker.types.GetInfoResponse.model_fields


def finished(made: Any) -> Any:
    """The value behind a future; the value itself where there is none."""
    return made.result() if isinstance(made, APIFuture) else made


def end_session(client: tinker.ServiceClient, reason: str) -> bool:
    """End a client's session.

    Returns:
        Whether the service was told; a version that cannot tell it stops its heartbeats, so that
        the service notices the silence.
    """
    close = getattr(client, "close", None)
    if close is not None:
        finished(close(reason))
        return True
    holder = _opened(client)
    if holder is not None:
        holder.close()
    return False


def session_left_open(client: tinker.ServiceClient) -> str | None:
    """The id of a session whose end this version could not tell the service."""
    if hasattr(client, "close"):
        return None
    found: Any = getattr(_opened(client), "_session_id", None)
    return None if found is None else str(found)


def _opened(client: tinker.ServiceClient) -> Any:
    """What holds a client's session; asking for it by its public name would open one."""
    return getattr(client, "_session_holder", None)


def sample_takes(client: Any, argument: str) -> bool:
    """Whether the SDK's `sample` knows an argument; older ones lack some kinds of scores."""
    return argument in inspect.signature(client.sample).parameters
