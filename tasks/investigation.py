"""The offline investigation of a run: every finding from its files, and what they amount to.

Nothing is asked of a service and nothing is written: the run stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from evidence.conclusion import Conclusion, Findings, conclude
from evidence.diagnostic_rules import judge
from evidence.run import Run
from evidence.spec import Spec
from losses.diagnostics import (
    DiagnosticRecord,
    DiagnosticSettings,
    pooled_diagnostics,
    probability_bins,
    record_figures,
)
from losses.errors import LossConfigError
from losses.forced_cases import run_forced_cases
from losses.mismatch import Mismatch, mismatch
from losses.replay import DELTA_GRID, matching_variants, reach, removed_at, try_replay
from tasks.arms import arm_plans
from tasks.diagnostics import diagnostic_settings
from tasks.recomputed import correction_for, read_recomputed, reads_recomputed
from tasks.sentinel_figures import (
    movement_nats,
    rescored_gaps,
    sentinel_figures,
    within_batches,
)
from tasks.stored_alignment import contradictions_of
from tasks.stored_updates import StoredArm, StoredUpdate, stored_arm


@dataclass(frozen=True, slots=True)
class Investigation:
    """What the files of a run say about one arm's mask.

    Attributes:
        run_id: the run.
        arm: the arm; None where the run recorded no update.
        phase: part of the run that was looked at.
        findings: every measurement.
        conclusion: what they amount to.
        record: pooled figures under the names of the bounded diagnostic.
        bins: the pooled figures by sampling probability.
        sentinels: fixed tokens against the sampler and against their first scoring.
        by_delta: what masks of other thresholds would have removed; context, not a choice.
        by_update: a few figures of every update.
    """

    run_id: str
    arm: str | None
    phase: str | None
    findings: Findings
    conclusion: Conclusion
    record: Mapping[str, Any]
    bins: Sequence[Mapping[str, Any]]
    sentinels: Mapping[str, Any]
    by_delta: Mapping[str, int]
    by_update: Sequence[Mapping[str, Any]]

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return {
            "version": 1,
            "run_id": self.run_id,
            "arm": self.arm,
            "phase": self.phase,
            "conclusion": self.conclusion.to_record(),
            "record": dict(self.record),
            "probability_bins": [dict(row) for row in self.bins],
            "sentinels": dict(self.sentinels),
            "removed_by_delta": dict(self.by_delta),
            "updates": [dict(row) for row in self.by_update],
            "findings": self.findings.to_record(),
        }


def investigate(run: Run, *, arm: str | None = None, phase: str | None = None) -> Investigation:
    """Look at the recorded updates of a run from every side.

    Args:
        run: the run directory.
        arm: the arm; by default the one that masks by divergence.
        phase: the phase; by default the first of diagnostic, train and pilot with updates.

    Raises:
        InputError: if a file cannot be read, is of another version, or there is no such arm.
    """
    stored = stored_arm(run, arm=arm, phase=phase)
    if stored is None or not stored.updates:
        return _nothing(run, stored, _missing(run, stored))
    settings = _settings(run, stored)
    later, scope = stored.later_pass()
    pooled = pooled_diagnostics([one.tokens for one in later], settings=settings)
    findings = _findings(stored, pooled, scope, settings)
    return Investigation(
        run_id=run.run_id,
        arm=stored.arm,
        phase=stored.phase,
        findings=findings,
        conclusion=conclude(findings),
        record=_record(stored, later, pooled, settings),
        bins=[_bin(row) for row in probability_bins(pooled)],
        sentinels=sentinel_figures(stored),
        by_delta={
            f"{delta:g}": sum(removed_at(one.tokens, delta=delta) for one in later)
            for delta in DELTA_GRID
        },
        by_update=[_line(one) for one in stored.updates],
    )


def _nothing(run: Run, stored: StoredArm | None, missing: Sequence[str]) -> Investigation:
    findings = Findings(missing=missing)
    return Investigation(
        run_id=run.run_id,
        arm=None if stored is None else stored.arm,
        phase=None if stored is None else stored.phase,
        findings=findings,
        conclusion=conclude(findings),
        record={},
        bins=(),
        sentinels={},
        by_delta={},
        by_update=(),
    )


def _settings(run: Run, stored: StoredArm) -> DiagnosticSettings:
    return diagnostic_settings(arm_plans(Spec.parse(run.spec), stored.execution))


def _findings(
    stored: StoredArm, pooled: DiagnosticRecord, scope: str, settings: DiagnosticSettings
) -> Findings:
    replayed, unreplayed = _replayed(stored, settings)
    missing = [*_missing(stored.run, stored), *unreplayed]
    first, later = _gaps(stored)
    moved = movement_nats(stored)
    try:
        reached = reach(stored.loss)
        reach_record = {"positive": reached.positive, "negative": reached.negative}
    except LossConfigError:
        reach_record = {}
    figures = {name: value for name, value in pooled.items() if not name.startswith("prob_bin_")}
    return Findings(
        missing=missing,
        broken=contradictions_of(stored),
        forced=_forced(),
        replay=replayed,
        variants=_variants(stored) if replayed.get("decisions_different") else (),
        reach=reach_record if stored.loss["kind"] == "dppo" else {},
        registered=stored.loss,
        learning_rate=max(float(one.row["learning_rate"]) for one in stored.updates),
        temperature=stored.execution.rollout.temperature,
        first_gap=None if first is None else first.to_record(),
        later_gap=None if later is None else later.to_record(),
        rescored=rescored_gaps(stored),
        movement_nats=moved,
        within_batches=within_batches(stored) if moved is None else None,
        rewards=_rewards(stored),
        figures=figures,
        rules=judge(pooled).to_record(),
        scope=scope,
    )


def _missing(run: Run, stored: StoredArm | None) -> list[str]:
    """What a run of this kind should have recorded and did not."""
    if stored is None or not stored.updates:
        arms = "any arm" if stored is None else f"arm {stored.arm} in phase {stored.phase}"
        return [f"no update of {arms} is recorded with its tokens"]
    found = []
    planned = _planned_updates(run, stored)
    numbers = [one.update for one in stored.updates]
    if planned is not None and numbers != list(range(planned)):
        found.append(f"{len(numbers)} of {planned} planned updates are recorded with their tokens")
    second = {int(one.row["minibatch"]) for one in stored.updates if one.row["epoch"] == 1}
    parts = stored.execution.rollout.minibatches
    if planned is not None and len(second) < parts:
        found.append(
            f"{len(second)} of {parts} updates of the second pass over the batch were made"
        )
    for step in sorted({int(one.row["step"]) for one in stored.updates}):
        for table in ("tokens", "rollouts"):
            if not run.has_table(table, key=(stored.arm, stored.phase, step)):
                found.append(f"table {table} of rollout step {step} is not there")
        if _recomputes(stored) and read_recomputed(run, stored.arm, stored.phase, step) is None:
            found.append(f"recomputed log-probabilities of rollout step {step} are not there")
    return found


def _recomputes(stored: StoredArm) -> bool:
    """Whether the arm's updates read the trainer's own scores of the sampled tokens."""
    correction = correction_for(stored.loss, stored.execution.rollout_correction)
    return reads_recomputed(stored.loss, correction)


def _planned_updates(run: Run, stored: StoredArm) -> int | None:
    """How many updates a diagnostic was to make; None for a comparison, which may be under way."""
    plan = run.spec.get("diagnostic")
    if stored.phase != "diagnostic" or not isinstance(plan, Mapping):
        return None
    return int(plan["max_updates"])


def _forced() -> dict[str, int]:
    results = run_forced_cases()
    return {"cases": len(results), "failed": sum(not result.passed for result in results)}


def _replayed(stored: StoredArm, settings: DiagnosticSettings) -> tuple[dict[str, Any], list[str]]:
    """The worst figures of all replays, and why some updates could not be replayed."""
    counted = _counting_mask(stored, settings)
    ppo = (settings.ppo_low_threshold, settings.ppo_high_threshold)
    replays, problems = [], []
    for one in stored.updates:
        replay, problem = try_replay(stored.loss, one.recorded(), count_config=counted, ppo=ppo)
        if replay is None:
            problems.append(f"update {one.update} cannot be replayed: {problem}")
        else:
            replays.append(replay)
    if not replays:
        return {}, problems
    corrected = stored.execution.rollout_correction is not None and stored.loss["kind"] != "dppo"
    losses = [
        (one.loss_errors["max_abs_error"] or 0.0)
        / max(1.0, one.loss_errors["reference_max_abs"] or 0.0)
        for one in replays
    ]
    return {
        "updates": len(replays),
        "loss_tokens": sum(len(one.tokens) for one in stored.updates),
        "decisions_different": sum(one.decisions_different for one in replays),
        "removed_different": sum(one.removed_different for one in replays),
        "ratio_relative_error": max(one.ratio_max_error for one in replays),
        "loss_relative_error": None if corrected else max(losses),
        "gradient_relative_error": max(
            (one.gradient_errors["relative_l2_error"] or 0.0) for one in replays
        ),
        "counts_different": sorted({name for one in replays for name in one.counts_different}),
    }, problems


def _counting_mask(stored: StoredArm, settings: DiagnosticSettings) -> Mapping[str, Any]:
    """The mask that tokens of every arm were counted against, whatever the arm's own is."""
    if settings.rule is None:
        return stored.loss
    return {"kind": "dppo", **asdict(settings.rule)}


