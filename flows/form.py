"""What the run form offers: names to choose from, and the form that free text must have.

The names are those of the folders at import, so a deployment shows what was there when it was
made. What stands here ends up in the JSON schema of a flow's parameters: a value that does not fit
is refused by the form, the command line and the server before a run is made.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from evidence.errors import InputError
from flows.catalog import shipped_profiles, shipped_specs
from flows.plan import ACCEPTABLE_GATES
from tasks.service_settings import ServiceSettings, load_service_profile

LOCAL = "local"
"""Stands for the embedded service of whoever started the worker."""
LOCAL_SERVICE_VARIABLE = "GATED_RL_LOCAL_SERVICE"
"""Environment variable with the embedded service's address."""
AS_WRITTEN = "as-written"
"""Stands for no profile: the spec is carried out as it was registered."""

if TYPE_CHECKING:  # a type checker cannot follow names that are read from a folder
    SpecName = str
    ProfileName = str
    GateName = str
else:

    def _choice(name: str, values: Sequence[str]) -> type[Enum]:
        return Enum(name, {value: value for value in values}, type=str)

    SpecName = _choice("SpecName", shipped_specs())
    ProfileName = _choice("ProfileName", [AS_WRITTEN, *shipped_profiles()])
    GateName = _choice("GateName", ACCEPTABLE_GATES)

RunId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
ServiceAddress = Annotated[str, Field(pattern=r"^(local|https?://[^\s@/?#]+(/[^\s@?#]*)?)$")]
"""``local``, or an address without credentials in it."""
StepLimit = Annotated[int, Field(ge=1)]


def text_of(choice: str) -> str:
    """The plain text of a choice, which Prefect hands over as an enumeration's member."""
    return str(choice.value) if isinstance(choice, Enum) else choice


def service_from(address: str, profile: str | None) -> ServiceSettings:
    """The service that a form names.

    Args:
        address: ``local`` or a URL.
        profile: path of a service profile; its address counts instead.

    Raises:
        InputError: if there is no embedded service here, or the profile cannot be used.
    """
    if profile is not None:
        return load_service_profile(profile)
    if address != LOCAL:
        return ServiceSettings(url=address)
    found = os.environ.get(LOCAL_SERVICE_VARIABLE)
    if not found:
        expected = f"an address, or {LOCAL_SERVICE_VARIABLE} set where the run is carried out"
        raise InputError("service", LOCAL, expected)
    return ServiceSettings(url=found)
