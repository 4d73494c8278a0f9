"""The log of requests says what arrived, and nothing of what was in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.local_service.request_log import RequestLog, read_request_log

pytestmark = pytest.mark.anyio


async def _sent(log: RequestLog, path: str, body: bytes) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        del message

    await log({"type": "http", "path": f"/api/v1/{path}"}, receive, send)


async def test_log_tells_samples_apart_and_leaves_prompts_out(tmp_path: Path) -> None:
    """Polls are not logged; a body that is no JSON leaves time and path alone."""
    bodies = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        bodies.append((await receive())["body"])

    path = tmp_path / "deep" / "requests.jsonl"
    log = RequestLog(app, path)
    sample = {
        "sampling_session_id": "S:sample:0",
        "seq_id": 3,
        "prompt": {"chunks": [{"tokens": [424242]}]},
        "sampling_params": {"seed": 7},
    }
    await _sent(log, "asample", json.dumps(sample).encode())
    await _sent(log, "retrieve_future", b"{}")
    await _sent(log, "forward_backward", b"\x0a\xff\x00")

    lines = read_request_log(path)

    assert bodies == [json.dumps(sample).encode(), b"{}", b"\x0a\xff\x00"]
    assert [{**line, "at": 0} for line in lines] == [
        {"at": 0, "path": "asample", "seq_id": 3, "owner": "S:sample:0", "seed": 7},
        {"at": 0, "path": "forward_backward"},
    ]
    assert "424242" not in path.read_text()


def test_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"at": 1.0, "path": "asample"}\n{"at": 2.0, "pa')

    assert read_request_log(path) == [{"at": 1.0, "path": "asample"}]
    assert read_request_log(tmp_path / "none") == []