def _variants(stored: StoredArm) -> list[str]:
    return matching_variants(stored.loss, [one.recorded() for one in stored.updates])


def _gaps(stored: StoredArm) -> tuple[Mismatch | None, Mismatch | None]:
    """Sampler against trainer before a batch's first update: on the first batch, and on later ones."""
    per_step = stored.execution.rollout.updates_per_step
    fresh = [one for one in stored.updates if one.update % per_step == 0]
    first = [one for one in fresh if one.update == 0]
    return _mismatch(first), _mismatch([one for one in fresh if one.update > 0])


def _mismatch(updates: Sequence[StoredUpdate]) -> Mismatch | None:
    if not updates:
        return None
    offsets = np.cumsum([0, *(int(one.sequence_N.max(initial=-1)) + 1 for one in updates)])
    return mismatch(
        np.concatenate([one.columns["target_logprob"] for one in updates]),
        np.concatenate([one.columns["sampling_logprob"] for one in updates]),
        sequence_N=np.concatenate(
            [one.sequence_N + offset for one, offset in zip(updates, offsets, strict=False)]
        ),
    )


def _rewards(stored: StoredArm) -> dict[str, int]:
    counts = dict.fromkeys(
        ("completions", "truncated", "groups", "groups_with_different_rewards"), 0
    )
    for step in stored.steps:
        if not stored.run.has_table("rollouts", key=(stored.arm, stored.phase, step)):
            continue
        groups: dict[int, set[float]] = defaultdict(set)
        for row in stored.run.read_table("rollouts", key=(stored.arm, stored.phase, step)):
            counts["completions"] += 1
            counts["truncated"] += bool(row["truncated"])
            groups[row["group"]].add(row["reward"])
        counts["groups"] += len(groups)
        counts["groups_with_different_rewards"] += sum(len(found) > 1 for found in groups.values())
    return counts


