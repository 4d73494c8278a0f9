"""Run the tests against wrong versions of the program, and say which test caught which.

    python -m tests.mutants.runner [--per-module N] [--module NAME]

Each mutant is tried in a forked process whose import of the module is replaced; nothing on disk is
changed. A mutant that no test catches is a gap in the tests, unless `EQUIVALENT` says why it
behaves as the original does.
"""

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import select
import signal
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.operators import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
SECONDS_PER_MUTANT = 120.0

TARGETS: dict[str, tuple[str, ...]] = {
    "evidence.applicability": ("test_applicability.py", "test_cases.py"),
    "evidence.spec_preflight": ("test_spec_preflight.py", "test_cases.py"),
    "evidence.parity": ("test_parity.py", "test_cases.py"),
    "evidence.correctness": ("test_correctness.py", "test_cases.py", "test_audit.py"),
    "evidence.restoration": ("test_restoration.py", "test_cases.py"),
    "evidence.restoration_arm": ("test_restoration.py", "test_cases.py"),
    "evidence.activation": ("test_activation.py", "test_cases.py"),
    "evidence.evaluator": ("test_evaluator.py", "test_cases.py", "test_audit.py"),
    "evidence.decision": ("test_decision.py", "test_cases.py"),
    "evidence.criteria": ("test_decision.py", "test_cases.py"),
    "evidence.observations": ("test_decision.py", "test_cases.py"),
    "evidence.statistics": ("test_statistics.py", "test_decision.py"),
    "evidence.feasibility": ("test_feasibility.py", "test_cases.py", "test_audit.py"),
    "evidence.generation_counts": ("test_feasibility.py", "test_cases.py"),
    "evidence.generation_audit": ("test_generation_audit.py", "test_cases.py"),
    "evidence.answers": ("test_generation_audit.py", "test_cases.py"),
    "evidence.evidence_limits": ("test_evidence_limits.py", "test_cases.py"),
    "evidence.deviations": ("test_deviations.py", "test_cases.py"),
    "evidence.output": ("test_output.py", "test_cases.py"),
    "evidence.capacity": ("test_capacity.py", "test_cases.py"),
    "evidence.verdict": ("test_verdict.py", "test_cases.py", "test_decision.py"),
}
"""Module to the tests that must catch its mutants, cheapest first."""

_SLOWER = "only chooses the slower of two readers that give the same rows"

EQUIVALENT: dict[str, str] = {
    'evidence.observations: line.strip()[:1] == "{" [1 -> 2]': _SLOWER,
    'evidence.observations: and line.count("{") == 1 [1 -> 2]': _SLOWER,
    'evidence.observations: and line.count("}") == 1 [1 -> 2]': _SLOWER,
    (
        'evidence.observations: and line.count("{") == 1 '
        "[line.count('{') == 1 -> line.count('{') != 1]"
    ): _SLOWER,
    (
        'evidence.observations: and line.count("}") == 1 '
        "[line.count('}') == 1 -> line.count('}') != 1]"
    ): _SLOWER,
    (
        "evidence.parity: if 1 / _SAFE_SQUARE < largest < _SAFE_SQUARE: "
        "[1 / _SAFE_SQUARE < largest < _SAFE_SQUARE -> 1 / _SAFE_SQUARE < largest <= _SAFE_SQUARE]"
    ): "scaling at exactly the threshold gives the same quotient",
    'evidence.observations: and line.strip()[-1:] == "}" [1 -> 2]': _SLOWER,
}
"""Key of a mutant that behaves as the original does, and why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant: the test that caught it, or None."""

    mutant: Mutant
    killer: str | None
    seconds: float


