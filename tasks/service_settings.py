"""Where the service is, how to speak to it, and how long one call may take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evidence.canonical import loads_strict
from evidence.errors import InputError

API_KEY_ENV = "TINKER_API_KEY"
LOCAL_API_KEY = "tml-local"
"""What the embedded service takes when it was told no key of its own."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Longest wait for one call, seconds. Past it the call is abandoned, never cancelled.

    The SDK has no such setting for training, creation and polling. The first call of a cold
    service may take minutes, so the limits are generous; a service that went away is noticed by
    the watch (`watch_every`, `watch_dead`) much earlier.
    """

    reach: float = 25.0
    create: float = 600.0
    train: float = 900.0
    decide: float = 120.0
    """For scoring a batch again to find out whether a step landed."""
    save: float = 600.0
    sample: float = 1200.0
    sample_progress: float = 300.0
    """No sample of the same policy finished for this long: the service is stuck."""
    close: float = 5.0
    watch_every: float = 5.0
    watch_dead: float = 20.0
    """Unreachable for this long while a call is pending: the call is abandoned."""


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """One Tinker-compatible service.

    Secrets are named, not held: `api_key_env` and the values of `header_env` are names of
    environment variables, read when a client is opened, and never written anywhere.
    """

    url: str
    api_key_env: str = API_KEY_ENV
    header_env: Mapping[str, str] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        expected = "an http(s) URL such as http://127.0.0.1:8000"
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # brackets that do not close, a port that is no number
            raise InputError("--service", self.url, expected) from None
        if not usable:
            raise InputError("--service", self.url, expected)
        if parts.username or parts.password:
            raise InputError("--service", parts.hostname, "a URL without credentials in it")

    @property
    def is_loopback(self) -> bool:
        """Whether the service runs on this machine."""
        return urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")

    def api_key(self) -> str:
        """The key from the environment; on loopback a default, as the embedded service takes.

        Raises:
            InputError: if the variable is not set and the service is not on this machine.
        """
        key = os.environ.get(self.api_key_env)
        if key:
            return key
        if self.is_loopback:
            return LOCAL_API_KEY
        raise InputError(self.api_key_env, None, "an environment variable that holds the API key")

    def headers(self) -> dict[str, str]:
        """The extra headers, values read from the environment.

        Raises:
            InputError: if a named variable is not set.
        """
        found = {}
        for header, variable in self.header_env.items():
            value = os.environ.get(variable)
            if not value:
                raise InputError(variable, None, f"an environment variable for header {header}")
            found[header] = value
        return found

    def describe(self) -> dict[str, Any]:
        """What a record may say about the service: names of variables, never their values."""
        return {
            "url": self.url,
            "api_key_env": self.api_key_env,
            # As pairs: what looks like a header with a value would be taken for a secret.
            "header_env": [
                {"header": header, "variable": variable}
                for header, variable in self.header_env.items()
            ],
        }


def load_service_profile(path: Path | str) -> ServiceSettings:
    """Read a service profile: ``{"url", "api_key_env"?, "header_env"?, "deadlines"?}``.

    Raises:
        InputError: if the file cannot be read or holds an unknown field.
    """
    where = str(path)
    try:
        raw = loads_strict(Path(path).read_bytes(), where=where)
    except OSError as error:
        raise InputError("service profile", where, f"a readable file ({error})") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("url"), str):
        raise InputError("url", raw, "an object with a url", where=where)
    known = {"url", "api_key_env", "header_env", "deadlines"}
    for name in raw:
        if name not in known:
            raise InputError(name, raw[name], f"one of {', '.join(sorted(known))}", where=where)
    _check_profile(raw, where=where)
    try:
        deadlines = Deadlines(**raw.pop("deadlines", {}))
        return ServiceSettings(deadlines=deadlines, **raw)
    except TypeError as error:
        raise InputError("service profile", where, f"known fields ({error})") from None


def _check_profile(raw: Mapping[str, Any], *, where: str) -> None:
    """Refuse fields of a wrong form; the message names the first one."""
    headers, deadlines = raw.get("header_env", {}), raw.get("deadlines", {})
    if not isinstance(raw.get("api_key_env", ""), str):
        expected = "the name of an environment variable"
        raise InputError("api_key_env", raw["api_key_env"], expected, where=where)
    if not isinstance(headers, dict) or not all(isinstance(v, str) for v in headers.values()):
        expected = "an object: header to the name of an environment variable"
        raise InputError("header_env", headers, expected, where=where)
    if not isinstance(deadlines, dict):
        raise InputError("deadlines", deadlines, "an object: name to seconds", where=where)
    for name, seconds in deadlines.items():
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not number or seconds <= 0:
            raise InputError(f"deadlines.{name}", seconds, "seconds above 0", where=where)


def quiet_sdk(settings: ServiceSettings) -> None:
    """Set the environment that the SDK reads when a client is opened.

    Telemetry is off: with it every final error waits up to 30 s for a flush, and its records hold
    request headers. A service on this machine is never asked through a proxy.
    """
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    if settings.is_loopback:
        for name in ("NO_PROXY", "no_proxy"):
            listed = [part for part in os.environ.get(name, "").split(",") if part]
            for host in ("127.0.0.1", "localhost"):
                if host not in listed:
                    listed.append(host)
            os.environ[name] = ",".join(listed)
