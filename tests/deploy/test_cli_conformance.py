"""``gated-rl conformance``: table, record and exit status; the measuring itself is tested elsewhere."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flows.conformance
from deploy.cli import main
from deploy.local_service.launch import LocalService
from evidence.conformance import ConformanceRecord, Measurement
from tests.evidence.conformance_cases import healthy

Answering = Callable[..., None]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Answering:
    """Lets the kit come out as told: ``answering(custom_loss={"second": -10.0})``."""

    def answer(**changes: dict[str, float]) -> None:
        async def measured(*_: Any, **__: Any) -> list[Measurement]:
            return [
                dataclasses.replace(one, values={**one.values, **changes.get(one.probe, {})})
                for one in healthy()
            ]

        monkeypatch.setattr(flows.conformance, "measure", measured)

    return answer


def _asked(service: LocalService, *options: str) -> list[str]:
    return ["conformance", "--service", service.url, "--base-model", "tiny", *options]


def test_table_names_every_probe_and_a_conforming_service_exits_0(
    local_service: LocalService, answering: Answering, capsys: pytest.CaptureFixture[str]
) -> None:
    answering()

    code = main(_asked(local_service))

    out = capsys.readouterr().out
    assert code == 0
    assert f"Service  {local_service.url}, model tiny" in out
    assert "  custom_loss                  conforms     first 0.992, second -1" in out
    assert "31 conforms, 0 differs, 0 cannot tell" in out


def test_difference_that_comparisons_rely_on_exits_20_and_is_named(
    local_service: LocalService,
    answering: Answering,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    answering(custom_loss={"second": -10.0})
    file = tmp_path / "record.json"

    code = main(_asked(local_service, "--out", str(file)))

    out = capsys.readouterr().out
    assert code == 20
    assert "Looks like: negative_weights_blown_up" in out
    assert "A comparison would be refused for: custom_loss" in out
    assert ConformanceRecord.parse(file.read_bytes()).blocking == ("custom_loss",)


def test_json_is_the_record_and_what_cannot_be_told_exits_11(
    local_service: LocalService, answering: Answering, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(custom_loss={"noise": 0.5})

    code = main(_asked(local_service, "--json"))

    record = ConformanceRecord.parse(json.loads(capsys.readouterr().out))
    assert code == 11
    assert record.verdict == "cannot_tell"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--base-model", "unheard"], "--base-model"),
        (["--rank", "0"], "--rank"),
        (["--capacity-clients", "-1"], "--capacity-clients"),
        (["--out", "/no/such/folder/record.json"], "--out"),
    ],
)
def test_wrong_option_is_named_in_one_line(
    local_service: LocalService,
    answering: Answering,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    named: str,
) -> None:
    answering()

    code = main([*_asked(local_service), *options])

    assert code == 2
    assert named in capsys.readouterr().err


@pytest.mark.slow
def test_kit_is_really_asked_of_a_service(
    local_service: LocalService, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(_asked(local_service, "--rank", "4"))

    assert code == 0, capsys.readouterr().out
