"""Every load of a training state, counted, checked and recorded.

Load 0 of an arm is its creation from the initialization checkpoint; every later one is a restore.
What the service reports about the optimizer is read after each load, before the next update.
"""

from __future__ import annotations

from typing import Any

from evidence.canonical import canonical_bytes
from tasks.context import RunContext
from tasks.trainer import Trainer


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
        """
        trainer = await self._ctx.service.load_trainer(uri, label=f"{self._phase}-{self._arm}")
        restore = len(self.recorded())
        observed = await trainer.observe()
        record = {
            "arm": self._arm,
            "phase": self._phase,
            "restore": restore,
            "policy_version": version,
            "requested_uri": uri,
            "loaded_uri": uri,
            "replayed_updates": replayed,
            "info": _info(trainer),
            "observed": observed,
        }
        name = f"ledger.jsonl client_opened {self._arm} {self._phase} {restore}"
        self._ctx.run.append("client_opened", evidence=name, **record)
        self._ctx.run.write_table(
            "restores",
            [_restore_row(record, self._ctx.run.attempt)],
            key=(self._arm, self._phase, restore),
        )
        return trainer


def _info(trainer: Trainer) -> dict[str, Any]:
    info = trainer.info
    return {
        "model_id": info.model_id,
        "base_model": info.base_model,
        "lora_rank": info.lora_rank,
        "optimizer": info.optimizer,
    }


def _restore_row(record: dict[str, Any], attempt: int) -> dict[str, Any]:
    observed = record["observed"]
    optimizer = (observed or {}).get("optimizer")
    return {
        "attempt": attempt,
        "policy_version": record["policy_version"],
        "checkpoint": record["loaded_uri"],
        "with_optimizer": True,
        "replayed_updates": record["replayed_updates"],
        "optimizer_check": None if optimizer is None else canonical_bytes(optimizer).decode(),
        "info_json": canonical_bytes(record["info"]).decode(),
    }
