"""Only "not here" means that a service is not the embedded one; a failed request means nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from evidence.errors import ConflictError
from tasks.failures import FailureKind, PermanentServiceError, ServiceOutage
from tasks.reachability import Reachability, ServerInfo
from tasks.service_identity import bind_identity
from tasks.service_settings import ServiceSettings
from tests.tasks.fake_runs import FakeService, context
from tests.tasks.fakes import FakeClock

pytestmark = pytest.mark.anyio

Answer = httpx.Response | httpx.HTTPError
LOCAL = {
    "dtype": "float32",
    "threads": 1,
    "models": [{"name": "tiny", "base_sha256": "a" * 64, "source": "built in"}],
}


class Scripted(Reachability):
    """Gives prepared answers; the last one for ever."""

    def __init__(self, *answers: Answer) -> None:
        self.clock = FakeClock()
        super().__init__(ServiceSettings(url="http://127.0.0.1:1"), self.clock)
        self.answers: Sequence[Answer] = answers
        self.asked: list[str] = []

    async def _send(
        self, method: str, path: str, document: Any, *, seconds: float
    ) -> httpx.Response:
        answer = self.answers[min(len(self.asked), len(self.answers) - 1)]
        self.asked.append(path)
        if isinstance(answer, httpx.HTTPError):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answer", "alive"),
    [
        (httpx.Response(200), True),
        (httpx.Response(404), True),
        (httpx.Response(500), True),
        (httpx.Response(503), True),
        (httpx.Response(502), False),
        (httpx.Response(504), False),
        (httpx.Response(521), False),
        (httpx.ConnectError("refused"), False),
    ],
)
async def test_proxy_that_does_not_get_through_does_not_answer_for_the_service(
    answer: Answer, alive: bool
) -> None:
    assert await Scripted(answer).alive() is alive


@pytest.mark.parametrize("status", [403, 404, 405, 501])
async def test_not_found_means_that_the_service_does_not_have_it(status: int) -> None:
    reachability = Scripted(httpx.Response(status))

    assert await reachability.checkpoint("tinker://x") is None
    assert len(reachability.asked) == 1


@pytest.mark.parametrize(
    "failed",
    [
        httpx.ReadTimeout("slow"),
        httpx.Response(500),
        httpx.Response(503),
        httpx.Response(429),
        httpx.Response(200, text="<html>starting</html>"),
    ],
    ids=["timeout", "500", "503", "429", "no JSON"],
)
async def test_failed_request_is_asked_again(failed: Answer) -> None:
    reachability = Scripted(failed, failed, httpx.Response(200, json={"scope": "full"}))

    assert await reachability.checkpoint("tinker://x") == {"scope": "full"}
    assert reachability.clock.slept == [0.5, 1.0]


@pytest.mark.parametrize("failed", [httpx.ReadTimeout("slow"), httpx.Response(500)])
async def test_service_that_never_answers_is_an_outage_within_its_deadline(failed: Answer) -> None:
    """0.5 + 1 + 2 + 4 + 5 + 5 + 5 = 22.5 s; 5 more would pass the 25 s of `reach`."""
    reachability = Scripted(failed)

    with pytest.raises(ServiceOutage) as error:
        await reachability.model("m")

    assert error.value.failure is not None
    assert error.value.failure.kind is FailureKind.OUTAGE
    assert reachability.clock.time == 22.5


async def test_service_that_refuses_to_say_is_not_taken_for_another_one() -> None:
    with pytest.raises(PermanentServiceError, match="HTTP 401"):
        await Scripted(httpx.Response(401)).model("m")


class _Described(FakeService):
    def __init__(self, local: dict[str, Any]) -> None:
        super().__init__()
        self.local = local
        self.once_used = local
        """What it says of itself once somebody has used the model."""

    async def retrying(self, what: str, operation: Any, *, from_scratch: bool = False) -> Any:
        return await operation()

    async def open_sampler(self, *, base_model: str, label: str) -> Any:
        async def compute_logprobs(tokens: Sequence[int]) -> list[float | None]:
            self.local = self.once_used
            return [None, -1.0]

        async def close() -> None:
            return None

        return SimpleNamespace(compute_logprobs=compute_logprobs, close=close)

    async def reach(self) -> ServerInfo:
        return ServerInfo(models=("tiny",), local=self.local)


@pytest.mark.parametrize(
    "later",
    [{}, LOCAL | {"threads": 2}, LOCAL | {"models": []}],
    ids=["silent", "other threads", "without the model"],
)
async def test_run_goes_on_only_with_the_service_it_was_bound_to(
    later: dict[str, Any], tmp_path: Path
) -> None:
    service = _Described(LOCAL)
    ctx = context(tmp_path, service=service)
    await bind_identity(ctx)
    await bind_identity(ctx)
    service.local = service.once_used = later

    with pytest.raises(ConflictError, match="as when the run was started"):
        await bind_identity(ctx)


async def test_service_that_was_started_again_is_asked_once_it_has_its_model(
    tmp_path: Path,
) -> None:
    service = _Described(LOCAL)
    ctx = context(tmp_path, service=service)
    await bind_identity(ctx)
    service.local = {**LOCAL, "models": []}

    await bind_identity(ctx)

    assert service.local == LOCAL


async def test_service_that_says_nothing_binds_nothing(tmp_path: Path) -> None:
    ctx = context(tmp_path, service=_Described({}))

    await bind_identity(ctx)

    assert not ctx.run.store.exists("service-identity.json")
