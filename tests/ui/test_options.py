"""Options of ``gated-rl ui`` that cannot be used are refused before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.ui.addresses import choose_port
from deploy.ui.prefect_server import PrefectSettings
from evidence.errors import InputError


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--run-dir", "s3://bucket/runs"),
        ("--at-once", "0"),
        ("--port", "65536"),
        ("--files-port", "-1"),
        ("--service", "ftp://example.org"),
        ("--service", "http://user:secret@example.org"),
    ],
)
def test_option_that_cannot_be_used_is_named(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["ui", "--run-dir", str(tmp_path / "runs"), option, value])

    said = capsys.readouterr().err
    assert status == 2
    assert option in said
    assert "secret" not in said
    assert not (tmp_path / "runs").exists()


def test_port_that_was_asked_for_and_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(InputError, match="--port"):
            choose_port("--port", port, usual=4200)
        assert choose_port("--port", None, usual=port) != port


def test_free_port_is_taken_as_asked_for() -> None:
    free = choose_port("--port", 0, usual=4200)

    assert choose_port("--port", free, usual=4200) == free


def test_prefect_works_in_a_folder_of_its_own_and_calls_nobody(tmp_path: Path) -> None:
    settings = PrefectSettings(home=tmp_path, port=4242)
    found = settings.environment({"PREFECT_API_KEY": "secret", "PREFECT_PROFILE": "cloud"})

    assert "secret" not in found.values()
    assert "PREFECT_PROFILE" not in found
    assert found["PREFECT_HOME"] == str(tmp_path)
    assert found["PREFECT_API_URL"] == "http://127.0.0.1:4242/api"
    assert found["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert found["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"].endswith(".filesystem")
    assert found["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    assert found["PREFECT_SERVER_DATABASE_CONNECTION_URL"].startswith("sqlite+aiosqlite:///")


def test_database_that_was_asked_for_is_used(tmp_path: Path) -> None:
    database = "postgresql+asyncpg://prefect@127.0.0.1/prefect"
    settings = PrefectSettings(home=tmp_path, port=4242, database=database)

    assert settings.environment({})["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == database
