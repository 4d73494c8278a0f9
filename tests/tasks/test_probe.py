"""The probe's check fails for refused settings; trouble with the service is passed on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tasks.context import RunContext
from tasks.failures import Failure, FailureKind, PermanentServiceError
from tasks.probe import probe_service


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
