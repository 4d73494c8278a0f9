"""People are told through the block they named; a notice that fails never hurts the run."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

import pytest
from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block
from pydantic import Field

from flows import notices
from flows.outcome import Outcome

OUTCOME = Outcome(
    exit_kind="supported",
    verdict="supported",
    outcome_reason="supported",
    reason="The interval lies above the margin.",
    run_path="runs/one",
)
LOGGER = logging.getLogger("test")


class Remembers(NotificationBlock):
    """A block that keeps what it is told."""

    said: list[tuple[str | None, str]] = Field(default_factory=list)

    async def notify(self, body: str, subject: str | None = None) -> None:  # type: ignore[override]
        self.said.append((subject, body))


class Breaks(NotificationBlock):
    def notify(self, body: str, subject: str | None = None) -> None:
        raise ConnectionError("nobody there")


def named(monkeypatch: pytest.MonkeyPatch, block: Block | Exception) -> None:
    async def aload(name: str) -> Any:
        assert name == "custom-webhook/team"
        if isinstance(block, Exception):
            raise block
        return block

    monkeypatch.setenv(notices.BLOCK_VARIABLE, "custom-webhook/team")
    monkeypatch.setattr(Block, "aload", aload)


def test_nobody_is_told_unless_a_block_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(notices.BLOCK_VARIABLE, raising=False)

    assert asyncio.run(notices.tell(OUTCOME, run_id="one", logger=LOGGER)) is False


def test_verdict_is_told_with_reason_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Remembers()
    named(monkeypatch, block)

    assert asyncio.run(notices.tell(OUTCOME, run_id="one", logger=LOGGER, more="Done.")) is True
    assert block.said == [
        ("one: verdict supported", "The interval lies above the margin. Done. (runs/one)")
    ]


@pytest.mark.parametrize("block", [Breaks(), ValueError("no such block"), Block()])
def test_notice_that_fails_is_only_logged(
    block: Block | Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    named(monkeypatch, block)

    assert asyncio.run(notices.tell(OUTCOME, run_id="one", logger=LOGGER)) is False
    assert "no notice through custom-webhook/team" in caplog.text


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        (
            {"stopped_by": "correctness", "gate_status": "failed"},
            "one: stopped by the gate correctness (failed)",
        ),
        ({"exit_kind": "capacity"}, "one: the service has no capacity or is out of reach"),
        ({"exit_kind": "service_refused"}, "one: the service refused"),
    ],
)
def test_subject_says_what_happened(change: dict[str, Any], subject: str) -> None:
    assert notices.subject_of(dataclasses.replace(OUTCOME, **change), "one") == subject
