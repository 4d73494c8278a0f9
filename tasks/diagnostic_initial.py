"""The full initial state of a diagnostic: immutable, loaded, and seen to be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evidence.canonical import canonical_bytes
from evidence.errors import InputError
from tasks.context import RunContext
from tasks.failures import ModelLost, PermanentServiceError
from tasks.initialization import ensure_initialization, initialization_report
from tasks.learner import Learner
from tasks.openings import Openings, other_content
from tasks.tokenizers import prepare_environment

FIELD = "initial_state.checkpoint"
FULL = "full_initialization"


async def initial_checkpoint(ctx: RunContext, uri: str | None, *, accept_unreported: bool) -> str:
    """The checkpoint that is restored: the given one, or a fresh one, once it is known immutable.

    Args:
        ctx: the run.
        uri: an existing checkpoint; None to save the initialization of this experiment.
        accept_unreported: go on where the service says nothing about its checkpoints.

    Raises:
        InputError: if the service does not know it, or does not say that it is immutable and full.
    """
    if uri is None:
        await ensure_initialization(ctx)
    elif not ctx.run.events("initialization"):
        report = await ctx.service.reachability.checkpoint(uri)
        ctx.run.append("initialization", uri=uri, report=report)
    chosen = str(ctx.run.events("initialization")[0]["uri"])
    if uri is not None and uri != chosen:
        raise InputError(FIELD, uri, f"{chosen}, as this diagnostic was begun with")
    _check_report(ctx, chosen, initialization_report(ctx), accept_unreported=accept_unreported)
    return chosen


def _check_report(
    ctx: RunContext, uri: str, report: Mapping[str, Any], *, accept_unreported: bool
) -> None:
    if not report:
        if ctx.server.local:
            raise InputError(FIELD, uri, "a checkpoint that the service has")
        if not accept_unreported:
            expected = (
                "a service that reports whether checkpoints are immutable, or "
                "initial_state.accept_unreported_immutability: true"
            )
            raise InputError(FIELD, uri, expected)
        return
    if report.get("immutable") is not True:
        raise InputError(FIELD, uri, "an immutable checkpoint (this one can be overwritten)")
    if report.get("scope") != FULL:
        expected = f"a checkpoint of scope {FULL}, found {report.get('scope')}"
        raise InputError(FIELD, uri, expected)


async def load_initial(ctx: RunContext, learner: Learner, uri: str) -> None:
    """Load the initial state, build the environment with its tokenizer, and record what was seen.

    Writes: the load, and ``initial-state.json`` once. Calls the service. Safe to repeat.

    Raises:
        InputError: if it does not load, or what was loaded is not what was saved.
    """
    try:
        trainer = await learner.at(0)
    except (PermanentServiceError, ModelLost) as error:
        raise InputError(FIELD, uri, f"a checkpoint that loads ({error.error})") from error
    load = Openings(ctx, learner.arm.name, learner.phase).recorded()[-1]
    _check_load(ctx, uri, load)
    if not ctx.has_environment:
        await prepare_environment(ctx, trainer.info.tokenizer)
    if not ctx.run.store.exists("files/initial-state.json"):
        record = {
            "checkpoint": uri,
            "immutable": initialization_report(ctx).get("immutable"),
            "report": dict(initialization_report(ctx)),
            "load_succeeded": True,
            "observed": load["observed"],
            "info": load["info"],
            "policy_version": load["policy_version"],
            "source": "server_response",
        }
        ctx.run.write_file("initial-state.json", canonical_bytes(record) + b"\n")


def _check_load(ctx: RunContext, uri: str, load: Mapping[str, Any]) -> None:
    """What the service says it loaded must be what it says it saved, on the spec's base model."""
    for problem in other_content(initialization_report(ctx), load["observed"], uri):
        raise InputError(FIELD, problem, "what was saved")
    model = load["info"]["base_model"]
    if model is not None and model != ctx.spec.base_model:
        raise InputError(f"{FIELD} base model", model, f"{ctx.spec.base_model}, the spec's")
