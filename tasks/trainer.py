"""One training client: what it can be asked, with every answer bounded and classified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tinker
from numpy.typing import NDArray

from tasks.failures import ServiceError
from tasks.sampling import ServiceSampler
from tasks.sdk import finished, reported_optimizer

if TYPE_CHECKING:
    from tasks.service import Service

CustomLoss = Callable[[list[tinker.Datum], list[Any]], tuple[Any, dict[str, float]]]


@dataclass(frozen=True, slots=True)
class TrainerInfo:
    """What the service says a training client is; None where it does not say."""

    model_id: str
    base_model: str | None
    lora_rank: int | None
    is_lora: bool | None
    optimizer: str | None
    tokenizer: str | None


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """What came back from one forward-backward with the optimizer step behind it.

    `loss_error` means that the gradient was not accumulated for certain, and the client is
    poisoned. `step_error` without `loss_error` means that only the step is in doubt. `abandoned`
    means that it was given up at our deadline: the SDK may still be at it, so that the client must
    be dropped whatever the step's outcome.
    """

    metrics: dict[str, float]
    loss_error: Exception | None = None
    step_error: Exception | None = None
    abandoned: bool = False


class Trainer:
    """A training client in a session of its own."""

    def __init__(
        self,
        service: Service,
        client: tinker.TrainingClient,
        *,
        session: tinker.ServiceClient,
        info: TrainerInfo,
    ) -> None:
        self._service, self._client, self._session = service, client, session
        self._deadlines = service.settings.deadlines
        self.info = info
        """What the service reported when the client was created."""

    async def forward(self, datums: Sequence[tinker.Datum]) -> list[NDArray[np.float32]]:
        """Log-probability of every target token, nats, [T] per datum; nothing is accumulated."""
        return await self._forward(datums, "forward", self._deadlines.train)

    async def score_again(self, datums: Sequence[tinker.Datum]) -> list[NDArray[np.float32]]:
        """`forward` with the deadline for deciding about a step that may block the way."""
        return await self._forward(datums, "fingerprint", self._deadlines.decide)

    async def _forward(
        self, datums: Sequence[tinker.Datum], what: str, seconds: float
    ) -> list[NDArray[np.float32]]:
        def work() -> Any:
            return self._client.forward(list(datums), "cross_entropy").result()

        output = await self._service.call(what, work, seconds)
        return [_logprobs(record) for record in output.loss_fn_outputs]

    async def forward_backward(
        self, datums: Sequence[tinker.Datum], loss_fn: str, config: dict[str, float] | None = None
    ) -> dict[str, float]:
        """Accumulate the gradient of a loss that the service has built in; returns its metrics."""

        def work() -> Any:
            name: Any = loss_fn
            return self._client.forward_backward(list(datums), name, config).result()

        output = await self._service.call(f"built-in {loss_fn}", work, self._deadlines.train)
        return dict(output.metrics)

    async def forward_backward_custom(
        self, datums: Sequence[tinker.Datum], loss: CustomLoss
    ) -> dict[str, float]:
        """Accumulate the gradient of a loss computed here; returns the metrics."""

        def work() -> Any:
            return self._client.forward_backward_custom(list(datums), loss).result()

        output = await self._service.call("custom loss", work, self._deadlines.train)
        return dict(output.metrics)

    async def optim_step(self, adam: tinker.AdamParams) -> None:
        """Apply what was accumulated."""

        def work() -> Any:
            return self._client.optim_step(adam).result()

        await self._service.call("optimizer step", work, self._deadlines.train)

    async def step(
        self, datums: Sequence[tinker.Datum], loss: CustomLoss, adam: tinker.AdamParams
    ) -> StepAnswer:
        """One custom forward-backward and the optimizer step behind it, sent together.

        Both requests are always waited for; errors of the service come back as values, because
        what they mean depends on which of the two failed. Any other error is raised.
        """
        answered: list[Any] = []

        def work() -> None:
            first = self._client.forward_backward_custom(list(datums), loss)
            second = self._client.optim_step(adam)
            answered.append(_outcome(first.result))
            answered.append(_outcome(second.result))

        lost: ServiceError | None = None
        try:
            await self._service.call("training step", work, self._deadlines.train)
        except ServiceError as error:  # the deadline, or nobody answers
            lost = error
        outcomes = [*answered, lost, lost][:2]
        loss_error = self._service_error(outcomes[0], "custom loss")
        return StepAnswer(
            {} if loss_error else dict(outcomes[0].metrics),
            loss_error=loss_error,
            step_error=self._service_error(outcomes[1], "optimizer step"),
            abandoned=lost is not None,
        )

    async def save(self, name: str) -> str:
        """Save weights and optimizer state under a name; returns the checkpoint's URI."""

        def work() -> Any:
            return self._client.save_state(name).result()

        return str((await self._service.call(f"save {name}", work, self._deadlines.save)).path)

    async def publish(self, label: str) -> ServiceSampler:
        """A sampler of the current weights that lives as long as this client's session."""
        config = self._service.retry_config()

        def work() -> Any:
            return finished(self._client.save_weights_and_get_sampling_client(retry_config=config))

        sampler = await self._service.call(f"publish {label}", work, self._deadlines.save)
        return ServiceSampler(self._service, sampler, label=label, session=None)

    async def publish_named(self, name: str) -> str:
        """Save the current weights for sampling under a name; returns their URI."""

        def work() -> Any:
            return self._client.save_weights_for_sampler(name).result()

        return str((await self._service.call(f"publish {name}", work, self._deadlines.save)).path)

    async def observe(self) -> dict[str, Any] | None:
        """What the embedded service reports about the loaded model; None from other services."""
        return await self._service.reachability.model(self.info.model_id)

    async def close(self) -> bool:
        """Release the client; whether the service confirmed it."""
        return await self._service.release(self._session)

    def _service_error(self, outcome: Any, what: str) -> Exception | None:
        if not isinstance(outcome, Exception):
            return None
        error = self._service.translated(outcome, what)
        if not isinstance(error, ServiceError):
            raise error
        return error


def _outcome(result: Callable[[], Any]) -> Any:
    try:
        return result()
    except Exception as error:  # noqa: BLE001 - classified by the caller
        return error


def _logprobs(record: Any) -> NDArray[np.float32]:
    data = record["logprobs"]
    return np.asarray(data.data, dtype=np.float32)


def describe(client: tinker.TrainingClient) -> TrainerInfo:
    """Ask what a client is; an older SDK sends a request for that and waits for the answer."""
    info = client.get_info()
    data = getattr(info, "model_data", None)
    optimizer = reported_optimizer(info)
    return TrainerInfo(
        model_id=str(client.model_id),
        base_model=getattr(info, "model_name", None) or getattr(data, "model_name", None),
        lora_rank=getattr(info, "lora_rank", None),
        is_lora=getattr(info, "is_lora", None),
        optimizer=optimizer,
        tokenizer=getattr(data, "tokenizer_id", None),
    )
