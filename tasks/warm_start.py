"""The warm start: supervised steps through the protocol, or the shipped adapter that they gave.

Both ways end in weights at the service, without an optimizer: every arm begins with a fresh one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import tinker

from evidence.canonical import canonical_lines
from evidence.errors import InputError
from evidence.execution import ExecutionFile
from evidence.run_settings import WarmStart
from tasks.adapter_files import AdapterFiles, find_adapter
from tasks.context import RunContext
from tasks.datums import supervised_datum_of
from tasks.demonstration_data import (
    Demonstrations,
    epoch_batches,
    loss_tokens,
    make_demonstrations,
)
from tasks.failures import PermanentServiceError
from tasks.service import LoraSettings, Service
from tasks.tokenizers import prepare_environment
from tasks.trainer import Trainer

EVENT, EPOCH_EVENT = "warm_start", "warm_start_epoch"
DEMONSTRATIONS_FILE = "warm-start-demonstrations.jsonl"


@dataclass(frozen=True, slots=True)
class EpochReport:
    """One finished epoch of a warm start.

    Attributes:
        epoch: from 1.
        uri: its checkpoint, optimizer included.
        losses: mean cross-entropy of every step, in nats per trained token; None where the service
            does not say.
    """

    epoch: int
    uri: str
    losses: tuple[float | None, ...]


class WarmStartTraining:
    """The supervised steps, epoch by epoch; each epoch ends in a checkpoint.

    Args:
        service: any Tinker-compatible service.
        lora: the adapter to be trained.
        settings: epochs, batch size, rate, seed.
        adam: betas and eps of the steps; its rate is replaced.
        tell: told `(step, steps)` after every step.
    """

    def __init__(
        self,
        service: Service,
        lora: LoraSettings,
        settings: WarmStart,
        *,
        adam: tinker.AdamParams,
        tell: Callable[[int, int], None],
    ) -> None:
        self._service, self._settings, self._tell = service, settings, tell
        # What the arms' optimizer is to hold does not bind these steps.
        self._lora = replace(lora, optimizer=None)
        self._adam = tinker.AdamParams(
            learning_rate=settings.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
        )

    async def run(
        self,
        data: Demonstrations,
        *,
        done: Sequence[EpochReport],
        keep: Callable[[EpochReport], None],
    ) -> str:
        """Train the epochs that are not done yet; returns the address of the last checkpoint.

        Args:
            data: the demonstrations.
            done: finished epochs, in order.
            keep: keeps a finished epoch, so that it is not trained again.

        Raises:
            ServiceError: a final one; finished epochs stay kept.
        """
        uri = done[-1].uri if done else None
        for epoch in range(len(done), self._settings.epochs):
            what = f"epoch {epoch + 1} of the warm start"
            work = partial(self._epoch, data, epoch, uri)
            report = await self._service.retrying(what, work, from_scratch=True)
            keep(report)
            uri = report.uri
        if uri is None:
            raise InputError("warm_start.epochs", self._settings.epochs, "at least 1")
        return uri

    async def _epoch(self, data: Demonstrations, epoch: int, uri: str | None) -> EpochReport:
        """Train one epoch from the checkpoint of the one before; nothing else is built upon."""
        label = f"warm-start-{epoch + 1}"
        trainer = await (
            self._service.create_trainer(self._lora, label=label)
            if uri is None
            else self._service.load_trainer(uri, label=label)
        )
        try:
            losses = [
                await self._step(trainer, data, places, epoch)
                for places in enumerate(epoch_batches(self._settings, epoch))
            ]
            return EpochReport(epoch + 1, await trainer.save(label), tuple(losses))
        finally:
            await trainer.close()

    async def _step(
        self, trainer: Trainer, data: Demonstrations, places: tuple[int, list[int]], epoch: int
    ) -> float | None:
        number, chosen = places
        sequences = [data.sequences[place] for place in chosen]
        datums = [supervised_datum_of(sequence) for sequence in sequences]
        metrics = await trainer.forward_backward(datums, "cross_entropy")
        await trainer.optim_step(self._adam)
        steps = -(-self._settings.demonstrations // self._settings.batch_size)
        self._tell(epoch * steps + number + 1, steps * self._settings.epochs)
        total = metrics.get("loss:sum")
        return None if total is None else total / max(1, loss_tokens(sequences))


def check_warm_start(execution: ExecutionFile) -> None:
    """Refuse a warm start whose adapter cannot be used, before anything is started.

    Raises:
        InputError: naming the setting.
    """
    if execution.warm_start is not None:
        named_adapter(execution.warm_start)


def named_adapter(settings: WarmStart) -> AdapterFiles | None:
    """The adapter that the settings name, read and checked; None where they name none."""
    if settings.adapter is None:
        return None
    return find_adapter(settings.adapter, sha256=settings.adapter_sha256)


async def warm_weights(ctx: RunContext, settings: WarmStart) -> str:
    """Have the warm start's weights at the service, and return their address.

    Writes: the demonstrations, an event for every epoch trained, and the event `warm_start`. Calls
    the service. Safe to repeat: what is finished is only looked up.

    Raises:
        InputError: if the adapter is not the one that the execution file names, or not what its
            record says.
    """
    known = ctx.run.events(EVENT)
    if known:
        return str(known[0]["uri"])
    await _ensure_environment(ctx)
    data = await make_demonstrations(ctx.environment, settings)
    ctx.run.write_file(DEMONSTRATIONS_FILE, canonical_lines(data.rows()))
    adapter = named_adapter(settings)
    obstacle = "no adapter is named" if adapter is None else await _obstacle(ctx, adapter, data)
    if adapter is not None and obstacle is None:
        uri = await _imported(ctx, adapter)
    else:
        uri = await _trained(ctx, settings, data)
    ctx.run.append(
        EVENT,
        uri=uri,
        how="shipped adapter" if obstacle is None else "trained through the protocol",
        why=obstacle,
        adapter_sha256=None if adapter is None or obstacle else adapter.adapter_sha256,
        demonstrations=len(data.episodes),
        demonstrations_sha256=data.sha256,
        loss_tokens=loss_tokens(data.sequences),
    )
    return uri


async def _ensure_environment(ctx: RunContext) -> None:
    """Build the environment with the service's tokenizer, where no probe has done it."""
    if ctx.has_environment:
        return
    trainer = await ctx.service.create_trainer(ctx.lora, label="warm-start-look")
    try:
        await prepare_environment(ctx, trainer.info.tokenizer)
    finally:
        await trainer.close()


