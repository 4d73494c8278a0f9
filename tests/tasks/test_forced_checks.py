"""The forced checks: their bounds, what is compared, and services that answer wrongly."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.local_service.tiny_model import write_tiny
from envs.protocols import EpisodeSettings
from envs.registry import make_environment
from envs.rendering import make_renderer
from envs.retail.scripted_agent import ScriptedPolicy
from evidence.execution import ExecutionFile
from evidence.gate import CheckResult, GateResult
from evidence.run import Run
from evidence.spec import Spec
from tasks.context import RunContext
from tasks.forced_checks import check_forced, framed_plans, judged
from tasks.reachability import ServerInfo
from tasks.sequences import sampled_sequence
from tasks.tokenizers import load_tokenizer
from tasks.trajectories import Trajectory
from tests.flows import retail_spec
from tests.tasks.fake_runs import FakeService

SHOWN = {"solution_shown": True, "solution_reward": 0.9, "solution_reaches_threshold": True}
GOOD: dict[str, Any] = {
    "episodes": [SHOWN, SHOWN],
    "mean_abs_change": 0.03,
    "mean_abs_repeat": [0.01, 0.002],
    "mean_abs_without_context": 0.1,
    "mean_abs_with_solution": 0.5,
    "alignment": {"tokens": 1, "unanswered": 0, "turns": 1, "max_abs": 3.0, "mean_abs": 0.05},
    "gradient": {"on_mask": 1, "off_mask": 0, "trained_tokens": 1, "nonzero_advantages": 1},
}


def test_every_check_passes_at_its_bound() -> None:
    assert [(check.check, check.status) for check in judged("sdpo", GOOD)] == [
        ("solution_shown", "passed"),
        ("advantages_change_with_solution", "passed"),
        ("unchanged_prompt_scores_as_sampled", "passed"),
        ("rescored_tokens_aligned", "passed"),
        ("gradient_on_sampled_tokens_alone", "passed"),
    ]


@pytest.mark.parametrize(
    ("place", "value", "failing"),
    [
        (("episodes", 1, "solution_shown"), False, "solution_shown"),
        (("mean_abs_change",), 0.0299, "advantages_change_with_solution"),
        (("mean_abs_change",), None, "advantages_change_with_solution"),
        (("mean_abs_change",), float("nan"), "advantages_change_with_solution"),
        (("mean_abs_repeat", 1), 0.0101, "advantages_change_with_solution"),
        (("mean_abs_repeat", 1), None, "advantages_change_with_solution"),
        (("mean_abs_without_context",), 0.1001, "unchanged_prompt_scores_as_sampled"),
        (("alignment", "mean_abs"), 0.0501, "rescored_tokens_aligned"),
        (("alignment", "mean_abs"), float("nan"), "rescored_tokens_aligned"),
        (("alignment", "tokens"), 0, "rescored_tokens_aligned"),
        (("episodes",), [], "solution_shown"),
        (("gradient", "off_mask"), 1, "gradient_on_sampled_tokens_alone"),
        (("gradient", "on_mask"), 0, "gradient_on_sampled_tokens_alone"),
    ],
)
def test_one_measurement_beyond_its_bound_fails_that_check_alone(
    place: tuple[Any, ...], value: Any, failing: str
) -> None:
    measured: Any = copy.deepcopy(GOOD)
    holder = measured
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value

    failed = [check for check in judged("sdpo", measured) if check.status == "failed"]

    assert [check.check for check in failed] == [failing]
    assert (failed[0].reason or "").startswith(f"sdpo: {failing}: measured ")


@pytest.mark.parametrize(("change", "status"), [(0.001, "passed"), (0.000999, "failed")])
def test_service_without_noise_still_has_to_show_a_change(change: float, status: str) -> None:
    measured = GOOD | {"mean_abs_change": change, "mean_abs_repeat": [0.0, 0.0]}

    assert judged("sdpo", measured)[1].status == status


def test_tokens_without_an_answer_fail_whatever_the_others_say() -> None:
    measured = copy.deepcopy(GOOD)
    measured["alignment"] |= {"tokens": 7, "unanswered": 1, "mean_abs": 0.0}

    (failed,) = [check for check in judged("sdpo", measured) if check.status == "failed"]

    assert failed.reason == (
        "sdpo: rescored_tokens_aligned: 1 of 8 trained tokens have no log-probability"
    )


def test_sibling_below_the_bar_is_recorded_and_is_no_failure() -> None:
    """The tiny model never solves anything, and its gradient can be checked all the same."""
    poor = {"solution_shown": True, "solution_reward": 0.5, "solution_reaches_threshold": False}

    check = judged("sdpo", GOOD | {"episodes": [poor]})[0]

    assert (check.status, check.measured) == ("passed", [poor])


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The embedded shop over the tiny model's tokenizer, and the tokenizer."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    tokenizer = load_tokenizer(str(folder))
    environment = make_environment(
        "retail",
        {"reward": "composite"},
        tokenizer=tokenizer,
        renderer="qwen3_instruct",
        system_prompt="Help.",
    )
    return environment, tokenizer


def _context(folder: Path, shop: tuple[Any, Any], service: Any = None) -> RunContext:
    document = retail_spec.spec()
    execution = retail_spec.execution(document)
    run = Run.create(str(folder), run_id="forced", spec=document, execution=execution)
    ctx = RunContext(
        run=run,
        spec=Spec.parse(document),
        execution=ExecutionFile.parse(execution),
        service=service or FakeService(),
        server=ServerInfo(models=("tiny",)),
    )
    ctx.environment = shop[0]
    return ctx


def _trajectory(shop: tuple[Any, Any], sample: int, reward: float) -> Trajectory:
    environment, tokenizer = shop
    policy = ScriptedPolicy([f"Words of {sample}."], make_renderer("qwen3_instruct", tokenizer))
    settings = EpisodeSettings(max_tokens=400, max_turns=1)
    item = environment.train_ids[0]
    played = asyncio.run(environment.run_episode(item, policy, settings=settings, seed=0))
    return Trajectory(
        sequence=sampled_sequence(played, group=0, sample=sample, advantage=0.0),
        reward=reward,
        native_reward=None,
        group_advantage=0.0,
        system_tokens=played.info["system_tokens"],
        feedback="Words of the judge.",
        turns=played.turns,
    )


def _prompt(shop: tuple[Any, Any], plan: Any) -> str:
    return str(shop[1].decode(list(plan.scored.tokens[: plan.scored.prefix_tokens])))


def test_prompts_that_are_compared_differ_in_the_siblings_words_alone(
    tmp_path: Path, shop: tuple[Any, Any]
) -> None:
    """The best attempt is shown to both others; headings, roles and closing line stay."""
    ctx = _context(tmp_path, shop)
    rewards = [0.4, 0.85, 0.2]
    given = [_trajectory(shop, sample, reward) for sample, reward in enumerate(rewards)]

    frames = framed_plans(ctx, ctx.arm("sdpo"), given)

    assert [one.shown.trajectory.sequence.sample for one in frames] == [0, 2]
    for one in frames:
        shown, emptied, unchanged = (
            _prompt(shop, plan) for plan in (one.shown, one.emptied, one.unchanged)
        )
        assert one.shown.solution is given[1]
        assert "assistant: Words of 1." in shown
        for turn in given[1].turns:
            assert turn.content in shown
            shown = shown.replace(f"{turn.role}: {turn.content}", f"{turn.role}: ", 1)
        assert shown == emptied
        assert "Correct solution:" in emptied
        assert "earlier attempt:\n \n\nCorrectly solve the original question.\n\nHelp." in emptied
        assert "Correct" not in unchanged
        assert unchanged.startswith(emptied[: emptied.index("system")])


class Scorer:
    """Says the same in every turn, with log-probability 0; scores are what it is made with."""

    def __init__(
        self, tokenizer: Any, score: Callable[[Sequence[int]], list[float | None]]
    ) -> None:
        self._renderer, self.compute = make_renderer("qwen3_instruct", tokenizer), score

    async def sample(self, *given: Any, **settings: Any) -> Any:
        return await ScriptedPolicy(["Bye."], self._renderer).sample(*given, **settings)

    async def compute_logprobs(self, tokens: Sequence[int]) -> list[float | None]:
        return self.compute(tokens)


class Trainer:
    """Publishes a scorer, and gives every target the log-probability 0."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    async def publish(self, name: str) -> Any:
        return self._scorer

    async def forward_backward_custom(self, datums: Sequence[Any], loss: Any) -> None:
        loss.run([np.zeros(len(values.advantages_T), dtype=np.float32) for values in loss.inputs_D])

    async def close(self) -> None:
        return None


