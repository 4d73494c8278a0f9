"""Losses that read recomputed log-probabilities work before there is a stored batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from evidence.method_settings import RolloutCorrection
from tasks.anchor import anchor_of
from tasks.arms import ArmPlan
from tasks.context import RunContext
from tasks.correctness import _one_loss
from tasks.datums import TrainedSequence
from tasks.trainer import Trainer
from tests.flows import tiny_spec

pytestmark = pytest.mark.anyio

SCORES = [np.array([-1.0, -2.0], dtype=np.float32)]
CORRECTION = RolloutCorrection(level="token", threshold=2.0, batch_normalize=False)
RECOMPUTE = tiny_spec.DPPO | {"anchor": "recompute"}
SEQUENCE = TrainedSequence(
    group=0,
    sample=0,
    tokens=np.array([5, 6, 7]),
    loss_mask=np.array([False, True, True]),
    sampling_logprobs=np.array([0.0, -1.1, -1.9]),
    advantages=np.array([0.0, 1.0, -1.0]),
)


class Scorer:
    """A client that always scores alike, and calls a custom loss with its scores."""

    async def forward(self, datums: Any) -> Any:
        return SCORES

    async def forward_backward_custom(self, datums: Any, loss: Any) -> dict[str, float]:
        loss.run(SCORES)
        return {}


@pytest.mark.parametrize(
    ("loss", "correction", "read"),
    [
        (RECOMPUTE, None, True),
        (tiny_spec.GRPO, CORRECTION, True),
        (tiny_spec.GRPO, None, False),
    ],
)
async def test_probe_scores_for_arms_that_read_it(
    loss: dict[str, Any], correction: RolloutCorrection | None, read: bool
) -> None:
    arm = cast(ArmPlan, SimpleNamespace(loss=loss))

    anchor = await anchor_of(arm, correction, cast(Trainer, Scorer()), [SEQUENCE])

    assert (anchor is not None) is read
    assert anchor is None or anchor[0].tolist() == [-1.0, -2.0]


async def test_correctness_measures_a_loss_with_a_recomputed_anchor() -> None:
    noted: list[Any] = []
    run = SimpleNamespace(append=lambda *args, **fields: noted.append((args, fields)))
    ctx = cast(RunContext, SimpleNamespace(run=run))

    found = await _one_loss(ctx, cast(Trainer, Scorer()), RECOMPUTE, [SEQUENCE], SCORES)

    assert noted == []
    served = [one for one in found if one.what.startswith("served")]
    assert {one.check for one in served} == {"loss", "gradient"}
    assert all((one.errors["max_abs_error"] or 0.0) < 1e-5 for one in served)
