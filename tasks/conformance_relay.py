"""A relay on this machine between the client and a service, which sends chosen requests twice.

It does what a client does when the answer to a request was lost: the same bytes go out again. The
client is given an answer of 200 if there was one, so that it goes on as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

import httpx

from tasks.service_settings import ServiceSettings

_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"}
)
_SECONDS = 120.0


class Relay:
    """Forwards everything to a service; use as an asynchronous context manager.

    Attributes:
        repeats: requests that were sent twice.
        refused: of these, those whose second answer was no success.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self._target = settings.url.rstrip("/")
        self._client = httpx.Client(
            timeout=_SECONDS,
            verify=self._target.startswith("https://"),
            trust_env=not settings.is_loopback,
        )
        self._pending: set[str] = set()
        self._lock = threading.Lock()
        self.repeats = self.refused = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """Where the relay listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def twice(self, *calls: str) -> None:
        """Send the next request of each of these calls twice."""
        with self._lock:
            self._pending.update(calls)

    async def __aenter__(self) -> Relay:
        """Start to listen."""
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop to listen."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        self._client.close()

    def forward(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> httpx.Response:
        """Send a request on, twice if its turn has come."""
        kept = [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
        first = self._send(method, path, kept, body)
        if not self._due(path):
            return first
        second = self._send(method, path, kept, body)
        with self._lock:
            self.repeats += 1
            self.refused += not second.is_success
        return second if second.is_success else first

    def _due(self, path: str) -> bool:
        call = path.partition("?")[0].rpartition("/")[2]
        with self._lock:
            if call not in self._pending:
                return False
            self._pending.remove(call)
            return True

    def _send(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> httpx.Response:
        with self._client.stream(
            method, self._target + path, headers=headers, content=body
        ) as answer:
            raw = b"".join(answer.iter_raw())
            return httpx.Response(
                answer.status_code, headers=answer.headers, stream=httpx.ByteStream(raw)
            )


def _handler(relay: Relay) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self._body()
            try:
                answer = relay.forward(self.command, self.path, self.headers.items(), body)
            except httpx.HTTPError as error:
                self.send_error(502, type(error).__name__)
                return
            raw = b"".join(answer.stream)  # type: ignore[arg-type]  # made of bytes above
            self.send_response(answer.status_code)
            for name, value in answer.headers.multi_items():
                if name.lower() not in _HOP_BY_HOP | {"content-length"}:
                    self.send_header(name, value)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = do_PUT = do_DELETE = _pass_on

        def _body(self) -> bytes:
            if "chunked" in self.headers.get("transfer-encoding", "").lower():
                return b"".join(self._chunks())
            return self.rfile.read(int(self.headers.get("content-length") or 0))

        def _chunks(self) -> list[bytes]:
            found = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                found.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return found

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    return Handler
