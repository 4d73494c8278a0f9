"""A read-only file server over a folder of runs, for links from the Prefect page.

``/`` lists the runs, ``/view/RUN/`` a run's files, ``/view/RUN/PATH`` shows a file as a page (a
Parquet table as a table), ``/raw/RUN/PATH`` gives its bytes. It listens on this machine alone,
answers GET and HEAD, and serves nothing but files of run directories: no hidden ones, no links, no
way up. A request that names another host is refused, so that no web page can read through it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from deploy.ui import pages
from deploy.ui.addresses import HOST
from evidence.errors import InputError
from evidence.run import Run

ROWS_PER_PAGE = 200
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".jsonl": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".parquet": "application/vnd.apache.parquet",
}
_HTML = "text/html; charset=utf-8"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox allow-popups"
_HOSTS = ("127.0.0.1", "localhost", "[::1]")


class Refused(Exception):
    """A request that is not answered with content."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        self.status, self.words = status, words
        super().__init__(words)


class RunsOnDisk:
    """Answers requests for files below a folder of runs.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def answer(self, target: str) -> tuple[str, bytes]:
        """Return the content type and the bytes for a request's target.

        Raises:
            Refused: if there is nothing to serve under it.
        """
        parts = urlsplit(target)
        segments = unquote(parts.path).split("/")[1:]
        if segments == [""]:
            return _HTML, pages.runs_page(self._run_ids()).encode()
        how, rest = segments[0], segments[1:]
        if how not in ("view", "raw") or len(rest) < 2:
            raise Refused(HTTPStatus.NOT_FOUND, "There is nothing here.")
        run, path = self._run(rest[0]), "/".join(rest[1:])
        if how == "view" and not path:
            return _HTML, pages.files_page(rest[0], _sizes(run)).encode()
        data = _read(run, path)
        if how == "raw":
            return _TYPES.get(Path(path).suffix, "application/octet-stream"), data
        if path.endswith(".parquet"):
            return _HTML, _table(run, path, first=_first_row(parts.query)).encode()
        return _HTML, pages.text_page(run.run_id, path, data).encode()

    def _run_ids(self) -> list[str]:
        found = self._root.glob("*/identity.json") if self._root.is_dir() else ()
        return sorted(path.parent.name for path in found if not path.parent.is_symlink())

    def _run(self, run_id: str) -> Run:
        if run_id not in self._run_ids():
            raise Refused(HTTPStatus.NOT_FOUND, "There is no such run.")
        try:
            return Run.open(str(self._root / run_id))
        except InputError as error:
            raise Refused(HTTPStatus.CONFLICT, str(error)) from error


def _read(run: Run, path: str) -> bytes:
    """The bytes of a file of a run; whatever is not one of its listed files is not there."""
    if any(part in ("", ".", "..") or part.startswith(".") for part in path.split("/")):
        raise Refused(HTTPStatus.NOT_FOUND, "There is no such file.")
    try:
        return run.read_bytes(path)
    except InputError as error:
        raise Refused(HTTPStatus.NOT_FOUND, "There is no such file.") from error


def _sizes(run: Run) -> dict[str, int | None]:
    top = Path(run.path)
    return {
        path: (top / path).stat().st_size if (top / path).is_file() else None
        for path in run.files()
    }


def _first_row(query: str) -> int:
    given = parse_qs(query).get("first", ["0"])[0]
    return int(given) if given.isdecimal() and len(given) <= 12 else 0


def _table(run: Run, path: str, *, first: int) -> str:
    try:
        table = run.read_arrow_at(path)
    except InputError as error:
        raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
    shown = table.slice(first, ROWS_PER_PAGE)
    columns = [(field.name, str(field.type)) for field in table.schema]
    rows = zip(*(column.to_pylist() for column in shown.columns), strict=True)
    return pages.table_page(
        run.run_id,
        path,
        columns=columns,
        rows=rows,
        first=first,
        total=table.num_rows,
        per_page=ROWS_PER_PAGE,
    )


class _Handler(BaseHTTPRequestHandler):
    server_version = "gated-rl"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30
    runs: RunsOnDisk

    def do_GET(self) -> None:
        """Answer with a file or a page."""
        self._answer()

    def do_HEAD(self) -> None:
        """Answer as GET does, without the bytes."""
        self._answer()

    def _answer(self) -> None:
        try:
            host = self.headers.get("Host", "").rpartition(":")
            if (host[0] or host[2]) not in _HOSTS:
                raise Refused(HTTPStatus.FORBIDDEN, "This server answers on this machine alone.")
            kind, data = self.runs.answer(self.path)
            status = HTTPStatus.OK
        except Refused as refusal:
            status, kind = refusal.status, _HTML
            data = pages.refusal_page(refusal.status, refusal.words).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            "Content-Security-Policy": _POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line per request."""


@contextmanager
def serving(root: Path, *, port: int = 0) -> Iterator[str]:
    """Serve a folder of runs for the length of a block.

    Args:
        root: the folder; it need not exist yet.
        port: where to listen on this machine; 0 takes a free one.

    Yields:
        The address.
    """
    handler = type("Handler", (_Handler,), {"runs": RunsOnDisk(root)})
    with ThreadingHTTPServer((HOST, port), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, name="files", daemon=True)
        thread.start()
        try:
            yield f"http://{HOST}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
