"""Both tables of an update come from one forward pass, on a service that never repeats itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evidence.errors import InputError
from tasks.context import RunContext
from tasks.datums import TrainedSequence
from tasks.diagnostic_learner import FrozenLearner
from tasks.minibatch import Minibatch, MinibatchLoss, has_update, write_update
from tests.tasks.fake_runs import context

KEY = ("dppo", "diagnostic", 0)
FIRST, SECOND = (-0.5, -1.5), (-0.25, -1.0)
SEQUENCE = TrainedSequence(
    group=0,
    sample=0,
    tokens=np.array([5, 6, 7]),
    loss_mask=np.array([False, True, True]),
    sampling_logprobs=np.array([0.0, -0.5, -1.5]),
    advantages=np.array([0.0, 1.0, 1.0]),
)


def _minibatch(ctx: RunContext) -> Minibatch:
    return Minibatch(0, 0, 0, 0, [SEQUENCE], 1.0, ctx.arm("dppo"))


def _scored(loss: MinibatchLoss, scores: Sequence[float]) -> MinibatchLoss:
    """Call the loss as the SDK does, with what the service returned."""
    loss([], [torch.tensor(scores, requires_grad=True)])
    return loss


def _kept(ctx: RunContext) -> tuple[list[float], float]:
    """The stored log-probabilities of the update, and its loss."""
    tokens = ctx.run.read_table("update_tokens", key=KEY)
    [row] = ctx.run.read_table("updates", key=KEY)
    return [token["target_logprob"] for token in tokens], row["loss"]


def _write(ctx: RunContext, scores: Sequence[float]) -> bool:
    minibatch = _minibatch(ctx)
    loss = _scored(minibatch.custom_loss(None), scores)
    return write_update(ctx, ctx.arm("dppo"), "diagnostic", minibatch, loss)


def test_update_that_was_cut_off_between_its_tables_keeps_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ratios and advantages of 1: the first loss is 0.5 + 1.5; the second one masks both tokens."""
    ctx = context(tmp_path)
    write = ctx.run.write_table

    def cut_off(table: str, rows: Any, *, key: Any = ()) -> Any:
        if table == "updates":
            raise InputError(table, "No space left on device", "a disk with room")
        return write(table, rows, key=key)

    with monkeypatch.context() as patch:
        patch.setattr(ctx.run, "write_table", cut_off)
        with pytest.raises(InputError):
            _write(ctx, FIRST)
    assert ctx.run.has_table("update_tokens", key=KEY)
    assert not has_update(ctx, ctx.arm("dppo"), "diagnostic", 0)

    new = _write(ctx, SECOND)

    assert new
    assert _kept(ctx) == ([-0.5, -1.5], 2.0)
    assert not _write(ctx, SECOND)


def test_update_of_a_diagnostic_is_what_was_computed_before_its_gradient_was_sent(
    tmp_path: Path,
) -> None:
    """The first pass was kept, then the process was killed; the update is made by a second one."""
    ctx = context(tmp_path)
    learner = FrozenLearner(ctx, ctx.arm("dppo"), init_uri="tinker://zero", max_updates=1)
    _scored(learner._loss(_minibatch(ctx), None), FIRST)
    assert not has_update(ctx, ctx.arm("dppo"), "diagnostic", 0)

    again = _scored(learner._loss(_minibatch(ctx), None), SECOND)
    write_update(ctx, ctx.arm("dppo"), "diagnostic", _minibatch(ctx), again)

    assert _kept(ctx) == ([-0.5, -1.5], 2.0)
