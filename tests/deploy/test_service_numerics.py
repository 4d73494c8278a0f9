"""What the service finds out about a base model when it loads it."""

import logging

import pytest

from deploy.local_service import numerics
from deploy.local_service.numerics import TorchNumerics
from deploy.local_service.settings import ServiceSettings


@pytest.fixture
def loaded(tmp_path):
    return lambda: TorchNumerics(ServiceSettings(store=tmp_path)).load_base("tiny")


def test_repeatable_machine_has_nothing_to_say(loaded, caplog):
    with caplog.at_level(logging.WARNING):
        assert loaded().not_repeatable == ()
    assert caplog.messages == []


def test_results_that_depend_on_company_are_told(loaded, monkeypatch, caplog):
    monkeypatch.setattr(numerics, "find_differences", lambda base: ["head: a row differs"])
    with caplog.at_level(logging.WARNING):
        assert loaded().not_repeatable == ("head: a row differs",)
    (message,) = caplog.messages
    assert message == (
        "tiny: results may not repeat bit for bit on this machine: head: a row differs"
    )
