"""A walk through the page in headless Chromium, from the run form to the verdict.

Pictures of every station are kept in the test's folder, or in the folder that the environment
variable GATED_RL_PICTURES names, to be looked at.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evidence.run import Run
from tests.ui.chromium import Page, browser, find_chromium
from tests.ui.needs import need
from tests.ui.running_ui import EXHAUSTED, RunningUi, no_capacity, running_ui

SUBMIT = "[...document.querySelectorAll('button')].find(b => b.innerText.trim() === 'Submit')"
RUN_ID_FIELD = "document.querySelectorAll('textarea')[0]"
KINDS = ("progress", "gates", "feasibility", "rewards", "tables", "verdict")


@contextmanager
def webhook() -> Iterator[tuple[str, list[str]]]:
    """An address to which notices can be sent, and what has arrived there."""
    arrived: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            arrived.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/", arrived
        server.shutdown()


def make_block(ui: RunningUi, address: str) -> None:
    """Configure a notification block, as a person does on the page's Blocks tab."""
    kind = ui.api("GET", "/block_types/slug/custom-webhook")["id"]
    query = {"block_schemas": {"block_type_id": {"any_": [kind]}}}
    schema = ui.api("POST", "/block_schemas/filter", json=query)[0]["id"]
    data = {
        "name": "team",
        "url": address,
        "method": "POST",
        "json_data": {"text": "{{subject}} | {{body}}"},
    }
    document = {"name": "team", "block_type_id": kind, "block_schema_id": schema, "data": data}
    ui.api("POST", "/block_documents/", json=document)


def choose(page: Page, value: str) -> None:
    """Choose an entry of the list that offers it."""
    offered = json.dumps(value)
    page.run(
        "(() => { const list = [...document.querySelectorAll('select')].find("
        f"one => [...one.options].some(o => o.value === {offered})); list.value = {offered};"
        "for (const kind of ['input', 'change'])"
        " list.dispatchEvent(new Event(kind, {bubbles: true})); })()"
    )


def open_form(page: Page, ui: RunningUi) -> None:
    page.open(f"{ui.page}/deployments")
    page.click(
        "[...document.querySelectorAll('a[href*=\"/deployments/deployment/\"]')]"
        ".find(link => link.innerText.trim() === 'comparison')"
    )
    page.click_text("Run")
    page.click_text("Custom run")
    page.wait_text("Name of the run.")
    page.wait("document.querySelectorAll('textarea').length >= 2")


def launch_from_form(page: Page, pictures: Path) -> str:
    """Fill in the form, first with a name that is refused; return the flow run's address."""
    page.picture(pictures / "1-form.png")
    choose(page, "tiny")
    page.fill(RUN_ID_FIELD, "../elsewhere")
    page.click(SUBMIT)
    page.wait_text("does not match")
    page.picture(pictures / "2-refused.png")
    page.fill(RUN_ID_FIELD, "walk")
    page.run(f"{SUBMIT}.click()")  # the message covers it
    link = "document.querySelector('a[href*=\"/runs/flow-run/\"]')"
    page.wait(link)
    return str(page.run(f"{link}.href"))


def open_artifact(page: Page, ui: RunningUi, flow_run: str, key: str) -> None:
    artifact = ui.artifact_ids(flow_run)[key]
    link = f"document.querySelector('a[href*=\"{artifact}\"]')"
    page.click_until("Artifacts", link)
    page.click(link)
    page.wait(f"location.href.includes({json.dumps(artifact)})")
    page.wait_text(key)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_walk_from_the_form_to_the_verdict(tmp_path: Path) -> None:
    """Launch, watch, capacity block, re-queue, verdict, artifacts, a Parquet table; notices too."""
    need(find_chromium(), "chromium (Debian's package of that name)")
    pictures = Path(os.environ.get("GATED_RL_PICTURES", tmp_path / "pictures"))
    settings = {
        "GATED_RL_PATIENCE_SECONDS": "3",
        "GATED_RL_REQUEUE_SECONDS": "15",
        "GATED_RL_NOTIFY": "custom-webhook/team",
    }
    with webhook() as (address, notices), running_ui(tmp_path, **settings) as ui:
        make_block(ui, address)
        ui.faults(no_capacity(skip=4))
        with browser(tmp_path / "browser") as page:
            open_form(page, ui)
            flow_run_page = launch_from_form(page, pictures)
            flow_run = flow_run_page.rpartition("/")[2].partition("?")[0]
            ui.await_state(flow_run, "Running")
            page.open(flow_run_page)
            page.wait_text("Task Runs")
            page.picture(pictures / "3-running.png")

            ui.await_state(flow_run, "AwaitingCapacity")
            page.open(flow_run_page)
            page.wait_text("AwaitingCapacity")
            page.picture(pictures / "4-awaiting-capacity.png")
            blocked = ui.artifacts(flow_run)
            ui.faults()

            assert ui.await_state(flow_run, "Inconclusive") == "Inconclusive"
            page.open(flow_run_page)
            page.wait_text("Inconclusive")
            page.click_until("Artifacts", "document.body.innerText.includes('walk-verdict')")
            page.picture(pictures / "5-artifacts.png")
            for kind in ("gates", "rewards", "verdict", "feasibility", "tables"):
                page.open(flow_run_page)
                open_artifact(page, ui, flow_run, f"walk-{kind}")
                page.wait_text("Show raw data")
                if kind == "rewards":
                    page.wait(
                        "[...document.images].filter(i => i.src.startsWith('data:image/svg')"
                        " && i.complete && i.naturalWidth > 0).length === 2"
                    )
                page.picture(pictures / f"6-{kind}.png")
            link = f"{ui.files}/view/walk/tables/rollouts/grpo/train/000000.parquet"
            page.wait(f"[...document.links].some(one => one.href === {json.dumps(link)})")
            page.open(link)
            page.wait_text("rows 1 to")
            page.picture(pictures / "7-table.png")
            page.open(f"{ui.page}/runs")
            page.wait_text("Inconclusive")
            page.picture(pictures / "8-runs.png")

        names = ui.state_names(flow_run)
        assert names.count("AwaitingCapacity") >= 1
        assert names[-1] == "Inconclusive"
        assert EXHAUSTED in blocked["walk-verdict"]
        shown = ui.artifacts(flow_run)
        assert set(shown) == {f"walk-{kind}" for kind in KINDS}
        assert shown["walk-progress"] == 100.0
        assert "**passed**" in shown["walk-gates"]
        linked = re.findall(r"\]\((http://[^)]+/raw/walk/[^)]+\.parquet)\)", shown["walk-tables"])
        run = Run.open(str(ui.run_dir / "walk"))
        assert len(linked) == len(run.files("tables"))
        assert all(ui.client.get(one).status_code == 200 for one in linked)
        assert any("no capacity" in told and EXHAUSTED in told for told in notices)
        assert any("walk: verdict inconclusive" in told for told in notices)
        assert len(run.events("attempt_closed")) == names.count("AwaitingCapacity") + 1
        assert ui.stop() == 0
    assert "stopping" in ui.output.read_text()