def _record(
    stored: StoredArm,
    later: Sequence[StoredUpdate],
    pooled: DiagnosticRecord,
    settings: DiagnosticSettings,
) -> dict[str, Any]:
    """Figures under the record's names: of the second pass, and three of the first."""
    second = bool(later) and later[0].row["epoch"] == 1
    found: dict[str, Any] = dict(record_figures(pooled, prefix="epoch2" if second else "later"))
    if second:
        early = [one.tokens for one in stored.updates if one.row["epoch"] == 0]
        first = record_figures(pooled_diagnostics(early, settings=settings), prefix="epoch1")
        found |= first
    found["executed_updates"] = len(stored.updates)
    return found


def _bin(row: Any) -> dict[str, Any]:
    return {
        "from": row.lower,
        "to": row.upper,
        "tokens": row.tokens,
        "masked": row.masked,
        "exceed": row.exceed,
        "ppo": row.ppo,
    }


_SHOWN = (
    *("update", "epoch", "minibatch", "loss", "loss_tokens", "nonzero_advantage_tokens"),
    *("masked_tokens", "removed_positive", "removed_negative", "exceed"),
    *("ppo_counterfactual_tokens", "cap_hits", "drift_abs_q90", "drift_abs_max", "logprob_dtype"),
)


def _line(one: StoredUpdate) -> dict[str, Any]:
    return {name: one.row[name] for name in _SHOWN}
