"""Logit-level losses: whose tokens are compared, how they are sent, and what gets no gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deploy.local_service.launch import LocalService
from losses.inputs import LossInputs
from losses.support_columns import step_loss
from tasks.datums import TrainedSequence, datum_of, loss_inputs_of, scored_positions, with_support
from tasks.fixed_inputs import taught_batch
from tasks.parity_measurements import GradientProbe, against_reference
from tasks.sampling import ServiceSampler
from tasks.service import PermanentServiceError, Service
from tasks.service_settings import ServiceSettings
from tasks.support_scores import scored_support
from tasks.trajectories import teacher_plans
from tests.tasks.test_rescoring import SETTINGS, shop, trajectories  # noqa: F401 - fixtures

TOKENS = [1, 70, 71, 72, 73, 74, 75]
NAN = float("nan")
LOGIT = {"kind": "sdpo_logit", "alpha": 0.5, "top_k": 3, "add_tail": True, "is_clip": 2.0}


def _sequence(**changes: Any) -> TrainedSequence:
    fields: dict[str, Any] = {
        "group": 0,
        "sample": 0,
        "tokens": np.array(TOKENS),
        "loss_mask": np.array([False, False, True, True, False, True, True]),
        "sampling_logprobs": np.array([0, 0, -1.0, -2.0, 0, -0.5, -0.25]),
        "advantages": np.zeros(7),
        "teacher_logprobs": np.array([NAN, NAN, -1.5, NAN, NAN, -1.0, -0.5]),
    }
    return TrainedSequence(**fields | changes)


class Column:
    """A column of an Arrow table, as far as it is read."""

    def __init__(self, values: list[float]) -> None:
        self._values = np.array(values)

    def combine_chunks(self) -> Column:
        return self

    def to_numpy(self) -> Any:
        return self._values


def _supports() -> Any:
    """Two tokens at each of the positions 2, 5 and 6."""
    columns: dict[str, list[float]] = {
        "group": [0] * 6,
        "sample": [0] * 6,
        "position": [2, 2, 5, 5, 6, 6],
        "token_id": [10, 11, 12, 13, 14, 15],
        "teacher_logprob": [-1.0, -2.0, -1.5, -2.5, -0.5, -3.0],
    }
    return SimpleNamespace(column=lambda name: Column(columns[name]))


def test_support_stands_before_the_sampled_token_in_the_targets() -> None:
    """A position that is not scored repeats its own token; token 3 has no teacher."""
    (sequence,) = with_support([_sequence()], _supports(), top_k=2)

    targets = datum_of(sequence).loss_fn_inputs["target_tokens"].to_numpy()

    assert targets.tolist() == [
        [70, 70, 70],
        [10, 11, 71],
        [72, 72, 72],
        [73, 73, 73],
        [12, 13, 74],
        [14, 15, 75],
    ]


def test_token_without_a_teacher_is_left_out_of_a_loss_that_reads_one() -> None:
    (sequence,) = with_support([_sequence()], _supports(), top_k=2)

    inputs = loss_inputs_of(sequence, reads_teacher=True)

    assert scored_positions(sequence).tolist() == [2, 5, 6]
    assert inputs.loss_mask_T.tolist() == [False, True, False, False, True, True]
    assert inputs.teacher_logprobs_TK is not None
    assert inputs.teacher_logprobs_TK[4].tolist() == [-1.5, -2.5]
    assert loss_inputs_of(sequence).teacher_logprobs_TK is None


def test_supports_of_other_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="supports of group 0, sample 1"):
        with_support([_sequence(sample=1)], _supports(), top_k=2)


@pytest.mark.parametrize("is_clip", [None, 2.0])
def test_sampled_token_gets_no_gradient_from_a_loss_on_the_support(is_clip: float | None) -> None:
    target = torch.log(torch.tensor([[0.3, 0.2, 0.1, 0.25], [0.5, 0.2, 0.1, 0.05]]))
    target.requires_grad_(True)
    inputs = LossInputs(
        sampling_logprobs_T=torch.tensor([-1.3, -2.9]),
        advantages_T=torch.zeros(2),
        loss_mask_T=torch.tensor([True, True]),
        teacher_logprobs_TK=torch.log(torch.tensor([[0.2, 0.3, 0.1], [0.1, 0.2, 0.6]])),
    )

    step_loss(LOGIT | {"is_clip": is_clip})(target, inputs).loss.backward()  # type: ignore[no-untyped-call]

    assert target.grad is not None
    assert target.grad[:, -1].tolist() == [0.0, 0.0]
    assert bool((target.grad[:, :-1] != 0).all())


@pytest.mark.parametrize(
    "loss", [LOGIT, LOGIT | {"add_tail": False, "is_clip": None, "alpha": 1.0}]
)
def test_path_equals_the_float64_reference(loss: dict[str, Any]) -> None:
    batch = taught_batch(loss, [_sequence()])
    rng = np.random.default_rng(0)
    probe = GradientProbe(loss, [loss_inputs_of(one, reads_teacher=True) for one in batch])
    probe.run([np.log(rng.dirichlet(np.ones(8), size=6)[:, :4]).astype(np.float32)])

    found = {one.check: one.errors for one in against_reference(loss, probe, "made up")}

    assert (found["loss"]["max_abs_error"] or 0.0) < 1e-6
    assert (found["gradient"]["max_abs_error"] or 0.0) < 1e-6
    assert (found["gradient"]["reference_max_abs"] or 0.0) > 0.01


@pytest.mark.anyio
async def test_likeliest_tokens_and_their_scores_agree_with_those_of_the_sequence(
    local_service: LocalService,
) -> None:
    service = Service(ServiceSettings(url=local_service.url))
    sampler = await service.open_sampler(base_model="tiny", label="support")
    tokens, logprobs = await sampler.likeliest(TOKENS, top_k=3)
    scores = await sampler.scores_of(TOKENS, np.where(np.arange(7)[:, None] > 2, tokens, -1))
    own = await sampler.scores_of(TOKENS, np.array(TOKENS)[:, None])
    computed = await sampler.compute_logprobs(TOKENS)
    await service.release_all()

    assert tokens.shape == logprobs.shape == (7, 3)
    assert bool((np.diff(logprobs[1:], axis=1) <= 0).all())
    np.testing.assert_array_equal(scores[3:], logprobs[3:])
    assert bool(np.isnan(scores[:3]).all())
    assert own[1:, 0].tolist() == computed[1:]


@pytest.mark.anyio
async def test_support_of_a_trajectory_is_scored_at_its_own_positions(
    shop: tuple[Any, Any],  # noqa: F811
    trajectories: list[Any],  # noqa: F811
    local_service: LocalService,
) -> None:
    """Each position again, by itself: student behind the plain prefix, teacher behind its own."""
    plan = teacher_plans(trajectories, SETTINGS, shop[0])[0]
    assert plan.scored is not None
    sequence = plan.trajectory.sequence
    service = Service(ServiceSettings(url=local_service.url))
    sampler = await service.open_sampler(base_model="tiny", label="support")
    found = await scored_support(plan, sampler, sampler, top_k=2)
    checked = found.positions[:: len(found.positions) // 4]
    for position in checked.tolist():
        token = int(found.tokens[position, 1])
        plain = sequence.tokens[:position].tolist()
        prefix = plan.scored.tokens[: plan.scored.prefix_tokens]
        taught = [*prefix, *plain[plan.trajectory.system_tokens :]]
        student = (await sampler.compute_logprobs([*plain, token]))[-1]
        teacher = (await sampler.compute_logprobs([*taught, token]))[-1]
        assert student == pytest.approx(found.student[position, 1], abs=1e-4)
        assert teacher == pytest.approx(found.teacher[position, 1], abs=1e-4)
    await service.release_all()

    assert found.positions.tolist() == np.flatnonzero(sequence.loss_mask).tolist()


def _new(prompt: Any, topk_prompt_logprobs: int = 0, target_prompt_logprobs: Any = None) -> Any:
    """The SDK's `sample` with every kind of scores."""


def _old(prompt: Any) -> Any:
    """The SDK's `sample` before there were any."""


@pytest.mark.anyio
@pytest.mark.parametrize("sample", [_new, _old])
@pytest.mark.parametrize("field", ["topk_prompt_logprobs", "target_prompt_logprobs"])
async def test_service_or_sdk_without_top_k_scores_is_named(field: str, sample: Any) -> None:
    class Silent(ServiceSampler):
        async def _asked(self, submit: Any, verb: str) -> Any:
            return SimpleNamespace(topk_prompt_logprobs=None, target_prompt_logprobs=None)

    nobody: Any = None
    client: Any = SimpleNamespace(sample=sample)
    sampler = Silent(nobody, client, label="old", session=None)
    asked: Any = (
        sampler.likeliest(TOKENS, top_k=2)
        if field == "topk_prompt_logprobs"
        else sampler.scores_of(TOKENS, np.zeros((7, 2), dtype=np.int64))
    )

    with pytest.raises(PermanentServiceError, match=f"the service returns no {field}"):
        await asked
