"""Fixtures that several folders of tests share.

`local_service` is a running embedded service with the built-in ``tiny`` model: one process for the
whole test session, with its own store, on a free loopback port. Use its ``url``::

    def test_something(local_service):
        client = tinker.ServiceClient(base_url=local_service.url, api_key=LOCAL_API_KEY)

* Served base model: ``tiny`` (2 layers, hidden size 16, byte tokenizer: byte b is token 3 + b, stop
  token 2), float32, one thread. A step takes milliseconds.
* Every test opens clients of its own; sessions do not see each other's models. Close them
  (``client.close("success").result()``) or leave them: silent sessions are released.
* The service may be told to misbehave (``POST /api/v1/local/faults``); a test that does so must
  take `faulty_service` instead, which clears everything afterwards, and must not run its calls
  beside those of another test.
* A test that kills or restarts the service, or needs other settings, starts its own with
  `start_service`.

The environment of the whole session is set so that the Tinker client reaches it: no proxy for
loopback, no telemetry, no model hub.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator

import httpx
import pytest

from deploy.local_service import launch
from deploy.local_service.settings import ServiceSettings

# The Tinker client never closes the connection of its first request; the garbage collector finds
# it during some later test, or after the last one.
_CLIENT_LEAKS = ("unclosed <socket", "unclosed transport")

LOCAL_API_KEY = "tml-local-test-key"
"""Any key does (the service checks none by default), but the client wants this form."""


def pytest_configure(config: pytest.Config) -> None:
    """Name the one leak of the client library that is not ours to close."""
    for message in _CLIENT_LEAKS:
        config.addinivalue_line("filterwarnings", f"ignore:{message}:ResourceWarning")
        # For what is found between tests, where the lines above are not in force.
        warnings.filterwarnings("ignore", message, ResourceWarning)


@pytest.fixture(scope="session", autouse=True)
def _client_environment() -> None:
    """Let clients in this process and its children reach loopback services, and nothing else."""
    launch.bypass_proxies(os.environ)
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TINKER_API_KEY", LOCAL_API_KEY)


@pytest.fixture(scope="session")
def local_service(
    tmp_path_factory: pytest.TempPathFactory, _client_environment: None
) -> Iterator[launch.LocalService]:
    """A running embedded service with the tiny model, shared by the whole test session."""
    settings = ServiceSettings(
        store=tmp_path_factory.mktemp("local-service"),
        models=("tiny",),
        preload=("tiny",),
        allow_faults=True,
        max_adapters=64,
        exit_with_parent=True,
    )
    with launch.running(settings) as service:
        yield service


@pytest.fixture
def faulty_service(local_service: launch.LocalService) -> Iterator[launch.LocalService]:
    """The shared service, for a test that makes it misbehave; all faults are cleared afterwards."""
    with httpx.Client(trust_env=False, base_url=f"{local_service.url}/api/v1/local") as control:
        control.delete("/faults").raise_for_status()
        try:
            yield local_service
        finally:
            control.delete("/faults").raise_for_status()


@pytest.fixture
def start_service(
    tmp_path: object, _client_environment: None
) -> Iterator[Callable[..., launch.LocalService]]:
    """Start services of a test's own: ``start_service(max_adapters=1)``; all are ended afterwards.

    Settings that are not given: the tiny model, a store in the test's folder, faults allowed.
    """
    started: list[launch.LocalService] = []

    def start(**settings: object) -> launch.LocalService:
        defaults: dict[str, object] = {
            "store": f"{tmp_path}/store",
            "models": ("tiny",),
            "preload": ("tiny",),
            "allow_faults": True,
            "exit_with_parent": True,
        }
        service = launch.start(ServiceSettings.model_validate(defaults | settings))
        started.append(service)
        return service

    yield start
    for service in started:
        service.kill()
