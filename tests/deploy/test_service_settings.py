"""Settings and their command line."""

import argparse
from pathlib import Path

import pytest
from pydantic import ValidationError

from deploy.local_service.settings import (
    ServiceSettings,
    add_arguments,
    from_arguments,
    to_arguments,
)


def parsed(arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(arguments))


def test_options_give_back_the_settings_they_were_made_from():
    """What `launch` passes to the process is what was asked for."""
    settings = ServiceSettings(
        port=8123,
        store=Path("somewhere"),
        models=("tiny",),
        preload=("tiny",),
        threads=2,
        max_adapters=3,
        capacity_status=503,
        allow_faults=True,
        faults=("ignored_seed",),
        exit_with_parent=True,
    )

    assert parsed(to_arguments(settings)) == settings


def test_defaults_need_no_options():
    """No options: loopback, faults closed, float32."""
    settings = parsed([])

    assert settings == ServiceSettings()
    assert (settings.host, settings.allow_faults, settings.dtype) == ("127.0.0.1", False, "float32")


def test_key_is_not_put_on_a_command_line():
    """Other users of the machine can read command lines."""
    assert "tml-secret-key" not in to_arguments(ServiceSettings(api_key="tml-secret-key"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"host": "0.0.0.0"}, "expected an API key"),
        ({"faults": ["ignored_seed"]}, "without allow_faults"),
        ({"preload": ["tiny"], "models": ["other"]}, "not among the served models"),
        ({"long_poll_seconds": 45}, "less than 45"),
        ({"capacity_status": 500}, "429"),
    ],
)
def test_unsafe_or_impossible_settings_are_refused(values, message):
    """Each is refused with what is wrong."""
    with pytest.raises(ValidationError, match=message):
        ServiceSettings.model_validate(values)
