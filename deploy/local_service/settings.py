"""What the embedded service can be told when it starts."""

from __future__ import annotations

import argparse
import ipaddress
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

SERVED_MODELS = ("HuggingFaceTB/SmolLM2-135M-Instruct", "tiny")


def is_loopback(host: str) -> bool:
    """Say whether an address is reachable from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ServiceSettings(BaseModel):
    """Address, store, models and limits of one embedded service."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    """Loopback only, unless another address is given together with an API key."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free port; it is written to `ready_file`."""
    store: Path = Path("runs/local-service")
    """Folder of checkpoints, run records and the journal of applied requests."""
    cache_dir: Path | None = None
    """Where base models are kept; None for the user's cache folder."""
    models: tuple[str, ...] = SERVED_MODELS
    """Base models by name; one is loaded when it is first used."""
    preload: tuple[str, ...] = ()
    """Models to load before the service answers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the base weights; bfloat16 keeps a float32 residual stream and float32 logits."""
    threads: int = Field(default=1, ge=1, le=64)
    """Torch threads. Two collapse when something else is busy on the machine."""
    api_key: str | None = Field(default=None, min_length=8, repr=False)
    """If set, requests without it get 401. The Tinker SDK wants keys that start with ``tml-``."""
    max_adapters: int = Field(default=32, ge=1)
    """Live training models; one more gets the capacity answer."""
    max_queue: int = Field(default=4096, ge=1)
    """Requests accepted and not yet finished; one more gets the capacity answer."""
    capacity_status: Literal[429, 503] = 429
    """Status of the capacity answer (sampling always gets 429, which its clients wait out)."""
    retry_after_seconds: float | None = Field(default=5.0, gt=0)
    """``Retry-After`` of the capacity answer."""
    max_merged: int = Field(default=3, ge=1)
    """Sampler weight sets kept merged in memory; the least recently used one is dropped."""
    max_rows: int = Field(default=64, ge=1)
    """Sequences sampled at once."""
    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """Largest request body, after decompression."""
    long_poll_seconds: float = Field(default=20.0, gt=0, lt=45)
    """How long a poll is held before 408; clients give up on one after 45 s."""
    result_ttl_seconds: float = Field(default=3600.0, gt=0)
    """How long a finished result can be asked for."""
    session_timeout_seconds: float = Field(default=300.0, gt=0)
    """A session without heartbeat or request for so long is ended and its memory released."""
    allow_faults: bool = False
    """Open the endpoint that makes the service misbehave."""
    faults: tuple[str, ...] = ()
    """Named semantic faults switched on from the start; needs `allow_faults`."""
    ready_file: Path | None = None
    """Written once the service answers: ``{"url", "host", "port", "pid"}``."""
    request_log: Path | None = None
    """File to which a line about every request that arrives is added."""
    exit_with_parent: bool = False
    """Stop when the process that started this one is gone."""
    lock_wait_seconds: float = Field(default=30.0, ge=0)
    """How long to wait for a service that still holds the store."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not is_loopback(self.host) and self.api_key is None:
            raise ValueError(
                f"host {self.host}: not a loopback address, expected an API key with it"
            )
        if self.faults and not self.allow_faults:
            raise ValueError(f"faults {list(self.faults)}: given without allow_faults")
        unknown = [name for name in self.preload if name not in self.models]
        if unknown:
            raise ValueError(f"preload {unknown}: not among the served models {list(self.models)}")
        return self


_PLAIN_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("host", str, "address to listen on (another than loopback needs --api-key)"),
    ("port", int, "port to listen on; 0 takes a free one"),
    ("store", Path, "folder of checkpoints and of the journal"),
    ("cache-dir", Path, "folder of base models"),
    ("dtype", str, "float32, or bfloat16 with float32 residual stream and logits"),
    ("threads", int, "torch threads"),
    ("api-key", str, "key that every request must carry"),
    ("max-adapters", int, "live training models"),
    ("max-queue", int, "requests accepted and not yet finished"),
    ("capacity-status", int, "status of the capacity answer, 429 or 503"),
    ("retry-after-seconds", float, "Retry-After of the capacity answer"),
    ("max-merged", int, "sampler weight sets kept in memory"),
    ("max-rows", int, "sequences sampled at once"),
    ("max-body-bytes", int, "largest request body"),
    ("long-poll-seconds", float, "how long a poll is held"),
    ("result-ttl-seconds", float, "how long a result is kept"),
    ("session-timeout-seconds", float, "silence after which a session ends"),
    ("lock-wait-seconds", float, "how long to wait for the store's lock"),
    ("ready-file", Path, "file written once the service answers"),
    ("request-log", Path, "file to which a line about every request is added"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one option per setting; an option that is not given keeps the setting's default."""
    fields = ServiceSettings.model_fields
    for option, kind, text in _PLAIN_OPTIONS:
        default = fields[option.replace("-", "_")].default
        parser.add_argument(
            f"--{option}", type=kind, default=argparse.SUPPRESS, help=f"{text} (default: {default})"
        )
    for option, text in (
        ("--models", "base models to serve (default: all)"),
        ("--preload", "base models to load before answering (default: none)"),
        ("--faults", "semantic faults to switch on from the start; needs --allow-faults"),
    ):
        parser.add_argument(option, nargs="*", default=argparse.SUPPRESS, help=text)
    for option, text in (
        ("--allow-faults", "let POST /api/v1/local/faults make the service misbehave (tests)"),
        ("--exit-with-parent", "stop when the starting process is gone"),
    ):
        parser.add_argument(option, action="store_true", default=argparse.SUPPRESS, help=text)


def from_arguments(arguments: argparse.Namespace) -> ServiceSettings:
    """Return the settings that parsed options ask for; other attributes are ignored.

    Raises:
        pydantic.ValidationError: if a value is out of its range.
    """
    given = {
        name: value
        for name, value in vars(arguments).items()
        if name in ServiceSettings.model_fields
    }
    return ServiceSettings.model_validate(given)


def to_arguments(settings: ServiceSettings) -> list[str]:
    """Return the command-line options that give these settings (the API key left out)."""
    options: list[str] = []
    for name, field in ServiceSettings.model_fields.items():
        value = getattr(settings, name)
        if name == "api_key" or value == field.default:
            continue
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            options += [option] if value else []
        elif isinstance(value, tuple):
            options += [option, *value]
        elif value is not None:
            options += [option, str(value)]
    return options
