"""Score held-out items with the frozen evaluator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.protocols import Episode
from evidence.canonical import canonical_bytes, derive_seed
from evidence.errors import ConflictError
from evidence.evaluator import evaluator_id
from evidence.gate import CheckResult, GateResult
from evidence.run import TableRef
from tasks.context import RunContext, settle_all
from tasks.failures import ModelLost
from tasks.sampling import ServiceSampler

BASE = "base"
FINAL = "final"
_CHUNK = 8
"""Items that are kept together; a killed evaluation repeats only unfinished chunks."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated.

    Attributes:
        arm: name of the arm, or ``base`` for the base model.
        seed: training seed that the scores belong to.
        policy_version: optimizer steps done by the evaluated weights.
        open: opens a sampler of exactly these weights.
    """

    arm: str
    seed: int
    policy_version: int
    open: Callable[[], Awaitable[ServiceSampler]]


def freeze_evaluator(ctx: RunContext) -> tuple[str, dict[str, Any]]:
    """Fix what determines a score, once for the whole run.

    Returns:
        The evaluator's id and its provenance.

    Raises:
        ConflictError: if the grader, the prompt, the decoding or the items have changed since.
    """
    provenance = ctx.environment.evaluator_provenance(
        settings=ctx.evaluation_settings, item_ids=ctx.eval_ids
    )
    identity = evaluator_id(provenance)
    frozen = ctx.run.events("evaluator_frozen")
    if not frozen:
        ctx.run.write_file(f"evaluator-{identity[:12]}.json", canonical_bytes(provenance) + b"\n")
        ctx.run.append("evaluator_frozen", evaluator_id=identity)
    elif frozen[0]["evaluator_id"] != identity:
        expected = f"{frozen[0]['evaluator_id']}, as frozen before the first score"
        raise ConflictError("evaluator_id", identity, expected, where=ctx.run.path)
    return identity, provenance


def check_canaries(ctx: RunContext) -> GateResult:
    """Grade replies whose grade is known; a grader that fails them scores nobody."""
    checks = tuple(
        CheckResult(
            check=f"{canary.item_id}: {canary.metric}",
            status="passed" if canary.ok else "failed",
            reason=None if canary.ok else f"a reply worth {canary.expected} scored {canary.value}",
            tolerance=canary.expected,
            measured={"reply": canary.reply, "value": canary.value},
        )
        for canary in ctx.environment.canaries()
    )
    reasons = tuple(f"{check.check}: {check.reason}" for check in checks if check.reason)
    if not checks:
        return GateResult(
            gate="evaluator", status="unverified", reasons=("the environment has no canary",)
        )
    return GateResult(
        gate="evaluator",
        status="failed" if reasons else "passed",
        reasons=reasons,
        checks=checks,
    )


async def evaluate(ctx: RunContext, subject: Subject, label: str) -> TableRef:
    """Score every held-out item.

    Reads and writes: parts of finished items, then `evaluations` and a file of predictions. Calls
    the service. Safe to repeat: finished items are not asked again.
    """
    key = (subject.arm, label)
    if ctx.run.has_table("evaluations", key=key):
        return ctx.run.table_ref("evaluations", key=key)
    identity, _ = freeze_evaluator(ctx)
    chunks = [ctx.eval_ids[at : at + _CHUNK] for at in range(0, len(ctx.eval_ids), _CHUNK)]
    missing = _missing(ctx, subject, label, len(chunks))
    items = sum(len(chunks[index]) for index in missing)
    with ctx.timed(subject.arm, "eval", subject.policy_version, label, units=items, samples=items):
        while missing:
            await _score_missing(
                ctx, subject, label, identity, [(index, chunks[index]) for index in missing]
            )
            missing = _missing(ctx, subject, label, len(chunks))
    rows = [
        row
        for index in range(len(chunks))
        for row in ctx.run.read_part(subject.arm, "eval", label, index)["evaluations"].to_pylist()
    ]
    return ctx.run.write_table("evaluations", rows, key=key)


def _missing(ctx: RunContext, subject: Subject, label: str, chunks: int) -> list[int]:
    finished = set(ctx.run.parts(subject.arm, "eval", label))
    return [index for index in range(chunks) if index not in finished]


async def _score_missing(
    ctx: RunContext,
    subject: Subject,
    label: str,
    identity: str,
    wanted: Sequence[tuple[int, Sequence[str]]],
) -> None:
    sampler = await subject.open()
    patience = ctx.service.patience()
    try:
        await settle_all(
            [
                _score_chunk(ctx, subject, label, identity, index, items, sampler)
                for index, items in wanted
            ]
        )
    except ModelLost as error:
        if error.failure is None:
            raise
        await patience.wait(error.failure, f"evaluation of {subject.arm}")
    finally:
        await sampler.close()


async def _score_chunk(
    ctx: RunContext,
    subject: Subject,
    label: str,
    identity: str,
    index: int,
    items: Sequence[str],
    sampler: ServiceSampler,
) -> None:
    episodes = await settle_all(
        [
            ctx.environment.run_episode(
                item_id, sampler, settings=ctx.evaluation_settings, seed=_seed(ctx, item_id)
            )
            for item_id in items
        ]
    )
    place = {
        "arm": subject.arm,
        "label": label,
        "policy_version": subject.policy_version,
        "seed": subject.seed,
        "evaluator_id": identity,
    }
    rows = [place | row for episode in episodes for row in _score_rows(ctx, episode)]
    ctx.run.write_part(subject.arm, "eval", label, index, {"evaluations": rows})
    ctx.tell(
        "eval",
        label,
        arm=subject.arm,
        done=min(len(ctx.run.parts(subject.arm, "eval", label)) * _CHUNK, len(ctx.eval_ids)),
        total=len(ctx.eval_ids),
    )


def _seed(ctx: RunContext, item_id: str) -> int:
    """The same for every arm: greedy decoding ignores it, a simulator's luck must not differ."""
    return derive_seed(ctx.run.spec_sha256, "evaluation", item_id)


def _score_rows(ctx: RunContext, episode: Episode) -> list[dict[str, Any]]:
    """One row per metric; a reply that could not be read is a row too."""
    shared: Mapping[str, Any] = {
        "item_id": episode.item_id,
        "prediction": episode.text,
        "reference": ctx.environment.item(episode.item_id).reference,
        "stop_reason": episode.stop_reason,
        "extracted": episode.extracted,
        "info_json": canonical_bytes(dict(episode.info)).decode("ascii") if episode.info else None,
    }
    return [
        {**shared, "metric": metric, "value": float(value)}
        for metric, value in sorted(episode.metrics.items())
    ]


def mean_scores(ctx: RunContext, arm: str, label: str) -> dict[str, float]:
    """Unrounded mean of every metric of one evaluation."""
    table = ctx.run.read_arrow("evaluations", key=(arm, label))
    totals: dict[str, list[float]] = {}
    for metric, value in zip(
        table.column("metric").to_pylist(), table.column("value").to_pylist(), strict=True
    ):
        totals.setdefault(metric, []).append(value)
    return {metric: sum(values) / len(values) for metric, values in sorted(totals.items())}
