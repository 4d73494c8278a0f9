"""The pages of a run are made from its directory: gates, feasibility, curves, tables, verdict."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from evidence.gate import GateResult
from evidence.report_data import GATE_ORDER
from evidence.result import StructuredResult
from evidence.run import Run
from flows.board import Board, Links, percent_done
from flows.noticeboard import key_of
from tests.evidence.finished_run import build_finished_run, execution, spec, write_training

FILES = "http://127.0.0.1:8809"


def pages_of(run: Run, address: str | None = FILES) -> dict[str, str]:
    return {page.kind: page.markdown for page in Board(run, Links(run, address)).pages()}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(str(tmp_path), run_id="one", spec=spec(), execution=execution())


def test_new_run_has_nothing_to_show(run: Run) -> None:
    assert pages_of(run) == {}
    assert percent_done(run) == 0.0


def test_gates_are_a_table_with_reasons_and_links(run: Run) -> None:
    run.write_gate(GateResult("activation", "unverified", reasons=("no | value",)))
    run.write_gate(GateResult("spec_preflight", "passed"))

    lines = pages_of(run)["gates"].splitlines()

    assert lines[2:] == [
        f"| [spec_preflight]({FILES}/view/one/gates/spec_preflight.json) | **passed** |  |",
        f"| [activation]({FILES}/view/one/gates/activation.json) | **unverified** | no \\| value |",
    ]


def test_gate_that_was_asked_again_links_its_newest_record(run: Run) -> None:
    run.write_gate(GateResult("correctness", "unverified", reasons=("no answer",)))
    run.write_gate(GateResult("correctness", "passed"))

    assert "/gates/correctness.2.json) | **passed**" in pages_of(run)["gates"]


def test_feasibility_is_held_against_the_budget(run: Run) -> None:
    validation = {
        "status": "feasible",
        "wall_seconds": 90.0,
        "phases": {"training": {"wall_seconds": 60.0, "planned_units": 4, "gpu_hours": None}},
    }
    run.write_gate(GateResult("feasibility", "passed", validation=validation))

    page = pages_of(run)["feasibility"]

    assert "**feasible**: projected 1 min 30 s, budget 1 h 0 min." in page
    assert "| training | 1 min 0 s | 4 | not measured |" in page


def test_curves_are_pictures_that_carry_their_style(run: Run) -> None:
    write_training(run)

    page = pages_of(run)["rewards"]
    found = re.findall(r"!\[([^]]+)]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", page)

    assert [title for title, _ in found] == ["Mean reward", "Correct in training"]
    svg = ElementTree.fromstring(base64.b64decode(found[0][1]))
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert "| grpo | orange, dashed | 1 | 1 |" in page


def test_every_table_is_linked_as_a_page_and_as_it_is(run: Run) -> None:
    write_training(run, steps=1)

    page = pages_of(run)["tables"]

    path = "one/tables/updates/dppo/train/000001.parquet"
    assert f"| [dppo/train/000001]({FILES}/view/{path}) | [Parquet]({FILES}/raw/{path}) |" in page
    assert page.count("[Parquet]") == len(run.files("tables")) == 6


def test_without_a_file_server_paths_are_shown(run: Run) -> None:
    write_training(run, steps=1)

    page = pages_of(run, None)["tables"]

    assert "| `tables/updates/dppo/train/000001.parquet` |  |" in page


def test_verdict_is_shown_once_there_is_one(tmp_path: Path) -> None:
    page = pages_of(build_finished_run(tmp_path))["verdict"]

    assert page.startswith("**supported** (supported)")


def test_capacity_block_is_shown_with_its_exact_error(run: Run) -> None:
    result = StructuredResult(run)
    result.start("Started.")
    result.finish(
        status="failed",
        verdict="inconclusive",
        outcome_reason="incomplete_execution",
        summary="No capacity.",
        capacity_block={
            "error": "slots are taken",
            "comparison_steps_completed": 0,
            "released_clients": True,
        },
    )

    assert "Refused by the service: slots are taken" in pages_of(run)["verdict"]

    StructuredResult(run).start("Started again.")

    assert pages_of(run)["verdict"] == "None yet: attempt 2 is going on."


def test_progress_counts_gates_steps_and_arms(tmp_path: Path) -> None:
    """Beside the gates 2 arms of 4 steps and 1 evaluation; 1 gate and 2 x 2 steps are done."""
    made = {**execution(), "rollout_steps": 4}
    run = Run.create(str(tmp_path), run_id="one", spec=spec(), execution=made)
    run.write_gate(GateResult("correctness", "passed"))
    write_training(run)

    assert percent_done(run) == pytest.approx(100 * 5 / (len(GATE_ORDER) + 10), abs=0.05)
    assert percent_done(build_finished_run(tmp_path)) == 100.0


def test_progress_of_a_limited_run_counts_its_own_steps(tmp_path: Path) -> None:
    """Beside the gates 2 arms of 1 step and 1 evaluation; 2 units are done."""
    made = {**execution(), "rollout_steps": 4}
    run = Run.create(
        str(tmp_path), run_id="one", spec=spec(), execution=made, identity={"limit": 1}
    )
    write_training(run, steps=1)

    assert percent_done(run) == pytest.approx(100 * 2 / (len(GATE_ORDER) + 4), abs=0.05)


@pytest.mark.parametrize(
    ("run_id", "key"),
    [("tiny", "tiny"), ("tiny-1", "tiny-1"), ("Tiny", "tiny-59c93e"), ("a.b_c", "a-b-c-c8d5c0")],
)
def test_keys_hold_lowercase_letters_digits_and_dashes(run_id: str, key: str) -> None:
    assert re.fullmatch(r"[a-z0-9-]+", key_of(run_id))
    assert key_of(run_id).startswith(key.rpartition("-")[0] or key)


def test_names_that_look_alike_get_keys_of_their_own() -> None:
    assert len({key_of(name) for name in ("a.b", "a_b", "a-b", "A-B")}) == 4