class Loading(FakeService):
    """A service whose training client publishes a given scorer."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self._scorer = scorer

    async def load_trainer(self, uri: str, *, label: str) -> Trainer:
        return Trainer(self._scorer)


def _asked(
    folder: Path, shop: tuple[Any, Any], score: Callable[[Sequence[int]], list[float | None]]
) -> tuple[GateResult, dict[str, CheckResult]]:
    ctx = _context(folder, shop, Loading(Scorer(shop[1], score)))
    gate = asyncio.run(check_forced(ctx, "tinker://init")).result
    return gate, {check.check: check for check in gate.checks}


def _by_length(tokens: Sequence[int]) -> list[float | None]:
    return [-1e-5 * len(tokens)] * len(tokens)


def test_service_that_reads_the_whole_prompt_passes(tmp_path: Path, shop: tuple[Any, Any]) -> None:
    """Scores that fall by 1e-5 nats a token of the prompt show how long the solution is."""
    gate, _ = _asked(tmp_path, shop, _by_length)

    assert (gate.status, gate.reasons) == ("passed", ())


def test_noise_is_not_taken_for_a_reaction_to_the_solution(
    tmp_path: Path, shop: tuple[Any, Any]
) -> None:
    """The scores never depend on the prompt, and differ by up to 0.01 nats from call to call."""
    noise = random.Random(0)

    def noisy(tokens: Sequence[int]) -> list[float | None]:
        return [noise.uniform(-0.01, 0.01) for _ in tokens]

    gate, checks = _asked(tmp_path, shop, noisy)

    assert gate.status == "failed"
    assert [name for name, check in checks.items() if check.status == "failed"] == [
        "advantages_change_with_solution"
    ]
    assert checks["advantages_change_with_solution"].measured > 0.001


def test_token_without_a_score_fails_the_gate_and_does_not_break_it(
    tmp_path: Path, shop: tuple[Any, Any]
) -> None:
    """Each of both attempts' three turns of 5 tokens is given no value for its last one."""

    def silent(tokens: Sequence[int]) -> list[float | None]:
        return [*_by_length(tokens)[:-1], None]

    gate, checks = _asked(tmp_path, shop, silent)

    assert checks["rescored_tokens_aligned"].reason == (
        "sdpo: rescored_tokens_aligned: 6 of 30 trained tokens have no log-probability"
    )
    assert gate.status == "failed"
