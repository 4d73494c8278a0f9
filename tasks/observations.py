"""From evaluations to what the decision rule reads, and to what reports say about scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from evidence.canonical import sha256_hex
from evidence.run import TableRef
from tasks.context import RunContext
from tasks.evaluation import BASE, FINAL, compared_metrics, freeze_evaluator, mean_scores

OBSERVATIONS_FILE = "scored-observations.jsonl"


def write_observations(ctx: RunContext) -> TableRef:
    """Write one row per item, arm and compared metric, from the final evaluations."""
    wanted = set(compared_metrics(ctx))
    rows = [
        {name: row[name] for name in ("item_id", "arm", "seed", "metric", "value", "evaluator_id")}
        for arm in ctx.arms
        for row in ctx.run.read_table("evaluations", key=(arm.name, FINAL))
        if row["metric"] in wanted
    ]
    return ctx.run.write_table("observations", rows)


def decision_report(ctx: RunContext) -> dict[str, Any]:
    """The reported decision: the name and digest of the kept file of observations."""
    rows = ctx.run.read_table("observations")
    data = _lines(rows)
    ctx.run.write_file(OBSERVATIONS_FILE, data)
    return {
        "version": 1,
        "observations_file": {"name": OBSERVATIONS_FILE, "sha256": sha256_hex(data)},
    }


def evaluation_report(ctx: RunContext) -> dict[str, Any]:
    """The reported evaluation: evaluator, unrounded scores of the base and every arm, comparisons."""
    identity, provenance = freeze_evaluator(ctx)
    scores = []
    for arm, label, seed in _scored(ctx):
        reference = _predictions_file(ctx, arm, label)
        for metric, value in mean_scores(ctx, arm, label).items():
            scores.append(
                {
                    "arm": arm,
                    "metric": metric,
                    "value": value,
                    "evaluator_id": identity,
                    "seed": seed,
                    "predictions_ref": reference,
                }
            )
    names = [
        arm.name for arm in ctx.arms if ctx.run.has_table("evaluations", key=(arm.name, FINAL))
    ]
    comparisons = [{"metric": metric, "arms": names} for metric in compared_metrics(ctx)]
    return {
        "version": 1,
        "evaluators": {identity: provenance},
        "scores": scores,
        "comparisons": comparisons if len(names) > 1 else [],
    }


def _scored(ctx: RunContext) -> list[tuple[str, str, int]]:
    subjects = [(BASE, BASE, ctx.arms[0].seed)]
    subjects += [(arm.name, FINAL, arm.seed) for arm in ctx.arms]
    return [one for one in subjects if ctx.run.has_table("evaluations", key=one[:2])]


def _predictions_file(ctx: RunContext, arm: str, label: str) -> str:
    """Keep the raw predictions of one evaluation as an evidence file; returns its name."""
    rows = [
        {
            name: row[name]
            for name in (
                *("item_id", "arm", "seed", "metric", "value", "prediction", "reference"),
                *("extracted", "stop_reason", "policy_version", "evaluator_id"),
            )
        }
        for row in ctx.run.read_table("evaluations", key=(arm, label))
    ]
    name = f"predictions-{arm}-{label}.jsonl" if arm != label else f"predictions-{arm}.jsonl"
    ctx.run.write_file(name, _lines(rows))
    return name


def _lines(rows: Sequence[dict[str, Any]]) -> bytes:
    text = "".join(
        json.dumps(row, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n" for row in rows
    )
    return text.encode("ascii")