class _Replaced(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Gives one module's import the mutant instead."""

    def __init__(self, mutant: Mutant, path: Path) -> None:
        self._mutant, self._path = mutant, path

    def find_spec(
        self, fullname: str, path: object, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(self._path))

    def get_source(self, fullname: str) -> str:
        return ast.unparse(self._mutant.tree(self._path.read_text()))

    def exec_module(self, module: types.ModuleType) -> None:
        code = compile(self._mutant.tree(self._path.read_text()), str(self._path), "exec")
        exec(code, module.__dict__)


class _FirstFailure:
    """A pytest plugin that keeps the first failing test's name."""

    def __init__(self) -> None:
        self.name: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.name is None:
            self.name = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.name is None:
            self.name = f"{report.nodeid} (does not load)"


def chosen(module: str, count: int | None) -> list[Mutant]:
    """The first `count` mutants of a module that are not known to be equivalent."""
    path = ROOT / (module.replace(".", "/") + ".py")
    made = [each for each in mutants(module, path.read_text()) if each.key not in EQUIVALENT]
    return made if count is None else made[:count]


def try_mutant(mutant: Mutant, tests: Sequence[str]) -> Outcome:
    """Run a module's tests against a mutant in a forked process."""
    started = time.monotonic()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _in_child(mutant, tests, writer)
    os.close(writer)
    killer = _answer(reader, child)
    os.waitpid(child, 0)
    return Outcome(mutant, killer, time.monotonic() - started)


def _holds_the_original(name: str) -> bool:
    """Whether a loaded module is the original, or a test that was loaded with it."""
    return name.split(".")[0] == "evidence" or name.startswith("tests.evidence.")


def _in_child(mutant: Mutant, tests: Sequence[str], writer: int) -> None:
    status = "defect"
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        for name in [name for name in sys.modules if _holds_the_original(name)]:
            del sys.modules[name]
        path = ROOT / (mutant.module.replace(".", "/") + ".py")
        sys.meta_path.insert(0, _Replaced(mutant, path))
        first = _FirstFailure()
        files = [str(ROOT / "tests" / "evidence" / name) for name in tests]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", "not slow"]
        code = pytest.main([*options, *files], plugins=[first])
        status = first.name or f"pytest ended with {int(code)}" if code else ""
    except BaseException as error:  # noqa: BLE001 - whatever a mutant does, it was noticed
        status = f"{type(error).__name__} while loading"
    os.write(writer, status.encode()[:4000])
    os._exit(0)


def _answer(reader: int, child: int) -> str | None:
    ready, _, _ = select.select([reader], [], [], SECONDS_PER_MUTANT)
    if not ready:
        os.kill(child, signal.SIGKILL)
        os.close(reader)
        return f"does not end within {SECONDS_PER_MUTANT:.0f} s"
    with os.fdopen(reader, "rb") as file:
        return file.read().decode() or None


def run(modules: Sequence[str], per_module: int | None) -> list[Outcome]:
    """Try the mutants of several modules and print each with its killer."""
    outcomes = []
    for module in modules:
        for mutant in chosen(module, per_module):
            outcome = try_mutant(mutant, TARGETS[module])
            outcomes.append(outcome)
            state = f"caught by {outcome.killer}" if outcome.killer else "SURVIVED"
            print(
                f"{module}:{mutant.line} [{mutant.kind}] {mutant.before}  ->  {mutant.after}\n"
                f"    {state} ({outcome.seconds:.1f} s)",
                flush=True,
            )
    return outcomes


def main() -> int:
    """Try the mutants and say how many were caught; 1 if any survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-module", type=int, default=6, metavar="N")
    parser.add_argument("--all", action="store_true", help="every mutant (takes hours)")
    parser.add_argument("--module", action="append", choices=sorted(TARGETS))
    args = parser.parse_args()
    outcomes = run(args.module or list(TARGETS), None if args.all else args.per_module)
    survivors = [outcome for outcome in outcomes if outcome.killer is None]
    print(f"{len(outcomes)} mutants, {len(outcomes) - len(survivors)} caught")
    for outcome in survivors:
        print(f"survived: {outcome.mutant.key!r}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
