"""From the evaluations of all arms to a verdict, and what may withhold it."""

from __future__ import annotations

from evidence import decision, evaluator, restoration
from evidence.criteria import DecisionResult
from evidence.decision import FinalVerdict
from evidence.result import StructuredResult
from tasks.context import RunContext
from tasks.decision_table import write_decision
from tasks.observations import (
    OBSERVATIONS_FILE,
    decision_report,
    evaluation_report,
    write_observations,
)


def decide(ctx: RunContext, result: StructuredResult) -> tuple[DecisionResult, FinalVerdict]:
    """Write observations and decision, post both, and judge by the frozen rule."""
    write_observations(ctx)
    evaluation = evaluation_report(ctx)
    report = decision_report(ctx)
    result.post_block("evaluation", evaluation)
    result.post_block("decision", report)
    judged = decision.validate(
        ctx.spec.raw,
        report,
        evaluation=evaluation,
        files={OBSERVATIONS_FILE: ctx.run.read_bytes(f"files/{OBSERVATIONS_FILE}")},
        roles=ctx.execution.roles,
    )
    write_decision(ctx, judged)
    posted = result.current
    gates: dict[str, str] = {name: gate.status for name, gate in ctx.run.gates().items()}
    provenance = posted.get("initialization_provenance")
    final = decision.final_verdict(
        judged,
        gates=gates
        | {
            "evaluation": evaluator.validate(evaluation).status,
            "restores": restoration.validate(ctx.spec.raw, provenance).status,
        },
        original_hypothesis_tested=posted.get("original_hypothesis_tested", True),
        tested_instead=posted.get("tested_instead"),
        deviations=posted.get("deviations", []),
        every_arm_completed=ctx.limit is None,
    )
    return judged, final


def interval_sentence(judged: DecisionResult) -> str:
    """The intervals against their margins, in one sentence."""
    parts = [
        f"{one.id} ({one.metric}): effect {one.effect:.4f}, interval [{one.lower:.4f}, "
        f"{one.upper:.4f}], margin {one.margin:g}"
        for one in judged.criteria
    ]
    return "; ".join(parts) or "; ".join(judged.issues) or "no criterion could be computed"
