"""A restored state is trained on only while its scores could be those of the live one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from evidence.execution import ExecutionFile
from evidence.run import Run
from evidence.spec import Spec
from tasks.arms import arm_plans
from tasks.context import RunContext
from tasks.failures import PermanentServiceError
from tasks.learner import Learner
from tasks.restore_check import Apart, ThreeWay, difference, wrong_weights
from tasks.trainer import StepAnswer, TrainerInfo
from tests.tasks import recorded_runs
from tests.tasks.fake_runs import FakeService

Scores = list[NDArray[np.float32]]
PLANT = recorded_runs.Plant(updates=4)
SILENT = TrainerInfo("m", "tiny", 4, True, None, "tiny")


class Client:
    """A service's client after so many updates: what the live one scored, and something added.

    Args:
        run: where the live one's scores are.
        added: mean of what is added to a score before the first step, after it, and so on, nats.
        noise: what every second scoring is further off by, nats.
    """

    def __init__(self, run: Run, added: Sequence[float], noise: float = 0.0) -> None:
        self.info, self.run, self.added, self.noise = SILENT, run, added, noise
        self.steps = self.scorings = 0

    def _scores(self) -> Scores:
        table = self.run.read_table("update_tokens", key=("dppo", "diagnostic", self.steps))
        scores = np.array([row["target_logprob"] for row in table], np.float32)
        further = self.noise * (self.scorings % 2)
        self.scorings += 1
        hidden = np.zeros((PLANT.group_size, recorded_runs.PROMPT - 1), np.float32)
        shown = scores.reshape(PLANT.group_size, PLANT.tokens)
        added = np.float32(self.added[self.steps] + further)
        return list(np.concatenate([hidden, shown + added], axis=1))

    async def forward(self, datums: Any) -> Scores:
        return self._scores()

    async def step(self, datums: Any, loss: Any, adam: Any) -> StepAnswer:
        loss(datums, [torch.from_numpy(values).requires_grad_() for values in self._scores()])
        self.steps += 1
        return StepAnswer({})

    async def observe(self) -> None:
        return None

    async def close(self) -> bool:
        return True


def _learner(
    folder: Path, *, resumed: Sequence[float], noise: float = 0.0, cold: Sequence[float] = ()
) -> Learner:
    """Updates 0 to 3 are stored, and there is a checkpoint after update 2; nothing is reported."""
    run = recorded_runs.write_run(folder, PLANT)
    uri = "tinker://m/weights/2"
    run.append("checkpoint", arm="dppo", phase="diagnostic", step=0, policy_version=2, uri=uri)
    run.append(
        "client_opened",
        **{"arm": "dppo", "phase": "diagnostic", "restore": 0, "policy_version": 0},
        **{"requested_uri": "tinker://m/weights/0", "replayed_updates": 0},
        **{"observed": None, "info": {}},
    )
    spec, execution = Spec.parse(run.spec), ExecutionFile.parse(run.execution)
    service: Any = FakeService()

    async def load_trainer(uri: str, *, label: str) -> Client:
        client = Client(run, resumed, noise)
        client.steps = 2
        return client

    async def try_cold(uri: str, *, label: str) -> Client:
        client = Client(run, cold)
        client.steps = 2
        return client

    service.load_trainer, service.try_cold = load_trainer, try_cold
    ctx = SimpleNamespace(
        run=run,
        spec=spec,
        execution=execution,
        arms=arm_plans(spec, execution),
        service=service,
        server=SimpleNamespace(local={}),
        adam=None,
        tell=lambda *_, **__: None,
    )
    arm = next(one for one in ctx.arms if one.name == "dppo")
    return Learner(cast(RunContext, ctx), arm, phase="diagnostic", init_uri="tinker://m/weights/0")


OTHER_WEIGHTS = (0.0, 0.0, 3.0, 3.0)


@pytest.mark.anyio
@pytest.mark.parametrize("version", [3, 4], ids=["one_replay", "two_replays"])
async def test_load_that_scores_like_other_weights_is_refused(version: int, tmp_path: Path) -> None:
    """Nothing is reported; the first replay is 3 nats off, and the client repeats itself."""
    learner = _learner(tmp_path, resumed=OTHER_WEIGHTS)

    with pytest.raises(
        PermanentServiceError, match=r"3 nats .* differ by 0: other weights"
    ) as error:
        await learner.at(version)

    assert error.value.final
    (refused,) = learner.ctx.run.events("load_refused")
    assert (refused["restore"], refused["policy_version"]) == (1, 2)
    assert refused["requested_uri"] == "tinker://m/weights/2"
    assert learner.ctx.run.events("restore_three_way") == []


@pytest.mark.anyio
async def test_replay_on_a_service_as_noisy_as_that_is_no_sign_of_other_weights(
    tmp_path: Path,
) -> None:
    """Two scorings of one client are 0.4 nats apart: 20 times that is above the 3 nats."""
    learner = _learner(tmp_path, resumed=OTHER_WEIGHTS, noise=0.4)

    await learner.at(3)

    (replay,) = learner.ctx.run.events("replay_compared")
    assert replay["difference"] == pytest.approx(3.4, abs=1e-4)
    assert learner.ctx.run.events("load_refused") == []


@pytest.mark.anyio
async def test_replay_within_what_rounding_does_goes_on(tmp_path: Path) -> None:
    learner = _learner(tmp_path, resumed=(0.0, 0.0, 0.45, 0.0))

    await learner.at(3)

    assert learner.ctx.run.events("load_refused") == []


@pytest.mark.anyio
async def test_service_whose_noise_hides_the_moments_is_trained_on(tmp_path: Path) -> None:
    """A resumed client 0.045 nats off and a cold one 0.05, where the noise is 0.04."""
    learner = _learner(tmp_path, resumed=(0.0, 0.0, 0.04, 0.045), cold=(0.0, 0.0, 0.0, 0.05))

    await learner.at(4)

    (compared,) = learner.ctx.run.events("restore_three_way")
    assert compared["verdict"] == "cannot tell"
    assert compared["noise"] == pytest.approx(0.04, abs=1e-5)
    assert compared["live_cold"] == pytest.approx(0.05, abs=1e-5)


@pytest.mark.anyio
async def test_client_that_goes_on_like_a_cold_one_ends_the_run_well_above_the_noise(
    tmp_path: Path,
) -> None:
    """The cold one is 50 times as far from the live one as the noise, the resumed one as well."""
    learner = _learner(tmp_path, resumed=(0.0, 0.0, 0.01, 0.45), cold=(0.0, 0.0, 0.0, 0.5))

    with pytest.raises(PermanentServiceError, match="moments were not restored") as error:
        await learner.at(4)

    assert error.value.final
    (compared,) = learner.ctx.run.events("restore_three_way")
    assert compared["verdict"] == "lost"


@pytest.mark.parametrize(
    ("resumed", "cold", "noise", "verdict"),
    [
        (0.0, 0.2, 0.0, "kept"),
        (0.02, 0.2, 0.0, "kept"),
        (0.05, 0.2, 0.0, "cannot tell"),
        (0.1, 0.2, 0.0, "lost"),
        (0.3, 0.2, 0.0, "lost"),
        (0.0, 0.0, 0.0, "cannot tell"),
        (float("nan"), 0.2, 0.0, "cannot tell"),
        (0.1, 0.2, float("nan"), "cannot tell"),
        (0.045, 0.05, 0.04, "cannot tell"),
        (0.15, 0.2, 0.02, "cannot tell"),
        (0.15, 0.2, 0.0199, "lost"),
        (0.0199, 0.2, 0.0199, "kept"),
    ],
)
def test_optimizer_is_judged_only_where_a_cold_client_is_well_above_the_noise(
    resumed: float, cold: float, noise: float, verdict: str
) -> None:
    assert ThreeWay(live_resumed=resumed, live_cold=cold, noise=noise).verdict == verdict


@pytest.mark.parametrize(
    ("apart", "noise", "refused"),
    [
        (0.5, 0.0, False),
        (0.51, 0.0, True),
        (1.9, 0.1, False),
        (2.1, 0.1, True),
        (float("inf"), 0.0, True),
        (0.51, float("nan"), True),
    ],
)
def test_weights_are_refused_beyond_rounding_and_twenty_times_the_noise(
    apart: float, noise: float, refused: bool
) -> None:
    """Noise of 0.1 nats: 20 times that are 2 nats."""
    one, other = [np.zeros(4, np.float32)], [np.full(4, noise, np.float32)]

    assert (wrong_weights(apart, [one, other]) is not None) is refused


def test_difference_is_the_worst_token_and_the_mean(tmp_path: Path) -> None:
    """4 sequences of 12 tokens; a single token is off by 0.96 nats, in the mean 0.96 / 48."""
    learner = _learner(tmp_path, resumed=())
    run, client = learner.ctx.run, Client(learner.ctx.run, (0.0,))
    sequences = [SimpleNamespace(group=0, sample=sample) for sample in range(4)]
    scores = client._scores()
    scores[2][-1] += np.float32(0.96)

    found = difference(learner.ctx, learner.arm, "diagnostic", 0, (cast(Any, sequences), scores))
    wide = [np.stack([np.zeros_like(one), one], axis=1) for one in scores]
    supported = difference(learner.ctx, learner.arm, "diagnostic", 0, (cast(Any, sequences), wide))

    assert run.has_table("update_tokens", key=("dppo", "diagnostic", 0))
    assert found == supported
    assert found == Apart(pytest.approx(0.96, abs=1e-5), pytest.approx(0.02, abs=1e-6))
