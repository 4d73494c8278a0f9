"""The conformance kit on one service, from its address to a record."""

from __future__ import annotations

import time
from dataclasses import dataclass

from evidence.conformance import ConformanceRecord, Scope, record_of
from evidence.conformance_probes import CLIPPING, DECAY, NEEDS, TEMPERATURE, TOP_P
from evidence.errors import InputError
from tasks.conformance import chosen, measure
from tasks.conformance_bench import Bench
from tasks.patience import RetryPolicy
from tasks.progress import Progress, ProgressEvent, silent
from tasks.service import Service
from tasks.service_settings import ServiceSettings
from tasks.versions import package_versions

RANK = 8


@dataclass(frozen=True, slots=True)
class ConformanceRequest:
    """What is asked of a service.

    Attributes:
        service: where it is.
        base_model: what is trained; None for the first model that the service names.
        rank: of the adapters.
        scope: the whole kit, or what a comparison asks before it trains.
        needs: what must conform; every probe of what a comparison may use, by default.
        capacity_clients: open up to so many clients at once to see a refusal; 0 does not ask.
        policy: how long the service is asked again.
    """

    service: ServiceSettings
    base_model: str | None = None
    rank: int = RANK
    scope: Scope = "whole"
    needs: frozenset[str] = NEEDS | {TEMPERATURE, TOP_P, CLIPPING, DECAY}
    capacity_clients: int = 0
    policy: RetryPolicy | None = None


async def examine(request: ConformanceRequest, *, progress: Progress = silent) -> ConformanceRecord:
    """Measure a service and judge what it did.

    Raises:
        InputError: if it does not name a model and none was given, or does not serve it.
        ServiceOutage: if it is not there.
        CapacityBlocked: if it refused for too long.
        PermanentServiceError: if it refuses the credentials.
    """
    service = Service(
        request.service,
        policy=request.policy,
        on_wait=lambda what, failure, seconds: progress(
            ProgressEvent("waiting", message=f"{what}: {failure.text}, next try in {seconds:.0f} s")
        ),
    )
    started = time.monotonic()
    server = await service.reach()
    model = _model(request.base_model, server.models)
    try:
        measurements = await measure(
            Bench(service, base_model=model, rank=request.rank),
            chosen(request.scope, request.needs, capacity_clients=request.capacity_clients),
            report=lambda probes: progress(ProgressEvent("conformance", message=probes)),
        )
    finally:
        await service.release_all()
    return record_of(
        measurements,
        scope=request.scope,
        service=request.service.describe(),
        base_model=model,
        versions=package_versions(),
        needs=request.needs,
        seconds=round(time.monotonic() - started, 3),
    )


def _model(asked: str | None, served: tuple[str, ...]) -> str:
    if asked is None:
        if not served:
            raise InputError("--base-model", None, "a model's name (the service names none)")
        return served[0]
    if served and asked not in served:
        raise InputError("--base-model", asked, f"one of {', '.join(served)}")
    return asked
