"""The gates in their order. This is the only place that acts on what a gate says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from evidence.conformance import refusal_to_accept
from evidence.gate import GateResult
from evidence.result import StructuredResult
from flows import steps
from flows.activation import pass_activation
from tasks.conformance_gate import unreported
from tasks.context import RunContext
from tasks.evaluation import BASE, Subject, mean_scores
from tasks.gate_answer import GateAnswer
from tasks.learner import Learner
from tasks.service_identity import bind_identity
from tasks.tokenizers import restore_environment


class GateStopped(Exception):
    """A gate refused: it failed, or its evidence is missing and nobody accepted that."""

    def __init__(self, result: GateResult) -> None:
        self.result = result
        super().__init__(f"{result.gate}: {result.status}")


class Gatekeeper:
    """Asks each gate once, keeps its answer, and stops the run where it refuses.

    A gate that has answered is not asked again by a later process of the same run; its answer is
    acted on again, so that nothing gets past it by a restart.
    """

    def __init__(self, ctx: RunContext, result: StructuredResult) -> None:
        self._ctx, self._result = ctx, result

    async def ask(self, gate: str, step: Callable[[], Awaitable[GateAnswer]]) -> GateResult:
        """Return the gate's answer if the run may go on.

        Raises:
            GateStopped: if it may not.
        """
        known = self._ctx.run.gate(gate)
        if known is None:
            known = await self.put(gate, step)
        self.act(known)
        return known

    async def put(self, gate: str, step: Callable[[], Awaitable[GateAnswer]]) -> GateResult:
        """Ask the gate, also where it has answered before, and keep what it says."""
        self._ctx.tell("gate", f"{gate}: asking")
        answer = await step()
        for name, value in answer.blocks.items():
            self._result.post_block(name, value)
        known = answer.result
        self._ctx.run.write_gate(known)
        self._ctx.run.append("gate", gate=gate, status=known.status, reasons=list(known.reasons))
        return known

    def act(self, answer: GateResult) -> None:
        """Let the run go on, or stop it.

        Accepting is by gate, and only where the service was seen not to report what the gate rests
        on. All reasons that were accepted are kept in the ledger, and no verdict is definitive
        after any of them.

        Raises:
            GateStopped: if the gate refuses.
        """
        self._ctx.tell("gate", f"{answer.gate}: {answer.status}")
        if answer.may_proceed:
            return
        if answer.status == "unverified" and answer.gate in self._ctx.accept_unverified:
            refusal = refusal_to_accept(answer.gate, unreported(self._ctx))
            if refusal is not None:
                raise GateStopped(replace(answer, reasons=(*answer.reasons, refusal)))
            accepted = {event["gate"] for event in self._ctx.run.events("accepted_unverified")}
            if answer.gate not in accepted:
                self._ctx.run.append(
                    "accepted_unverified", gate=answer.gate, reasons=list(answer.reasons)
                )
            return
        raise GateStopped(answer)


async def pass_gates(ctx: RunContext, result: StructuredResult) -> dict[str, Learner]:
    """Ask every gate that stands before training.

    Returns:
        The arms' learners, each at the initialization checkpoint.

    Raises:
        GateStopped: at the first gate that refuses.
    """
    gate = Gatekeeper(ctx, result)
    await gate.ask("spec_preflight", lambda: steps.SPEC_PREFLIGHT(ctx))
    await gate.ask("service_probe", lambda: steps.SERVICE_PROBE(ctx))
    await gate.ask("conformance", lambda: steps.CONFORMANCE(ctx))
    await bind_identity(ctx)
    await restore_environment(ctx)
    await gate.ask("generation_audit", lambda: steps.GENERATION_AUDIT(ctx))
    await gate.ask("correctness", lambda: steps.CORRECTNESS(ctx))
    init_uri = await steps.INITIALIZATION(ctx)
    learners = {arm.name: Learner(ctx, arm, phase="train", init_uri=init_uri) for arm in ctx.arms}
    trained = {arm.name: learners[arm.name] for arm in ctx.trained_arms}
    await gate.ask("restoration", lambda: steps.RESTORATION(ctx, trained))
    if any(arm.distils for arm in ctx.trained_arms):
        await gate.ask("forced_checks", lambda: steps.FORCED_CHECKS(ctx, init_uri))
    await gate.ask("evaluator", lambda: steps.EVALUATOR(ctx))
    await evaluate_base(ctx, result)
    await pass_activation(gate, ctx, result, init_uri, learners.values())
    await gate.ask("feasibility", lambda: steps.FEASIBILITY(ctx))
    return learners


async def evaluate_base(ctx: RunContext, result: StructuredResult) -> None:
    """Score the base model and post it at once."""
    subject = Subject(
        arm=BASE,
        seed=ctx.arms[0].seed,
        policy_version=0,
        open=lambda: ctx.service.open_sampler(base_model=ctx.spec.base_model, label=BASE),
    )
    await steps.EVALUATION(ctx, subject, BASE)
    result.post_base(mean_scores(ctx, BASE, BASE))
