"""``gated-rl verify``: recompute what a bundle claims, offline."""

import argparse
import json

from deploy.exit_codes import ExitCode
from evidence.verify import verify_bundle


def verify(args: argparse.Namespace) -> int:
    """Print which folder was checked, what holds, what does not, and what stays open."""
    found = verify_bundle(args.bundle)
    if args.json:
        print(json.dumps(found.to_record(), indent=2, ensure_ascii=True, allow_nan=False))
    else:
        print(f"Checked {found.where}")
        for name in found.checked:
            print(f"holds        {name}")
        for problem in found.problems:
            print(f"DOES NOT     {problem}")
        for gap in found.unchecked:
            print(f"not checked  {gap}")
        state = "Everything that can be checked offline holds." if found.ok else "Do not trust it."
        print(f"Run {found.run_id}: verdict {found.verdict}. {state}")
    return ExitCode.OK if found.ok else ExitCode.STOPPED_BY_GATE
