"""Tell people about gate refusals, capacity blocks and verdicts through a notification block.

Whoever wants notices makes a block on the Prefect server (Slack, Teams, a webhook of one's own,
...) and names it in the environment of the worker, as ``slack-webhook/my-block``.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import prefect.blocks.notifications  # noqa: F401 - registers the blocks that a name may stand for
from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block

from flows.noticeboard import Logger
from flows.outcome import Outcome

BLOCK_VARIABLE = "GATED_RL_NOTIFY"
"""Environment variable with the block's name, ``TYPE/NAME``."""
_SECONDS = 20.0


async def tell(outcome: Outcome, *, run_id: str, logger: Logger, more: str = "") -> bool:
    """Send a notice of how an attempt ended, if a block was named.

    Trouble is logged and never raised.

    Args:
        outcome: how it ended.
        run_id: name of the run.
        logger: of the flow run.
        more: a sentence on what happens next.

    Returns:
        Whether a notice was sent.
    """
    name = os.environ.get(BLOCK_VARIABLE)
    if not name:
        return False
    body = " ".join(part for part in (outcome.reason, more, f"({outcome.run_path})") if part)
    try:
        async with asyncio.timeout(_SECONDS):
            block: Any = await Block.aload(name)
            if not isinstance(block, NotificationBlock):
                raise TypeError(f"{name} is a {type(block).__name__}, not a notification block")
            sent = block.notify(body=body, subject=subject_of(outcome, run_id))
            if asyncio.iscoroutine(sent):
                await sent
    except Exception as error:  # noqa: BLE001 - a notice that cannot be sent is no reason to stop
        logger.warning("no notice through %s: %s: %s", name, type(error).__name__, error)
        return False
    return True


def subject_of(outcome: Outcome, run_id: str) -> str:
    """One line that says what happened."""
    if outcome.stopped_by is not None:
        return f"{run_id}: stopped by the gate {outcome.stopped_by} ({outcome.gate_status})"
    words = {
        "capacity": "the service has no capacity or is out of reach",
        "service_refused": "the service refused",
    }
    return f"{run_id}: {words.get(outcome.exit_kind, f'verdict {outcome.verdict}')}"
