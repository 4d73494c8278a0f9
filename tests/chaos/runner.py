"""Kill runs and their service at random moments, and show that nothing of it is left to see.

    python -m tests.chaos.runner [--store local|s3] [--kills N] [--seed N]

Each run is killed with SIGKILL at seeded random moments of every phase, while one call in ten is
refused, lost before or after it was carried out, or delayed; in some of the kills the service dies
too. A run that ends differently from the undisturbed one makes the exit status 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.campaign import Campaign, Profile, Story, schedule
from tests.chaos.documents import tiny, two_epochs
from tests.chaos.judge import Judgement, judge
from tests.chaos.phases import PHASES
from tests.chaos.world import World, world

KILLS = {
    "probe": 2,
    "gates": 3,
    "base evaluation": 2,
    "pilot": 3,
    "feasibility": 1,
    "training": 7,
    "evaluation": 3,
    "decision": 2,
    "bundle": 3,
}
"""Of one run. Those that find a run already past their phase fall in the one after it."""


@dataclass(frozen=True)
class Case:
    """A run that was disturbed, with what it is compared to."""

    name: str
    story: Story
    judgement: Judgement


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign, print its table, and return 0 if every run ended as it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=("local", "s3"), default="local")
    parser.add_argument(
        "--kills", type=int, default=50, help="start another run until there were so many"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the moments and the faults")
    parser.add_argument("--folder", type=Path, help="keep everything there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with world(folder, store=options.store, seed=options.seed) as place:
            cases = campaign(place, at_least=options.kills, seed=options.seed)
            print("\n".join(table(place, cases, seconds=time.monotonic() - started)))
    return 0 if cases and all(case.judgement.equal for case in cases) else 1


def campaign(
    place: World, *, at_least: int, seed: int, kills: Mapping[str, int] = KILLS
) -> list[Case]:
    """Disturb run after run until there were enough kills; every other one has two epochs.

    Raises:
        RuntimeError: if the undisturbed run does not end, or the runs go through unharmed.
    """
    rng = random.Random(seed)
    references: dict[str, tuple[Story, Profile, str]] = {}
    cases: list[Case] = []
    while sum(killed(cases).values()) < at_least:
        number = len(cases)
        if number > at_least:
            raise RuntimeError(f"{number} runs, and fewer than {at_least} kills")
        kind, documents = ("two epochs", two_epochs) if (number + seed) % 2 == 0 else ("tiny", tiny)
        if kind not in references:
            place.behave()
            reference = Campaign(place, documents(), name=f"undisturbed-{kind.replace(' ', '-')}")
            story, profile = reference.undisturbed()
            if not story.outcome:
                raise RuntimeError(f"the undisturbed run failed: {story.failures}")
            references[kind] = (story, profile, reference.run_dir)
        expected, profile, folder = references[kind]
        place.misbehave()
        run = Campaign(place, documents(), name=f"disturbed-{number}")
        story = run.disturbed(schedule(rng, kills), profile)
        place.behave()
        judged = judge(place, (story, run.run_dir), (expected, folder))
        cases.append(Case(f"{kind} {number}", story, judged))
        print(
            f"{cases[-1].name}: {sum(story.kills.values())} kills, {story.seconds:.0f} s, "
            f"{'equal' if judged.equal else 'DIFFERENT'}",
            file=sys.stderr,
            flush=True,
        )
    return cases


def killed(cases: Sequence[Case]) -> Counter[str]:
    """Kills of all runs by phase."""
    return sum((case.story.kills for case in cases), Counter())


def table(place: World, cases: Sequence[Case], *, seconds: float) -> list[str]:
    """What happened, in lines for a person."""
    kills = killed(cases)
    lines = ["kills of the run by phase"]
    lines += [f"  {phase:<16}{kills[phase]:>6}" for phase in PHASES]
    lines += [f"  {'all':<16}{sum(kills.values()):>6}"]
    lines += [f"kills of the service{place.kills:>4}", "calls that went wrong, by kind"]
    lines += [f"  {kind:<16}{count:>6}" for kind, count in place.faults.items()]
    share = sum(place.faults.values()) / max(1, place.calls)
    lines += [f"  {'all':<16}{sum(place.faults.values()):>6} of {place.calls} ({share:.1%})"]
    lines += ["run              kills  restores  replayed  tables equal  again  same end"]
    for case in cases:
        judged = case.judgement
        tables = f"{judged.tables - len(judged.differing)}/{judged.tables}"
        same = (
            "yes"
            if judged.equal
            else "NO: "
            + ", ".join(
                [
                    *judged.differing,
                    *judged.result_differs,
                    *judged.states_differ,
                    *judged.sampled_again,
                ]
            )
        )
        lines.append(
            f"  {case.name:<14}{sum(case.story.kills.values()):>6}{judged.restores:>10}"
            f"{judged.replayed:>10}{tables:>14}{len(judged.sampled_again):>7}  {same}"
        )
        if judged.result_differs:
            lines.append(f"    it ended so: {case.story.outcome.get('reason')}")
    judged_all = [case.judgement for case in cases]
    tables = sum(one.tables for one in judged_all)
    equal = tables - sum(len(one.differing) for one in judged_all)
    lines.append(f"content tables with the SHA-256 of the undisturbed run: {equal} of {tables}")
    again = sum(len(one.sampled_again) for one in judged_all)
    lines.append(f"finished groups that were sampled again: {again}")
    lines.append(f"{seconds:.0f} s")
    return lines


if __name__ == "__main__":
    sys.exit(main())