async def _obstacle(ctx: RunContext, adapter: AdapterFiles, data: Demonstrations) -> str | None:
    """Why the shipped adapter does not fit, so that its steps are taken here instead."""
    local = (await ctx.service.reach()).local  # what is loaded by now
    if not local:
        return "the service takes in no adapter"
    bases = {base["name"]: base["base_sha256"] for base in local.get("models", ())}
    served = bases.get(ctx.spec.base_model)
    if adapter.record["base_model"] != ctx.spec.base_model:
        return f"the adapter belongs to {adapter.record['base_model']}"
    if served is not None and served != adapter.base_sha256:
        return (
            f"the adapter belongs to the base {adapter.base_sha256[:16]}, served is {served[:16]}"
        )
    shape, lora = adapter.record["lora_config"], ctx.execution.lora
    for name in ("rank", "train_attn", "train_mlp", "train_unembed"):
        if shape[name] != getattr(lora, name):
            return f"the adapter's {name} is {shape[name]}, lora.{name} is {getattr(lora, name)}"
    if adapter.record["demonstrations_sha256"] != data.sha256:
        return "the adapter was trained on other demonstrations"
    return None


async def _imported(ctx: RunContext, adapter: AdapterFiles) -> str:
    """Hand the adapter to the embedded service, which compares both digests."""
    request = adapter.to_request()
    try:
        report = await ctx.service.retrying(
            "import of the warm start's adapter",
            lambda: ctx.service.reachability.import_adapter(request),
        )
    except PermanentServiceError as error:
        found = adapter.record["adapter_sha256"]
        raise InputError("warm_start.adapter", found, f"what it says ({error.error})") from error
    return str(report["path"])


async def _trained(ctx: RunContext, settings: WarmStart, data: Demonstrations) -> str:
    training = WarmStartTraining(
        ctx.service,
        ctx.lora,
        settings,
        adam=ctx.adam,
        tell=lambda done, total: ctx.tell("warm start", done=done, total=total),
    )
    done = [_report(event) for event in ctx.run.events(EPOCH_EVENT)]

    def keep(report: EpochReport) -> None:
        ctx.run.append(EPOCH_EVENT, **(asdict(report) | {"losses": list(report.losses)}))

    return await training.run(data, done=done, keep=keep)


def _report(event: dict[str, Any]) -> EpochReport:
    return EpochReport(event["epoch"], event["uri"], tuple(event["losses"]))
