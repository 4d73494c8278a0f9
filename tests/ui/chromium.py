"""A headless Chromium, driven over its own debugging protocol: no driver program, no library.

with browser(folder) as page:
    page.open("http://127.0.0.1:4200")
    page.click_text("Deployments")
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
_WIDTH, _HEIGHT = 1500, 1100


def find_chromium() -> str | None:
    """The path of an installed Chromium."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. Every wait polls the page until a deadline."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._number = connection, 0

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Carry out one command of the protocol and return its result."""
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._connection.recv(timeout=60))
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def run(self, script: str) -> Any:
        """Evaluate JavaScript and return its value."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"])[:500])
        return answer["result"].get("value")

    def open(self, address: str) -> None:
        """Go to an address and wait until the document is loaded."""
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    @property
    def text(self) -> str:
        """What a person could read on the page."""
        return str(self.run("document.body ? document.body.innerText : ''"))

    @property
    def address(self) -> str:
        return str(self.run("location.href"))

    def wait(self, condition: str, *, seconds: float = 30.0) -> None:
        """Wait until a JavaScript condition holds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):
                if self.run(f"Boolean({condition})"):
                    return
            time.sleep(0.2)
        raise TimeoutError(f"{condition}\n--- the page says:\n{self.text[:3000]}")

    def wait_text(self, words: str, *, seconds: float = 30.0) -> None:
        """Wait until the page shows some words."""
        self.wait(f"document.body.innerText.includes({json.dumps(words)})", seconds=seconds)

    def click_at(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def click(self, finder: str, *, seconds: float = 30.0) -> None:
        """Click the middle of the element that a JavaScript expression finds."""
        self.wait(finder, seconds=seconds)
        x, y = self.run(
            f"(() => {{ const e = {finder}; e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.click_at(x, y)

    def click_text(self, words: str, *, tag: str = "*", seconds: float = 30.0) -> None:
        """Click the innermost element whose text is exactly these words."""
        self.click(
            f"[...document.querySelectorAll({json.dumps(tag)})].filter(e => e.offsetParent !== null"
            f" && e.innerText && e.innerText.trim() === {json.dumps(words)}).pop()",
            seconds=seconds,
        )

    def click_until(self, words: str, condition: str, *, seconds: float = 60.0) -> None:
        """Click some words until a condition holds: a page that still moves swallows clicks."""
        deadline = time.monotonic() + seconds
        while True:
            self.click_text(words)
            try:
                self.wait(condition, seconds=5.0)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
            else:
                return

    def type(self, words: str) -> None:
        """Type into whatever has the focus."""
        self.send("Input.insertText", text=words)

    def fill(self, finder: str, words: str, *, seconds: float = 30.0) -> None:
        """Replace what stands in a text field; again, if the page was not ready for it."""
        deadline = time.monotonic() + seconds
        self.wait(finder, seconds=seconds)
        while time.monotonic() < deadline:
            self.run(f"(() => {{ const e = {finder}; e.focus(); e.select(); }})()")
            self.type(words)
            time.sleep(0.3)
            if self.run(f"{finder}.value") == words:
                return
        raise TimeoutError(f"{finder} does not take {words!r}")

    def picture(self, path: Path) -> Path:
        """Write a screenshot of the window, once what fades in has done so."""
        time.sleep(1.0)
        data = self.send("Page.captureScreenshot", format="png")["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))
        return path


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a fresh Chromium, whose profile lies in a folder."""
    program = find_chromium()
    if program is None:
        raise RuntimeError("no Chromium")
    profile = folder / "profile"
    process = subprocess.Popen(
        [
            program,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-background-networking", "--disable-sync"),
            *(f"--window-size={_WIDTH},{_HEIGHT}", "--hide-scrollbars", "--mute-audio"),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        with connect(_page_socket(profile, process), max_size=None, proxy=None) as connection:
            page = Page(connection)
            page.send("Page.enable")
            yield page
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _page_socket(profile: Path, process: subprocess.Popen[bytes]) -> str:
    announced = profile / "DevToolsActivePort"
    deadline = time.monotonic() + 60.0
    with httpx.Client(trust_env=False) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"Chromium ended with status {process.returncode}")
            with contextlib.suppress(OSError, ValueError, httpx.HTTPError, StopIteration):
                port = int(announced.read_text().splitlines()[0])
                targets = client.get(f"http://127.0.0.1:{port}/json/list").json()
                return str(next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page"))
            time.sleep(0.1)
    raise RuntimeError("Chromium did not open its debugging port")
