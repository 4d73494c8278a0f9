"""The activation gate with its registered fallbacks: tried in their order, the first that passes.

A failed gate is never relaxed. What is changed is the experiment, by one of the changes that were
registered beforehand, and that is a deviation which is posted before anything is trained. A change
that cannot act on what failed is not tried: it would only be another draw at the same bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from evidence.gate import GateResult
from evidence.result import StructuredResult
from flows import steps
from tasks.context import RunContext
from tasks.fallbacks import (
    adoption,
    calibration_phase,
    calibration_refusal,
    changed,
    left_out,
    unsuited,
)
from tasks.gate_answer import GateAnswer
from tasks.learner import Learner

if TYPE_CHECKING:
    from flows.gates import Gatekeeper

GATE = "activation"


async def pass_activation(
    keeper: Gatekeeper,
    ctx: RunContext,
    result: StructuredResult,
    init_uri: str,
    learners: Iterable[Learner],
) -> None:
    """Ask the activation gate; where it fails, try the fallbacks, and go on with the first passing.

    Each answer is a gate record of its own, so that a later process knows how far this got; a
    fallback that is not tried has one too, with the plan's answer and the reason.

    Raises:
        GateStopped: if neither the plan nor a fallback passes.
    """
    if not ctx.run.gate_records(GATE):
        await keeper.put(GATE, lambda: steps.ACTIVATION(ctx, init_uri))
    records = ctx.run.gate_records(GATE)
    while records[-1].status == "failed" and len(records) <= len(ctx.execution.fallbacks):
        number = len(records)
        if unsuited(ctx, number, records[0]) is not None:
            await keeper.put(GATE, partial(_left_out, ctx, number, records[0]))
        else:
            refusal = calibration_refusal(ctx, number, records[0])
            if refusal is not None:
                ctx.run.append("calibration_refused", number=number, reason=refusal)
                break
            await keeper.put(GATE, partial(steps.CALIBRATION, ctx, init_uri, number))
        records = ctx.run.gate_records(GATE)
    if len(records) > 1 and records[-1].status != "failed":
        _adopt(ctx, result, len(records) - 1, records[0])
        for learner in learners:
            learner.arm = ctx.arm(learner.arm.name)
    keeper.act(records[-1])


async def _left_out(ctx: RunContext, number: int, failed: GateResult) -> GateAnswer:
    return left_out(ctx, number, failed)


def _adopt(ctx: RunContext, result: StructuredResult, number: int, failed: GateResult) -> None:
    """Post the deviation and go on under the changed settings."""
    change = changed(ctx.execution, ctx.execution.fallbacks[number - 1])
    posted = result.current
    claims = [posted.get("tested_instead"), change.tested_instead]
    instead = " ".join(dict.fromkeys(claim for claim in claims if claim)) or None
    result.deviate(
        [adoption(ctx, number, failed)],
        original_hypothesis_tested=change.tested_instead is None
        and posted.get("original_hypothesis_tested") is not False,
        tested_instead=instead,
    )
    if not ctx.run.events("fallback_adopted"):
        kind = ctx.execution.fallbacks[number - 1].kind
        ctx.run.append("fallback_adopted", number=number, kind=kind)
    ctx.adopt(change.execution, pilot_phase=calibration_phase(number))
