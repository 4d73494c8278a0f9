"""Score held-out items with the frozen evaluator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.protocols import Episode
from evidence.canonical import canonical_bytes, derive_seed
from evidence.errors import ConflictError
from evidence.evaluator import evaluator_id
from evidence.gate import CheckResult, GateResult, GateStatus
from evidence.run import TableRef
from tasks.context import RunContext, require_graded, settle_all
from tasks.evaluation_parts import CHUNK, EvaluationParts
from tasks.failures import ModelLost
from tasks.gate_answer import GateAnswer
from tasks.rollout import turn_rows
from tasks.sampling import ServiceSampler

BASE = "base"
FINAL = "final"


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


async def check_canaries(ctx: RunContext) -> GateAnswer:
    """Freeze the evaluator, hold it against the plan, and grade replies whose grade is known.

    A grader that gets them wrong scores nobody, and neither does one that lacks planned items or
    metrics.
    """
    freeze_evaluator(ctx)
    planned = (*_missing_items(ctx), *_unknown_metrics(ctx))
    canaries = tuple(
        CheckResult(
            check=f"{canary.item_id}: {canary.metric}",
            status="passed" if canary.ok else "failed",
            reason=None if canary.ok else f"a reply worth {canary.expected} scored {canary.value}",
            tolerance=canary.expected,
            measured={"reply": canary.reply, "value": canary.value},
        )
        for canary in ctx.environment.canaries()
    )
    checks = planned + canaries
    reasons = tuple(f"{check.check}: {check.reason}" for check in checks if check.reason)
    if not canaries and not reasons:
        reasons = ("the environment has no canary",)
        return GateAnswer(GateResult(gate="evaluator", status="unverified", reasons=reasons))
    status: GateStatus = "failed" if reasons else "passed"
    return GateAnswer(GateResult(gate="evaluator", status=status, reasons=reasons, checks=checks))


def _missing_items(ctx: RunContext) -> list[CheckResult]:
    """A failed check where there are fewer held-out items than planned.

    A limited run gives no verdict, so that it may do with what there is.
    """
    planned, found = ctx.execution.evaluation.items, len(ctx.eval_ids)
    if found == planned or ctx.limit is not None:
        return []
    reason = f"{found} items, planned are {planned}"
    name = "held-out items"
    return [CheckResult(name, "failed", reason=reason, tolerance=planned, measured=found)]


def compared_metrics(ctx: RunContext) -> list[str]:
    """Metrics that the decision rule names, in its order; the environment's first where none."""
    if ctx.spec.decision_rule is None:
        return list(ctx.environment.metrics[:1])
    return list(dict.fromkeys(criterion.metric for criterion in ctx.spec.rule.criteria))


def _unknown_metrics(ctx: RunContext) -> list[CheckResult]:
    """A failed check for each metric of the decision rule that the environment does not give."""
    known = list(ctx.environment.metrics)
    reason = f"the environment does not measure it; it measures {', '.join(known)}"
    return [
        CheckResult(f"metric {metric}", "failed", reason=reason, tolerance=metric, measured=known)
        for metric in compared_metrics(ctx)
        if metric not in known
    ]


async def evaluate(ctx: RunContext, subject: Subject, label: str) -> TableRef:
    """Score every held-out item.

    Reads and writes: parts of finished items, then `evaluations`, and `evaluation_turns` where
    episodes have messages. Calls the service. Safe to repeat: finished items are not asked again.
    """
    key = (subject.arm, label)
    if ctx.run.has_table("evaluations", key=key):
        return ctx.run.table_ref("evaluations", key=key)
    identity, _ = freeze_evaluator(ctx)
    parts = EvaluationParts.of(ctx, subject.arm, label)
    missing = parts.missing()
    items = sum(len(parts.portions[index]) for index in missing)
    scoring = Scoring(ctx, subject, identity, parts)
    if missing:
        with ctx.timed(
            subject.arm, "eval", subject.policy_version, label, units=items, samples=items
        ):
            while missing:
                await scoring.score(missing)
                missing = parts.missing()
    elif subject.arm == BASE and not ctx.timings(arm=BASE, what=label):
        await _time_again(ctx, subject, label, ctx.eval_ids[:CHUNK])
    return parts.assemble()


async def _time_again(ctx: RunContext, subject: Subject, label: str, items: Sequence[str]) -> None:
    """Time some items once more: the process ended between the last part and its timing.

    Their scores are kept already; feasibility rests on the seconds.
    """

    async def ask() -> None:
        sampler = await subject.open()
        try:
            with ctx.timed(
                BASE, "eval", subject.policy_version, label, units=len(items), samples=len(items)
            ):
                await _episodes(ctx, items, sampler)
        finally:
            await sampler.close()

    await ctx.service.retrying(f"evaluation of {BASE}, timing", ask, from_scratch=True)


async def _episodes(
    ctx: RunContext, items: Sequence[str], sampler: ServiceSampler
) -> list[Episode]:
    """Answer items side by side, and refuse answers that could not be graded."""
    episodes = await settle_all(
        [
            ctx.environment.run_episode(
                item_id, sampler, settings=ctx.evaluation_settings, seed=_seed(ctx, item_id)
            )
            for item_id in items
        ]
    )
    require_graded(episodes)
    return episodes


class Scoring:
    """One evaluation; the wait for a lost policy is bounded while no portion is finished."""

    def __init__(
        self, ctx: RunContext, subject: Subject, identity: str, parts: EvaluationParts
    ) -> None:
        self._ctx, self._subject, self._identity, self._parts = ctx, subject, identity, parts
        self._patience = ctx.service.patience()

    async def score(self, wanted: Sequence[int]) -> None:
        """Score portions side by side; those that a lost policy leaves out stay missing."""
        try:
            await self._ask(wanted)
        except ModelLost as error:
            if error.failure is None or error.final:
                raise
            if len(self._parts.missing()) < len(wanted):
                self._patience.succeeded()
            await self._patience.wait(error.failure, f"evaluation of {self._subject.arm}")

    async def _ask(self, wanted: Sequence[int]) -> None:
        sampler = await self._subject.open()
        try:
            await settle_all([self._portion(index, sampler) for index in wanted])
        finally:
            await sampler.close()

    async def _portion(self, index: int, sampler: ServiceSampler) -> None:
        ctx, parts = self._ctx, self._parts
        episodes = await _episodes(ctx, parts.portions[index], sampler)
        place = {
            "arm": parts.arm,
            "label": parts.label,
            "policy_version": self._subject.policy_version,
            "seed": self._subject.seed,
        }
        scored = place | {"evaluator_id": self._identity}
        tables = {
            "evaluations": [scored | row for one in episodes for row in _score_rows(ctx, one)],
            "evaluation_turns": [
                place | {"item_id": one.item_id} | row for one in episodes for row in turn_rows(one)
            ],
        }
        parts.keep(index, tables)
        done, total = parts.items_done(), len(ctx.eval_ids)
        ctx.tell("eval", parts.label, arm=parts.arm, done=done, total=total)


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
