"""Every load of a training state, counted, checked and recorded.

Load 0 of an arm is its creation from the initialization checkpoint; every later one is a restore.
What the service reports about the weights and the optimizer is read after each load, before the
next update, and held against what it reports about the checkpoint and against the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from evidence.restoration_arm import same_family
from evidence.values import same
from tasks.context import RunContext
from tasks.failures import Failure, FailureKind, PermanentServiceError
from tasks.journal_tables import write_restores
from tasks.trainer import Trainer

CONTENT = ("adapter_sha256", "base_sha256")
"""What the embedded service reports about the weights of a loaded model and of a checkpoint."""


class Openings:
    """The loads of one arm's training state in one phase."""

    def __init__(self, ctx: RunContext, arm: str, phase: str) -> None:
        self._ctx, self._arm, self._phase = ctx, arm, phase

    def recorded(self) -> list[dict[str, Any]]:
        """The loads so far, oldest first."""
        return [
            event
            for event in self._ctx.run.events("client_opened")
            if (event["arm"], event["phase"]) == (self._arm, self._phase)
        ]

    async def load(self, uri: str, version: int, *, replayed: int) -> Trainer:
        """Load a checkpoint with its optimizer and record what the service says it has loaded.

        Args:
            uri: the checkpoint.
            version: updates that it contains.
            replayed: stored updates that are applied again after it.

        Raises:
            PermanentServiceError: if another state than that of the checkpoint was loaded, or a
                restored optimizer is not the planned one. No update follows such a load; it is
                kept as an event `load_refused` and is not one of the restores.
            ServiceOutage: if the embedded service, which can say what it has loaded, did not.
        """
        trainer = await self._ctx.service.load_trainer(uri, label=f"{self._phase}-{self._arm}")
        try:
            return await self._checked(trainer, uri, version, replayed=replayed)
        except BaseException:
            await trainer.close()
            raise

    async def _checked(self, trainer: Trainer, uri: str, version: int, *, replayed: int) -> Trainer:
        restore = len(self.recorded())
        observed = await trainer.observe()
        if observed is None and self._ctx.server.local:
            text = f"no report about the loaded model {trainer.info.model_id}"
            raise Failure(FailureKind.OUTAGE, text).as_error(f"look at {self._arm} after a load")
        record = {
            "arm": self._arm,
            "phase": self._phase,
            "restore": restore,
            "policy_version": version,
            "requested_uri": uri,
            "loaded_uri": (observed or {}).get("restored_from"),
            "replayed_updates": replayed,
            "info": _info(trainer),
            "observed": observed,
        }
        self._refuse(record, other_content(await self._saved(uri, observed), observed, uri))
        name = f"ledger.jsonl client_opened {self._arm} {self._phase} {restore}"
        self._ctx.run.append("client_opened", evidence=name, **record)
        write_restores(self._ctx.run)
        return trainer

    async def _saved(self, uri: str, observed: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """The report about the checkpoint, where there is one about the weights to hold it to."""
        if all((observed or {}).get(name) is None for name in CONTENT):
            return None
        return await self._ctx.service.reachability.checkpoint(uri)

    def _refuse(self, record: dict[str, Any], problems: list[str]) -> None:
        """Stop before an update is applied to a state that it does not belong to.

        Hyperparameters at the first load are the restoration gate's to judge; only after a restore
        is there no gate left.
        """
        reported = (record["observed"] or {}).get("optimizer") or {}
        planned = self._ctx.execution.optimizer.model_dump()
        problems = problems + _wrong_steps(reported, record["policy_version"])
        if record["restore"] > 0:
            problems += _wrong_optimizer(reported, planned)
        if problems:
            refuse_load(self._ctx, record, problems)


def refuse_load(ctx: RunContext, facts: Mapping[str, Any], problems: list[str]) -> NoReturn:
    """Keep why a load is not to be trained on, and stop.

    Args:
        ctx: the run.
        facts: what is kept of the load; at least its arm and the URI that was asked for.
        problems: one sentence each.

    Raises:
        PermanentServiceError: always; the history cannot be continued on such a service.
    """
    ctx.run.append("load_refused", problems=problems, **facts)
    what = f"load {facts['requested_uri']} for {facts['arm']}"
    text = "; ".join(problems)
    failure = Failure(FailureKind.PERMANENT, text)
    raise PermanentServiceError(text, what=what, failure=failure, final=True)


def other_content(
    saved: Mapping[str, Any] | None, observed: Mapping[str, Any] | None, uri: str
) -> list[str]:
    """Where the weights that were loaded are not those of the checkpoint.

    Args:
        saved: what the service reports about the checkpoint; None where it says nothing.
        observed: likewise about the loaded model.
        uri: the checkpoint.

    Returns:
        A sentence for each digest that both reports give and that differs.
    """
    reports = [(name, (saved or {}).get(name), (observed or {}).get(name)) for name in CONTENT]
    return [
        f"the {name} of the model that was loaded is {found}, {uri} was saved with {wanted}"
        for name, wanted, found in reports
        if wanted is not None and found is not None and wanted != found
    ]


def _wrong_steps(reported: Mapping[str, Any], version: int) -> list[str]:
    steps = reported.get("steps")
    if steps is None or same(steps, version):
        return []
    return [f"the optimizer that was loaded has done {steps} steps, the checkpoint holds {version}"]


def _wrong_optimizer(reported: Mapping[str, Any], planned: Mapping[str, Any]) -> list[str]:
    actual, name = reported.get("type"), planned["name"]
    wrong = []
    if actual is not None and not same_family(str(actual), name):
        wrong.append(f"the optimizer that was loaded is {actual}, planned is {name}")
    return wrong + [
        f"the {key} of the optimizer that was loaded is {reported[key]!r}, planned is {value!r}"
        for key, value in planned.items()
        if key != "name" and reported.get(key) is not None and not same(reported[key], value)
    ]


def _info(trainer: Trainer) -> dict[str, Any]:
    info = trainer.info
    return {
        "model_id": info.model_id,
        "base_model": info.base_model,
        "lora_rank": info.lora_rank,
        "optimizer": info.optimizer,
    }
