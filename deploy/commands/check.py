"""``gated-rl check``: what a spec means before anything is spent."""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.exit_codes import ExitCode
from evidence.applicability import COVERED_FEATURES, check_applicability
from evidence.errors import InputError
from evidence.execution import ExecutionFile, contradictions, missing_settings
from evidence.plan import PlanCheck, plan_check
from evidence.profile import Profile, apply_profile
from evidence.spec import Spec, unresolved
from evidence.spec_preflight import SpecPreflightResult
from evidence.spec_preflight import validate as spec_preflight
from flows.catalog import find_profile, find_spec, resolved_from
from flows.inputs import read_bytes


@dataclass(frozen=True, slots=True)
class SpecCheck:
    """Everything `check` has to say about one spec.

    Attributes:
        spec: the spec.
        preflight: contradictions and gaps of the spec itself.
        applicability: check name to whether it applies, and why.
        missing: settings that the execution file must still give.
        contradictions: where spec and execution file disagree, one sentence each.
        placeholders: (JSON path, text) of what is unresolved.
        resolved_by: shipped spec that resolves this one, if there is one.
        plan: what the decision rule can settle; None where there is no rule.
    """

    spec: Spec
    preflight: SpecPreflightResult
    applicability: Mapping[str, Mapping[str, Any]]
    missing: tuple[str, ...]
    contradictions: tuple[str, ...]
    placeholders: tuple[tuple[str, str], ...]
    resolved_by: str | None
    plan: PlanCheck | None

    @property
    def launchable(self) -> bool:
        """Whether `run` would start it."""
        open_points = self.missing or self.contradictions or self.placeholders
        return self.preflight.status == "passed" and self.plan is not None and not open_points

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every finding."""
        return {
            "title": self.spec.title,
            "spec_sha256": self.spec.digest,
            "launchable": self.launchable,
            "spec_preflight": self.preflight.to_record(),
            "applicability": {name: dict(found) for name, found in self.applicability.items()},
            "missing_settings": list(self.missing),
            "contradictions": list(self.contradictions),
            "unresolved": [{"path": path, "text": text} for path, text in self.placeholders],
            "resolved_by": self.resolved_by,
            "plan": None if self.plan is None else self.plan.to_record(),
        }


def check(args: argparse.Namespace) -> int:
    """Print what a spec means. Exit status 0 if it can be launched, 2 if not."""
    found = check_spec(
        args.spec, execution=args.execution, profile=args.profile, base_score=args.base_score
    )
    if args.json:
        print(json.dumps(found.to_record(), indent=2, ensure_ascii=True, allow_nan=False))
    else:
        print("\n".join(_lines(found)))
    return ExitCode.OK if found.launchable else ExitCode.BAD_INPUT


def check_spec(
    name_or_path: str,
    *,
    execution: str | None = None,
    profile: str | None = None,
    base_score: float | None = None,
) -> SpecCheck:
    """Read a spec and its execution file and look at both from every side.

    Args:
        name_or_path: a shipped spec's name, or a file (a spec, or a triage document holding one).
        execution: execution file; by default the one beside the spec.
        profile: look at both as this profile scales them.
        base_score: measured score of the base model, which narrows what effects are possible.

    Raises:
        InputError: if a file cannot be read as what it should be.
    """
    files = find_spec(name_or_path)
    spec = Spec.parse(read_bytes(files.spec, field="SPEC"), where=str(files.spec))
    path = Path(execution) if execution else files.execution
    settings = None
    if path is not None:
        data = read_bytes(path, field="--execution")
        settings = ExecutionFile.parse(data, where=str(path))
    if profile is not None:
        spec, settings = _scaled(spec, settings, profile)
    placeholders = tuple(unresolved(spec))
    return SpecCheck(
        spec=spec,
        preflight=spec_preflight(spec.raw),
        applicability={
            name: check_applicability(spec.raw, name).to_record() for name in COVERED_FEATURES
        },
        missing=tuple(missing_settings(spec, settings)),
        contradictions=(
            () if settings is None else tuple(str(each) for each in contradictions(spec, settings))
        ),
        placeholders=placeholders,
        resolved_by=resolved_from(spec) if placeholders or settings is None else None,
        plan=_plan(spec, settings, base_score),
    )


def _scaled(spec: Spec, settings: ExecutionFile | None, profile: str) -> tuple[Spec, ExecutionFile]:
    if settings is None:
        raise InputError("--profile", profile, "a spec with an execution file, which it scales")
    path = find_profile(profile)
    found = Profile.parse(read_bytes(path, field="--profile"), where=str(path))
    scaled = apply_profile(spec, settings, found)
    return scaled.spec, scaled.execution


def _plan(spec: Spec, settings: ExecutionFile | None, base_score: float | None) -> PlanCheck | None:
    if spec.decision_rule is None:
        return None
    try:
        return plan_check(spec, base_score=base_score, roles=settings.roles if settings else ())
    except InputError as error:
        if error.field.startswith("base_score"):
            raise InputError("--base-score", error.value, error.expected) from None
        raise


def _lines(found: SpecCheck) -> Iterator[str]:
    spec = found.spec
    yield spec.title
    yield f"  spec digest  {spec.digest}"
    yield f"  base model   {spec.base_model}, LoRA rank {spec.lora_rank}"
    yield f"  arms         {', '.join(spec.arm_names)}; {spec.steps} optimizer steps each"
    budget = spec.budget
    yield f"  budget       {_amount(budget.max_wall_minutes, 'wall minutes')}, " + _amount(
        budget.gpu_hours, "GPU hours"
    )
    yield ""
    yield f"Spec preflight: {found.preflight.status}"
    yield from (f"  - {finding}" for finding in found.preflight.findings)
    yield ""
    yield "Which checks apply"
    for name, answer in found.applicability.items():
        reasons = "; ".join(answer["reasons"])
        yield f"  {name:<22} {answer['status']:<15} {reasons}"
    yield ""
    yield "What the decision rule can settle"
    if found.plan is None:
        yield "  - There is no decision rule: no verdict can be reached."
    else:
        yield from (f"  - {sentence}" for sentence in found.plan.sentences)
        yield from _items(found.plan)
    yield ""
    yield from _listed("Settings missing from the execution file", found.missing)
    yield from _listed("Contradictions between spec and execution file", found.contradictions)
    texts = [f"{path}: {text}" for path, text in found.placeholders]
    yield from _listed("Unresolved in the spec", texts)
    yield ""
    yield _conclusion(found)


def _amount(value: float | None, unit: str) -> str:
    return f"no limit on {unit}" if value is None else f"{value:g} {unit}"


def _items(plan: PlanCheck) -> Iterator[str]:
    k = min(len(plan.criteria), 2)
    yield "  Items needed when the true effect is this far from the margin:"
    yield "    distance   settles in half of runs   in 80 % of runs (guaranteed)   (typical)"
    for row in plan.items:
        if row["k"] == k:
            yield (
                f"    {row['distance']:<10g} {row['just']:<25} {row['guaranteed']:<30} "
                f"{row['realistic']}"
            )


def _listed(heading: str, entries: tuple[str, ...] | list[str]) -> Iterator[str]:
    if not entries:
        yield f"{heading}: none"
        return
    yield f"{heading}: {len(entries)}"
    yield from (f"  - {entry}" for entry in entries)


def _conclusion(found: SpecCheck) -> str:
    if found.launchable:
        return "This spec can be launched."
    if found.resolved_by is not None:
        return (
            "This spec cannot be launched as it stands. It can be audited; launch "
            f"'{found.resolved_by}', which resolves it."
        )
    return "This spec cannot be launched as it stands: see the points above."
