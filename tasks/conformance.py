"""The conformance kit: every probe in turn, on models of its own, which are released.

A probe that the service refuses is recorded as such; a service without capacity ends the kit as it
ends a run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from evidence.conformance import Measurement, Scope
from evidence.conformance_probes import PROBES
from tasks import conformance_sampling as samples
from tasks import conformance_state as state
from tasks import conformance_training as training
from tasks.conformance_bench import Bench
from tasks.failures import CapacityBlocked, ServiceOutage

Report = Callable[[str], None]


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
    reported = ("reported_base_model", "reported_rank", "reported_optimizer")
    sampled = (
        "trainer_against_sampler",
        "scores_of_given_tokens",
        "logprobs_under_temperature",
        "logprobs_under_top_p",
        "seed",
        "samples_of_one_request",
        "stop_token",
    )
    capacity = Part(
        ("capacity_answer",), partial(state.capacity_answer, most=capacity_clients), moves=False
    )
    return (
        Part(reported, state.reports, moves=False),
        Part(("repeatable",), training.repeatable, moves=False),
        Part(("result_order", "unweighted_tokens"), training.result_order, moves=False),
        Part(("sum_over_request",), training.sum_over_request),
        Part(("weights_are_factors",), training.weights_are_factors),
        Part(("gradients_accumulate",), training.gradients_accumulate),
        Part(("forward_adds_nothing",), training.forward_adds_nothing),
        Part(("custom_loss",), training.custom_loss),
        Part(("custom_equals_builtin",), training.custom_equals_builtin),
        Part(("reported_loss",), training.reported_loss, moves=False),
        Part(("learning_rate", "gradient_clip"), training.step_length),
        Part(("weight_decay",), training.weight_decay),
        Part(("replayed_request",), training.replayed_request),
        Part(("optimizer_restored",), state.optimizer_restored),
        Part(("checkpoint_kinds",), state.checkpoint_kinds, moves=False),
        Part(("published_sampler",), state.published_sampler),
        Part(sampled, samples.sampling, moves=False),
        *((capacity,) if capacity_clients > 0 else ()),
    )


async def measure(
    bench: Bench, *, scope: Scope = "whole", capacity_clients: int = 0, report: Report = str
) -> list[Measurement]:
    """Measure every probe of a scope.

    Args:
        bench: where.
        scope: the whole kit, or what a comparison asks before it trains.
        capacity_clients: see `parts`.
        report: told about each part before it begins.

    Raises:
        CapacityBlocked: refused for too long.
        ServiceOutage: out of reach for too long.
    """
    found: list[Measurement] = []
    for part in parts(capacity_clients=capacity_clients):
        if scope == "whole" or any(PROBES[name].short for name in part.probes):
            report(", ".join(part.probes))
            found += await _measured(bench, part)
    return found


async def _measured(bench: Bench, part: Part) -> list[Measurement]:
    if part.moves and bench.units is None:
        return _refused(part.probes, "no movement could be measured (see repeatable)")
    what = f"conformance, {part.probes[0]}"
    try:
        found = await bench.service.retrying(what, partial(part.measure, bench), from_scratch=True)
    except (CapacityBlocked, ServiceOutage):
        raise
    except Exception as error:  # noqa: BLE001 - whatever the SDK makes of a wrong answer is a finding
        if part.probes == ("repeatable",):
            bench.units = None
        return _refused(part.probes, f"{type(error).__name__}: {error}")
    missing = [name for name in part.probes if name not in {one.probe for one in found}]
    return [*found, *_refused(missing, "results come back in another form than was asked for")]


def _refused(probes: Sequence[str], reason: str) -> list[Measurement]:
    return [Measurement(probe, refused=" ".join(reason.split())[:500]) for probe in probes]
