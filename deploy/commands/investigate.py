"""``gated-rl investigate``: say from a run's files alone why its mask was active or not."""

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from deploy.exit_codes import ExitCode
from deploy.runs import find_run
from evidence.conclusion import Category
from tasks.investigation import Investigation
from tasks.investigation import investigate as investigate_run

EXIT_CODES: Mapping[Category, ExitCode] = {
    "active": ExitCode.OK,
    "legitimately_inactive_regime": ExitCode.OK,
    "missing_evidence": ExitCode.INCONCLUSIVE,
    "code_or_instrumentation_defect": ExitCode.STOPPED_BY_GATE,
    "wrong_reference_or_variant": ExitCode.STOPPED_BY_GATE,
}


def investigate(args: argparse.Namespace) -> int:
    """Print the conclusion of a run's files and the figures that say so."""
    run = find_run(args.run, run_dir=args.run_dir)
    found = investigate_run(run, arm=args.arm, phase=args.phase)
    if args.json:
        print(json.dumps(found.to_record(), indent=2, ensure_ascii=True, allow_nan=False))
    else:
        print("\n".join(_lines(found)))
    return EXIT_CODES[found.conclusion.category]


def _lines(found: Investigation) -> Iterator[str]:
    conclusion = found.conclusion
    yield f"Finding  {conclusion.category} ({conclusion.cause})"
    yield f"Why      {conclusion.sentence}"
    yield f"Next     {conclusion.next_action}"
    if found.arm is None or not found.by_update:
        return
    yield f"Looked at arm {found.arm}, phase {found.phase}: {found.findings.scope}"
    yield from _checked(found)
    yield "Figures"
    yield from _figures({**found.record, **found.sentinels})
    yield "By sampling probability            tokens     masked    exceed       ppo"
    for row in found.bins:
        yield (
            f"  {row['from']:<5g} to {row['to']:<5g}             {row['tokens']:>10} "
            f"{row['masked']:>10} {_shown(row['exceed']):>9} {row['ppo']:>9}"
        )
    yield "Fixed rules"
    for check in found.findings.rules.get("checks", ()):
        yield f"  {check['check']:<32} {check['status']:<11} {check['reason'] or ''}".rstrip()


def _checked(found: Investigation) -> Iterator[str]:
    findings, replay = found.findings, found.findings.replay
    yield f"  files that disagree              {len(findings.broken)}"
    yield f"  forced cases                     {_share(findings.forced)}"
    if replay:
        yield f"  decisions unlike the reference   {replay['decisions_different']}"
        yield f"  gradient, relative error         {replay['gradient_relative_error']:.3g}"
        yield f"  loss, relative error             {_shown(replay['loss_relative_error'])}"
    for name, gap in (("first batch", findings.first_gap), ("later batches", findings.later_gap)):
        if gap is not None:
            yield f"  sampler against trainer, nats    q90 {gap['nats_q90']:.3g} ({name})"


def _share(forced: Mapping[str, int]) -> str:
    return (
        f"{forced.get('cases', 0) - forced.get('failed', 0)} of {forced.get('cases', 0)} as known"
    )


def _figures(figures: Mapping[str, Any]) -> Iterator[str]:
    for name, value in figures.items():
        yield f"  {name:<44} {_shown(value)}"


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
