"""The bundle and the report, written when a run has ended."""

from __future__ import annotations

from evidence import report
from evidence.bundle import build_bundle
from evidence.run import Run


def write_reports(run: Run) -> None:
    """Seal the bundle and render the report from it. Safe to repeat."""
    build_bundle(run)
    report.write_reports(run)
