"""The probe's check fails for refused settings; trouble with the service is passed on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tasks.context import RunContext
from tasks.failures import Failure, FailureKind, PermanentServiceError, ServiceOutage
from tasks.probe import probe_example, probe_service


def _context(status: int | None, kind: FailureKind) -> RunContext:
    failure = Failure(kind, "no", status)

    async def retrying(what: str, operation: Any, *, from_scratch: bool) -> Any:
        raise PermanentServiceError("no", what=what, failure=failure, final=True)

    arm = SimpleNamespace(name="dppo")
    service = SimpleNamespace(retrying=retrying)
    made = SimpleNamespace(trained_arms=(arm,), service=service, tell=lambda *_a, **_k: None)
    return cast(RunContext, made)


@pytest.mark.parametrize("status", [400, 422, None])
@pytest.mark.anyio
async def test_refused_settings_fail_the_check(status: int | None) -> None:
    answer = await probe_service(_context(status, FailureKind.PERMANENT))

    assert answer.result.status == "failed"
    assert answer.result.reasons == ("probe dppo: no",)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, FailureKind.PERMANENT),
        (402, FailureKind.PERMANENT),
        (403, FailureKind.PERMANENT),
        (500, FailureKind.OUTAGE),
        (None, FailureKind.OUTAGE),
    ],
)
@pytest.mark.anyio
async def test_trouble_with_the_service_is_no_answer(status: int | None, kind: FailureKind) -> None:
    with pytest.raises(PermanentServiceError, match="probe dppo: no"):
        await probe_service(_context(status, kind))


@pytest.mark.anyio
async def test_an_episode_that_nobody_could_grade_is_no_example() -> None:
    async def run_episode(item_id: str, *_a: Any, **_k: Any) -> Any:
        return SimpleNamespace(
            graded=False, item_id=item_id, info={"failure": "the judge answers 500"}, stop_reason=""
        )

    async def publish(label: str) -> None:
        return None

    environment = SimpleNamespace(train_batch=lambda *_: ["task-7"], run_episode=run_episode)
    rollout = SimpleNamespace(groups=1)
    ctx = SimpleNamespace(
        environment=environment,
        execution=SimpleNamespace(rollout=rollout),
        rollout_settings=None,
        run=SimpleNamespace(spec_sha256="0" * 64),
    )
    arm = SimpleNamespace(name="dppo", sampling_seed=lambda *_: 1)
    trainer = SimpleNamespace(publish=publish)

    with pytest.raises(ServiceOutage, match="grading of task-7: the judge answers 500"):
        await probe_example(cast(Any, ctx), cast(Any, arm), cast(Any, trainer))
