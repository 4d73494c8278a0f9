"""The only module that opens Tinker clients, and the owner of every retry.

Each client has its own session, so that closing it releases exactly what it held, and losing it
touches nothing else. Calls are abandoned at a deadline, never cancelled. What comes out of here is
either a result or a `ServiceError`; errors that are not the service's are passed on unchanged.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import tinker
from tinker.lib.retry_handler import RetryConfig

from tasks.clock import Clock, SystemClock
from tasks.failures import (
    CapacityBlocked,
    Failure,
    ModelLost,
    PermanentServiceError,
    ServiceError,
    ServiceOutage,
    UnknownOutcome,
    classify,
    session_forgotten,
)
from tasks.patience import Patience, RetryPolicy
from tasks.reachability import Reachability, ServerInfo
from tasks.sampling import ServiceSampler
from tasks.sdk import (
    end_session,
    finished,
    header_arguments,
    optimizer_arguments,
    session_left_open,
)
from tasks.sdk_manners import teach_manners
from tasks.service_settings import ServiceSettings, quiet_sdk
from tasks.trainer import Trainer, TrainerInfo, describe
from tasks.watch import Watch, in_thread

__all__ = [
    "CapacityBlocked",
    "LoraSettings",
    "ModelLost",
    "PermanentServiceError",
    "Service",
    "ServiceError",
    "ServiceOutage",
    "UnknownOutcome",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """What a new adapter looks like."""

    base_model: str
    rank: int
    seed: int | None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False
    optimizer: Mapping[str, float] | None = None
    """Hyperparameters that the service is asked to hold for the model's lifetime, so that it can
    report them before the first step. Only the embedded service knows how to."""


@dataclass(frozen=True, slots=True)
class Release:
    """A client that was let go.

    Attributes:
        client: what it was opened for.
        confirmed: whether the service has said that its session has ended.
    """

    client: str
    confirmed: bool


class Service:
    """One Tinker-compatible service, with one retry policy and one clock.

    Args:
        settings: where it is.
        policy: waiting times.
        clock: source of time.
        rng: source of jitter.
        steps_completed: comparison steps completed so far; decides how long refusals are waited
            out.
        on_wait: told about every wait: what is waited for, why, and for how many seconds.
        seconds_left: of the wall-time budget, None without one; no wait is begun that passes it.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        *,
        policy: RetryPolicy | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        steps_completed: Callable[[], int] = lambda: 0,
        on_wait: Callable[[str, Failure, float], None] | None = None,
        seconds_left: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.clock: Clock = clock or SystemClock()
        self._policy = policy or RetryPolicy()
        self._rng = rng or random.Random()
        self._steps_completed, self._on_wait = steps_completed, on_wait
        self._seconds_left = seconds_left
        self.reachability = Reachability(settings, self.clock)
        self.watch = Watch(self.clock, settings.deadlines, self.reachability.alive)
        self._open: dict[tinker.ServiceClient, str] = {}
        self.releases: list[Release] = []
        quiet_sdk(settings)
        teach_manners()

    def follow(
        self,
        *,
        steps_completed: Callable[[], int],
        on_wait: Callable[[str, Failure, float], None],
        seconds_left: Callable[[], float | None],
        on_slow: Callable[[str, float], None] | None = None,
    ) -> None:
        """Count steps, bound waits and report them for a run, once there is one."""
        self._steps_completed, self._on_wait = steps_completed, on_wait
        self._seconds_left, self.watch.on_slow = seconds_left, on_slow

    def towards(self, url: str) -> Service:
        """The same service under another address, with the same policy, clock and headers."""
        return Service(
            replace(self.settings, url=url),
            policy=self._policy,
            clock=self.clock,
            rng=self._rng,
            steps_completed=self._steps_completed,
            on_wait=self._on_wait,
            seconds_left=self._seconds_left,
        )

    async def reach(self) -> ServerInfo:
        """Find out within seconds whether the service is there, before the SDK is started.

        Raises:
            ServiceOutage: if nothing answered.
            PermanentServiceError: if it refuses the credentials.
        """
        return await self.reachability.reach()

    def patience(self) -> Patience:
        """The waiting of one request, or of one chain of requests that belong together."""
        return Patience(
            self._policy,
            self.clock,
            self._rng,
            steps_completed=self._steps_completed,
            on_wait=self._on_wait,
            seconds_left=self._seconds_left,
        )

    async def retrying(
        self,
        what: str,
        operation: Callable[[], Awaitable[T]],
        *,
        from_scratch: bool = False,
        own_session: bool = False,
    ) -> T:
        """Repeat an operation that is safe to repeat, for as long as the policy allows.

        Args:
            what: names the operation.
            operation: what is repeated.
            from_scratch: whether the operation makes its own clients, so that it may be repeated
                after one of them was lost. Otherwise a lost model is not waited for: the caller
                has to restore it first.
            own_session: whether every try opens a session of its own, so that it may be repeated
                when the service has forgotten the session, and once when it knows a model no more.

        Raises:
            CapacityBlocked: refused for too long.
            ServiceOutage: out of reach for too long.
            ModelLost: at once, unless the operation starts from scratch or in its own session.
            PermanentServiceError: at once.
        """
        patience, once_more = self.patience(), own_session
        while True:
            try:
                return await operation()
            except ServiceError as error:
                if error.final or error.failure is None:
                    raise
                session = own_session and session_forgotten(error.failure)
                if isinstance(error, ModelLost) and not (from_scratch or session):
                    if not once_more:
                        raise
                    once_more = False
                await patience.wait(error.failure, what)

    async def create_trainer(self, lora: LoraSettings, *, label: str) -> Trainer:
        """Create a new adapter on the base model, waiting for capacity if need be."""
        return await self._open_trainer(f"create training client {label}", _made(lora, label))

    async def try_trainer(self, lora: LoraSettings, *, label: str) -> Trainer:
        """Create a new adapter on the base model, or say at once why not: nothing is waited out."""
        return await self._attempt_trainer(f"create training client {label}", _made(lora, label))

    async def load_trainer(self, uri: str, *, label: str, optimizer: bool = True) -> Trainer:
        """Create a client from a checkpoint, with or without its optimizer's state."""

        def make(client: tinker.ServiceClient) -> Any:
            load = (
                client.create_training_client_from_state_with_optimizer
                if optimizer
                else client.create_training_client_from_state
            )
            return load(uri, user_metadata={"label": label})

        return await self._open_trainer(f"load training client {label}", make)

    async def try_cold(self, uri: str, *, label: str) -> Trainer:
        """Create a client with a checkpoint's weights alone, or say at once why not."""
        return await self._attempt_trainer(
            f"load weights {label}",
            lambda made: made.create_training_client_from_state(
                uri, user_metadata={"label": label}
            ),
        )

    async def load_weights(self, uri: str, lora: LoraSettings, *, label: str) -> Trainer:
        """Create a client with a checkpoint's weights and a fresh optimizer, as `lora` holds it."""

        def make(client: tinker.ServiceClient) -> Any:
            return client.create_training_client_from_state(
                uri, user_metadata={"label": label}, **optimizer_arguments(lora.optimizer)
            )

        return await self._open_trainer(f"load weights {label}", make)

    async def open_sampler(
        self, *, base_model: str | None = None, path: str | None = None, label: str
    ) -> ServiceSampler:
        """Open a sampler of a base model, or of published weights."""

        def make(client: tinker.ServiceClient) -> Any:
            return client.create_sampling_client(
                model_path=path, base_model=base_model, retry_config=self.retry_config()
            )

        what = f"open sampler {label}"
        client, sampler = await self.retrying(
            what,
            lambda: self._attempt(what, make),
            from_scratch=path is None,  # weights that are gone must be published again first
            own_session=True,
        )
        return ServiceSampler(self, sampler, label=label, session=client)

    def retry_config(self) -> RetryConfig:
        """The only bound that the SDK has on sampling."""
        return RetryConfig(progress_timeout=self.settings.deadlines.sample_progress)

    async def call(
        self, what: str, work: Callable[[], T], seconds: float, *, established: bool = True
    ) -> T:
        """Run one blocking SDK call in a thread, bounded and with its errors classified."""
        began = self.clock.now()
        try:
            return await self.watch.settle(in_thread(work, what), seconds, what)
        except Exception as error:
            spent = self.clock.now() - began
            raise self.translated(error, what, established=established, spent=spent) from error

    def translated(
        self, error: Exception, what: str, *, established: bool = True, spent: float = 0.0
    ) -> Exception:
        """The `ServiceError` that an SDK error stands for; any other error unchanged.

        Args:
            error: what the call raised.
            what: names the call.
            established: see `tasks.failures.classify`.
            spent: seconds that the call took, with the SDK's own retries in them.
        """
        failure = classify(error, established=established)
        if failure is None:
            return error
        failure = replace(failure, spent=spent)
        if isinstance(error, ServiceError):
            error.failure = failure
            return error
        return failure.as_error(what)

    async def release(self, client: tinker.ServiceClient) -> bool:
        """End a client's session, so that the service frees what it held.

        Never waits longer than `deadlines.close`: with a dead server the SDK would wait for five
        minutes.

        Returns:
            Whether the service confirmed it.
        """
        label = self._open.pop(client, None)
        confirmed = await self._closed(client)
        if label is not None:
            self.releases.append(Release(label, confirmed=confirmed))
        return confirmed

    async def _closed(self, client: tinker.ServiceClient) -> bool:
        seconds = self.settings.deadlines.close
        try:
            if await self.call("close session", lambda: end_session(client, "success"), seconds):
                return True
        except (ServiceError, RuntimeError):
            return False
        left = session_left_open(client)
        return left is not None and await self.reachability.finish(left, seconds=seconds)

    async def release_all(self) -> bool:
        """Release every client that is still open; whether all were confirmed."""
        return all([await self.release(client) for client in list(self._open)])

    async def _open_trainer(
        self, what: str, make: Callable[[tinker.ServiceClient], Any]
    ) -> Trainer:
        return await self.retrying(
            what, lambda: self._attempt_trainer(what, make), own_session=True
        )

    async def _attempt_trainer(
        self, what: str, make: Callable[[tinker.ServiceClient], Any]
    ) -> Trainer:
        """Make one training client, and ask what it is while a thread of its own may wait."""

        def ready(client: tinker.ServiceClient) -> tuple[Any, TrainerInfo]:
            training = finished(make(client))
            return training, describe(training)

        client, (training, info) = await self._attempt(what, ready)
        return Trainer(self, training, session=client, info=info)

    async def _attempt(
        self, what: str, make: Callable[[tinker.ServiceClient], Any]
    ) -> tuple[tinker.ServiceClient, Any]:
        """Open a session and make one client in it; a failed try leaves nothing behind."""
        client = self._new_client()
        self._open[client] = what
        deadline = self.settings.deadlines.create
        try:
            made = await self.call(
                what, lambda: finished(make(client)), deadline, established=False
            )
        except Exception:
            await self._drop(client)
            raise
        return client, made

    async def _drop(self, client: tinker.ServiceClient) -> None:
        """Let go of a client that did not work; ending its session is tried without waiting."""
        self._open.pop(client, None)
        in_thread(lambda: end_session(client, "errored"), "drop session")

    def _new_client(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(
            base_url=self.settings.url,
            api_key=self.settings.api_key(),
            **header_arguments(self.settings.headers()),
        )


def _made(lora: LoraSettings, label: str) -> Callable[[tinker.ServiceClient], Any]:
    """What creates an adapter of these settings in a session."""

    def make(client: tinker.ServiceClient) -> Any:
        return client.create_lora_training_client(
            base_model=lora.base_model,
            rank=lora.rank,
            seed=lora.seed,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
            train_unembed=lora.train_unembed,
            user_metadata={"label": label},
            **optimizer_arguments(lora.optimizer),
        )

    return make
