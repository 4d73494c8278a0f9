"""``gated-rl status``: the runs on this machine and how far each is."""

import argparse
import json

from deploy.exit_codes import ExitCode
from deploy.runs import RunState, describe, find_run, list_runs


def status(args: argparse.Namespace) -> int:
    """Print one run in full, or one line for each run."""
    runs = [find_run(args.run, run_dir=args.run_dir)] if args.run else list_runs(args.run_dir)
    states = [describe(run) for run in runs]
    if args.json:
        records = [state.to_record() for state in states]
        print(json.dumps(records, indent=2, ensure_ascii=True, allow_nan=False))
    elif args.run:
        print("\n".join(_in_full(states[0])))
    elif not states:
        print(f"No runs in {args.run_dir}. Start one with: gated-rl run arithmetic")
    else:
        for state in states:
            verdict = state.verdict or "-"
            print(f"{state.run_id:<28} {state.state:<8} {verdict:<13} {state.summary}")
    return ExitCode.OK


def _in_full(state: RunState) -> list[str]:
    return [
        f"Run      {state.run_id} ({state.path})",
        f"State    {state.state}, attempt {state.attempt}",
        f"Verdict  {state.verdict or 'none yet'}",
        f"Arms     {', '.join(state.completed_arms) or 'none'} completed",
        *(f"Gate     {gate:<24} {answer}" for gate, answer in state.gates.items()),
        f"Said     {state.summary}",
    ]
