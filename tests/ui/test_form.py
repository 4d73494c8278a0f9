"""The run form offers names, explains every field, and refuses wrong values by its schema alone."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from prefect.utilities.callables import parameter_schema

from evidence.errors import InputError
from flows.catalog import shipped_specs
from flows.comparison import comparison
from flows.diagnostic import diagnostic
from flows.form import LOCAL_SERVICE_VARIABLE, service_from

RIGHT = {"spec": "tiny", "run_id": "a-1", "service": "local"}


def schema_of(flow: Any) -> dict[str, Any]:
    return dict(parameter_schema(flow).model_dump())


@pytest.mark.parametrize("flow", [comparison, diagnostic])
def test_every_field_has_help(flow: Any) -> None:
    for name, field in schema_of(flow)["properties"].items():
        assert len(field["description"]) > 20, name


@pytest.mark.parametrize("flow", [comparison, diagnostic])
def test_spec_and_profile_are_chosen_by_name(flow: Any) -> None:
    schema = schema_of(flow)

    assert schema["required"] == ["spec", "run_id"]
    assert schema["definitions"]["SpecName"]["enum"] == shipped_specs()
    assert schema["definitions"]["ProfileName"]["enum"] == ["as-written", "laptop"]


@pytest.mark.parametrize(
    "service",
    ["local", "http://127.0.0.1:8808", "https://example.org/tinker/v1", "http://[::1]:8000"],
)
def test_right_values_are_accepted(service: str) -> None:
    jsonschema.validate({**RIGHT, "service": service}, schema_of(comparison))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spec", "no-such-spec"),
        ("run_id", ""),
        ("run_id", "../elsewhere"),
        ("run_id", ".hidden"),
        ("run_id", "a" * 129),
        ("service", "ftp://example.org"),
        ("service", "127.0.0.1:8808"),
        ("service", "http://user:password@example.org"),
        ("service", "http://example.org?key=secret"),
        ("service", ""),
        ("profile", "huge"),
        ("limit", 0),
        ("limit", "two"),
        ("accept_unverified", ["spec_preflight"]),
    ],
)
def test_wrong_values_are_refused_before_a_run_is_made(field: str, value: object) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**RIGHT, field: value}, schema_of(comparison))


def test_local_stands_for_the_embedded_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCAL_SERVICE_VARIABLE, "http://127.0.0.1:9")

    assert service_from("local", None).url == "http://127.0.0.1:9"
    assert service_from("http://127.0.0.1:8", None).url == "http://127.0.0.1:8"


def test_local_is_refused_where_no_service_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOCAL_SERVICE_VARIABLE, raising=False)

    with pytest.raises(InputError, match=LOCAL_SERVICE_VARIABLE):
        service_from("local", None)
