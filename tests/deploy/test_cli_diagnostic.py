"""``diagnose`` and ``investigate`` on the command line: one line and an exit status each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.cli import main
from flows.catalog import SPECS_DIR, shipped_specs
from tests.tasks.recorded_runs import DPPO, Plant, write_run


@pytest.mark.parametrize(
    ("plant", "status", "cause"),
    [
        (Plant(drift_nats=0.8), 0, "mask_active"),
        (Plant(drift_nats=0.01), 0, "drift_within_threshold"),
        (Plant(trainer_shift=1), 20, "logprobs_off_by_one"),
        (Plant(loss={**DPPO, "delta_low": 150.0, "delta_high": 150.0}), 20, "delta_too_large"),
        (Plant(updates=3), 11, "incomplete_records"),
    ],
)
def test_investigate_says_the_cause_in_its_status(
    plant: Plant, status: int, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, plant)

    assert main(["investigate", "recorded", "--run-dir", str(tmp_path)]) == status

    assert cause in capsys.readouterr().out.splitlines()[0]


def test_investigate_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    run = write_run(tmp_path, Plant())
    before = {path: run.read_bytes(path) for path in run.files()}

    main(["investigate", run.path, "--json"])

    assert {path: run.read_bytes(path) for path in run.files()} == before


def test_investigate_of_no_run_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["investigate", "nothing-here"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_damaged_table_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, Plant(updates=1))
    file = Path(run.path) / "tables/updates/dppo/diagnostic/000000.parquet"
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:100])

    assert main(["investigate", run.path]) == 2
    error = capsys.readouterr().err
    assert "a whole Parquet file" in error
    assert error.count("\n") == 1


def diagnose(folder: Path, settings: dict[str, object]) -> int:
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    nobody = "http://127.0.0.1:9"
    arguments = ["--settings", str(path), "--service", nobody, "--run-dir", str(folder)]
    return main(["diagnose", "tiny", *arguments])


def shipped_settings() -> dict[str, object]:
    return dict(json.loads((SPECS_DIR / "tiny.diagnostic.json").read_text()))


def test_diagnose_checks_the_budget_before_it_asks_anybody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The spec allows 10 minutes; 10 are used. Nobody listens at the address, which is not tried."""
    settings = shipped_settings() | {"budget_used": {"wall_minutes": 10.0}}

    assert diagnose(tmp_path, settings) == 20
    assert "nothing is left of the budget" in capsys.readouterr().err


def test_diagnose_refuses_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose(tmp_path, shipped_settings() | {"learning_rate": 1e-3}) == 2
    assert "learning_rate" in capsys.readouterr().err


def test_settings_files_are_no_specs() -> None:
    assert not [name for name in shipped_specs() if "diagnostic" in name]
