"""The conformance kit: every probe in turn, on models of its own, which are released.

A probe that the service refuses is recorded as such; a service without capacity ends the kit as it
ends a run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from evidence.conformance import Measurement, Scope
from evidence.conformance_probes import NEEDS, PROBES
from tasks import conformance_sampling as samples
from tasks import conformance_state as state
from tasks import conformance_training as training
from tasks.conformance_bench import Bench
from tasks.failures import (
    CapacityBlocked,
    FailureKind,
    PermanentServiceError,
    ServiceError,
    ServiceOutage,
)

Report = Callable[[str], None]
UNITS = "repeatable"
"""The part that measures the units of all movements."""
_WHO_SENT_IT = frozenset({401, 402, 403})


def _quietly(probes: str) -> None:
    """A report that goes nowhere."""
    del probes


@dataclass(frozen=True, slots=True)
class Part:
    """Probes that are measured together.

    Attributes:
        probes: their names.
        measure: measures them.
        moves: whether it measures movements, which need their units.
    """

    probes: tuple[str, ...]
    measure: Callable[[Bench], Awaitable[list[Measurement]]]
    moves: bool = True


def parts(*, capacity_clients: int = 0) -> tuple[Part, ...]:
    """Every part of the kit, in order.

    Args:
        capacity_clients: open up to so many clients at once to see a refusal; 0 does not ask,
            because it takes the room of others.
    """
    reported = (
        *("reported_base_model", "reported_rank"),
        *("reported_optimizer", "reported_optimizer_settings"),
    )
    agreement = ("trainer_against_sampler", "scores_of_given_tokens")
    meaning = ("logprobs_under_temperature", "logprobs_under_top_p")
    choices = ("seed", "samples_of_one_request", "stop_token")
    capacity = Part(
        ("capacity_answer",), partial(state.capacity_answer, most=capacity_clients), moves=False
    )
    return (
        Part(reported, state.reports, moves=False),
        Part(agreement, samples.agreement, moves=False),
        Part(meaning, samples.meaning, moves=False),
        Part(choices, samples.choices, moves=False),
        Part(("result_order", "unweighted_tokens"), training.result_order, moves=False),
        Part(("forward_adds_nothing",), training.forward_adds_nothing, moves=False),
        Part((UNITS,), training.repeatable, moves=False),
        Part(("sum_over_request",), training.sum_over_request),
        Part(("custom_loss",), training.custom_loss),
        Part(("weights_are_factors", "reported_loss"), training.weights_are_factors),
        Part(("gradients_accumulate",), training.gradients_accumulate),
        Part(("gradient_cleared", "momentum"), training.step_takes_all),
        Part(("learning_rate", "gradient_clip"), training.step_length),
        Part(("custom_equals_builtin",), training.custom_equals_builtin),
        Part(("published_sampler",), state.published_sampler),
        Part(("checkpoint_kinds",), state.checkpoint_kinds, moves=False),
        Part(("optimizer_restored", "reported_checkpoint"), state.optimizer_restored),
        Part(("replayed_request",), training.replayed_request),
        Part(("weight_decay",), training.weight_decay),
        *((capacity,) if capacity_clients > 0 else ()),
    )


def chosen(scope: Scope, needs: Collection[str], *, capacity_clients: int = 0) -> tuple[Part, ...]:
    """The parts of a scope: the whole kit, or what a comparison asks, with what it alone needs."""
    special = set(needs) - NEEDS
    return tuple(
        part
        for part in parts(capacity_clients=capacity_clients)
        if scope == "whole"
        or any(PROBES[name].short or special & {*PROBES[name].needed_by} for name in part.probes)
    )


async def measure(
    bench: Bench, wanted: Sequence[Part], *, report: Report = _quietly
) -> list[Measurement]:
    """Measure parts of the kit, in order; what they opened is released.

    Args:
        bench: where.
        wanted: the parts, as `chosen`.
        report: told about each part before it begins.

    Raises:
        CapacityBlocked: refused for too long.
        ServiceOutage: out of reach for too long.
        PermanentServiceError: if the service refuses the credentials, or keeps failing.
    """
    found: list[Measurement] = []
    try:
        for part in wanted:
            report(", ".join(part.probes))
            found += await _measured(bench, part)
    finally:
        await bench.close()
    return found


async def _measured(bench: Bench, part: Part) -> list[Measurement]:
    needs_units = part.moves or part.probes == (UNITS,)
    if needs_units and bench.forwards_count:
        return _refused(part.probes, "a forward alone moves the model (see forward_adds_nothing)")
    if part.moves and bench.units is None:
        return _refused(part.probes, f"no movement could be measured (see {UNITS})")

    async def once() -> list[Measurement]:
        try:
            return await part.measure(bench)
        except ServiceError:
            await bench.leave()  # whatever was lost, the next try begins with a new model
            raise

    try:
        found = await bench.service.retrying(
            f"conformance, {part.probes[0]}", once, from_scratch=True
        )
    except (CapacityBlocked, ServiceOutage):
        raise
    except Exception as error:
        if isinstance(error, PermanentServiceError) and not _refuses_this(error):
            raise
        await bench.leave()
        return _refused(part.probes, f"{type(error).__name__}: {error}")
    missing = [name for name in part.probes if name not in {one.probe for one in found}]
    return [*found, *_refused(missing, "results come back in another form than was asked for")]


def _refuses_this(error: PermanentServiceError) -> bool:
    """Whether the request itself was refused, not who sent it, and not for lack of health."""
    failure = error.failure
    permanent = failure is None or failure.kind is FailureKind.PERMANENT
    return permanent and (failure is None or failure.status not in _WHO_SENT_IT)


def _refused(probes: Sequence[str], reason: str) -> list[Measurement]:
    return [Measurement(probe, refused=" ".join(reason.split())[:500]) for probe in probes]
