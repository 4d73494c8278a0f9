"""``gated-rl report``: write the report of a run from its sealed bundle."""

import argparse

from deploy.exit_codes import ExitCode
from deploy.runs import find_run
from evidence.report import write_reports


def report(args: argparse.Namespace) -> int:
    """Render report.md and report.html, and say where they are."""
    run = find_run(args.run, run_dir=args.run_dir)
    written = write_reports(run)
    for name in filter(None, (written.html, written.markdown, written.transcripts)):
        print(f"{run.path}/{name}")
    return ExitCode.OK
