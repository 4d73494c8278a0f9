"""The file server gives files of run directories, and nothing else, to this machine alone."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.ui import file_server
from evidence.run import Run
from tests.evidence.finished_run import execution, spec, write_training

ROLLOUT = "tables/rollouts/grpo/train/000000.parquet"
UPDATE = "tables/updates/grpo/train/000002.parquet"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run with tables, a secret beside it, and a link that leads to the secret."""
    folder = tmp_path_factory.mktemp("served")
    run = Run.create(str(folder), run_id="one", spec=spec(), execution=execution())
    write_training(run)
    run.write_bytes("files/note.txt", b"<script>alert(1)</script>\nsecond line")
    (folder / "secret.txt").write_text("secret")
    (folder / ".prefect").mkdir()
    (folder / ".prefect" / "prefect.db").write_text("secret")
    (folder / "one" / ".run.lock").write_text("secret")
    (folder / "one" / "link.txt").symlink_to(folder / "secret.txt")
    (folder / "two").symlink_to(folder / "one")
    return folder


@pytest.fixture(scope="module")
def port(root: Path) -> Iterator[int]:
    with file_server.serving(root) as address:
        yield int(address.rpartition(":")[2])


def ask(port: int, target: str, *, method: str = "GET", host: str | None = None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.putrequest(method, target, skip_host=host is not None)
        if host is not None:
            connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def test_table_is_shown_as_a_page_and_given_as_it_is(port: int, root: Path) -> None:
    status, headers, page = ask(port, f"/view/one/{ROLLOUT}")
    raw_status, raw_headers, raw = ask(port, f"/raw/one/{ROLLOUT}")

    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"rows 1 to 4 of 4" in page
    assert b"completion_text" in page
    assert f'href="/raw/one/{ROLLOUT}"'.encode() in page
    assert (raw_status, raw_headers["Content-Type"]) == (200, "application/vnd.apache.parquet")
    assert raw == (root / "one" / ROLLOUT).read_bytes()


def test_values_that_are_not_finite_and_null_are_named(port: int) -> None:
    page = ask(port, f"/view/one/{UPDATE}")[2]

    assert b"<td>inf</td>" in page
    assert b'<span class="muted">null</span>' in page


def test_long_table_is_shown_in_parts(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_server, "ROWS_PER_PAGE", 3)

    first = ask(port, f"/view/one/{ROLLOUT}")[2]
    second = ask(port, f"/view/one/{ROLLOUT}?first=3")[2]

    assert b"rows 1 to 3 of 4" in first
    assert b"first=3" in first
    assert b"rows 4 to 4 of 4" in second
    assert b"first=0" in second


def test_runs_and_files_are_listed_without_hidden_ones_and_links(port: int) -> None:
    runs = ask(port, "/")[2]
    files = ask(port, "/view/one/")[2]

    assert b"/view/one/" in runs
    assert b"two" not in runs
    assert b"prefect" not in runs
    assert ROLLOUT.encode() in files
    assert b".lock" not in files


def test_text_is_shown_as_text(port: int) -> None:
    page = ask(port, "/view/one/files/note.txt")[2]

    assert b"&lt;script&gt;alert(1)&lt;/script&gt;\nsecond line" in page


@pytest.mark.parametrize(
    "target",
    [
        "/raw/one/../secret.txt",
        "/raw/one/%2e%2e/secret.txt",
        "/raw/one/..%2fsecret.txt",
        "/raw/../secret.txt",
        "/raw/%2e%2e/%2e%2e/etc/passwd",
        "/raw/one//etc/passwd",
        "/raw/one/tables/../../secret.txt",
        "/raw/one/link.txt",
        "/raw/two/spec.json",
        "/raw/.prefect/prefect.db",
        "/raw/one/.run.lock",
        "/raw/one/",
        "/raw/one/tables",
        "/raw/one/no-such-file",
        "/raw/secret.txt",
        "/secret.txt",
        "/view",
        "/view/none/",
        "/raw/one/%00",
        "/raw/one/spec.json%00.parquet",
    ],
)
def test_nothing_outside_a_run_is_served(port: int, target: str) -> None:
    status, _, body = ask(port, target)

    assert status == 404
    assert b"secret\n" not in body + b"\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_answered(port: int, method: str) -> None:
    assert ask(port, "/view/one/", method=method)[0] == 501


def test_head_is_answered_without_the_bytes(port: int, root: Path) -> None:
    status, headers, body = ask(port, f"/raw/one/{ROLLOUT}", method="HEAD")

    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) == (root / "one" / ROLLOUT).stat().st_size


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("example.org", 403),
        ("example.org:80", 403),
        ("", 403),
    ],
)
def test_another_host_is_refused(port: int, host: str, status: int) -> None:
    """A web page that has its own name resolve to this machine must not read through it."""
    assert ask(port, "/", host=host)[0] == status


def test_pages_may_load_and_run_nothing(port: int) -> None:
    headers = ask(port, "/view/one/files/note.txt")[1]

    assert headers["Content-Security-Policy"].startswith("default-src 'none'; ")
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_broken_table_is_named(port: int, root: Path) -> None:
    broken = root / "one" / "tables" / "rollouts" / "grpo" / "train" / "000099.parquet"
    broken.write_bytes(b"PAR1")

    assert ask(port, "/view/one/tables/rollouts/grpo/train/000099.parquet")[0] == 422
