r"""GSM8K on the cookbook's math env, with both of the cookbook's graders side by side.

The two graders disagree; the tests hold a table of replies. `correct_boxed` is the training
grader: the last `\boxed{}` is required, then normalised string equality or sympy.
`correct_numeric` is the evaluation grader: the first box, else `####`, else "answer is", else
bold, else the last number; 0 for a reply without its stop token. `accuracy`, the headline, is
`correct_boxed`. Their difference before and after training tells a learned format from learned
mathematics.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tinker_cookbook.eval.benchmarks import _common as benchmark_graders
from tinker_cookbook.recipes.math_rl import math_env, math_grading
from tinker_cookbook.recipes.math_rl.math_env import MathEnv
from tinker_cookbook.rl import problem_env

from envs import data_order, rendering, single_turn
from envs.errors import EnvInputError
from envs.gsm8k_data import Gsm8kData, Problem, load_gsm8k
from envs.protocols import CanaryResult, Episode, EpisodeSettings, Item, Sampler
from envs.provenance import code_sha256
from envs.rendering import ChatRenderer
from envs.settings import SettingsReader
from envs.single_turn import Grade, grade_problem, run_single_turn


@dataclass(frozen=True, slots=True)
class Gsm8kSettings:
    """Settings of the environment.

    `example`: whether the prompt holds the cookbook's worked example. `format_coef`: weight of
    the format term in the reward. `revision`: commit of the hub's data set. `data_sha256`: the
    digest each split must have, by `train` and `test`; other data is refused.
    """

    example: bool = True
    format_coef: float = 0.1
    revision: str | None = None
    data_sha256: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> "Gsm8kSettings":
        """Read and check the settings of an execution file.

        Raises:
            EnvInputError: naming the setting that is unknown or out of range.
        """
        reader = SettingsReader(settings, environment="gsm8k")
        read = cls(
            example=reader.take_bool("example", default=True),
            format_coef=reader.take_float("format_coef", default=0.1, low=0.0, high=1.0),
            revision=reader.take_text("revision", default=None),
            data_sha256=reader.take_texts("data_sha256"),
        )
        reader.finish()
        return read


class Gsm8kEnvironment:
    """Grade-school word problems, answered in a box.

    Args:
        settings: see `Gsm8kSettings`.
        renderer: turns messages into tokens.
        seed: of the training order (the spec's seed).
        system_prompt: first message; none where None, as in the cookbook.
        data_dir: folder of JSONL files; see `load_gsm8k`.
    """

    name = "gsm8k"
    metrics = ("accuracy", "correct_boxed", "correct_numeric", "format")

    def __init__(
        self,
        settings: Gsm8kSettings,
        *,
        renderer: ChatRenderer,
        seed: int,
        system_prompt: str | None = None,
        data_dir: Path | None = None,
    ) -> None:
        self.settings = settings
        self._renderer = renderer
        self._seed = seed
        self._prefix = _prefix(settings, system_prompt)
        data = load_gsm8k(data_dir, revision=settings.revision)
        _check_data(data, settings.data_sha256)
        self.data_digests: Mapping[str, str] = dict(data.digests)
        train = {f"train-{n:04d}": problem for n, problem in enumerate(data.train)}
        test = {f"test-{n:04d}": problem for n, problem in enumerate(data.test)}
        self.train_ids = tuple(train)
        self.eval_ids = tuple(test)
        self._problems: dict[str, Problem] = train | test
        self.data_order: Mapping[str, Any] = data_order.order_record(self.train_ids, seed=seed)

    def item(self, item_id: str) -> Item:
        """Return one task, of either split."""
        env = self._env(item_id)
        messages = [*self._prefix, {"role": "user", "content": env.get_question()}]
        return Item(
            item_id=item_id,
            prompt_tokens=self._renderer.prompt(messages),
            reference=env.get_reference_answer(),
        )

    def train_batch(self, step: int, groups: int) -> list[str]:
        """Return the ids of rollout step `step`."""
        return data_order.batch_ids(self.train_ids, seed=self._seed, step=step, groups=groups)

    async def run_episode(
        self, item_id: str, sampler: Sampler, *, settings: EpisodeSettings, seed: int
    ) -> Episode:
        """Sample one answer and grade it with both graders."""
        return await run_single_turn(
            self.item(item_id),
            sampler,
            renderer=self._renderer,
            grader=lambda text, stopped: self.grade(item_id, text, stopped=stopped),
            settings=settings,
            seed=seed,
        )

    def grade(self, item_id: str, text: str, *, stopped: bool) -> Grade:
        """Grade a reply given as text with both graders."""
        env = self._env(item_id)
        grade = grade_problem(env, text, stopped=stopped)
        numeric = stopped and correct_numeric(text, env.get_reference_answer())
        return Grade(
            reward=grade.reward,
            correct=grade.correct,
            format_ok=grade.format_ok,
            extracted=boxed_answer(text),
            metrics={
                "accuracy": float(grade.correct),
                "correct_boxed": float(grade.correct),
                "correct_numeric": float(numeric),
                "format": float(grade.format_ok),
            },
        )

    def canaries(self) -> list[CanaryResult]:
        """Grade a right and a wrong boxed reply to the first held-out task with both graders."""
        item_id = self.eval_ids[0]
        right = self._problems[item_id].reference
        replies = {f"So the answer is \\boxed{{{right}}}.": 1.0, f"\\boxed{{{right}1}}": 0.0}
        return [
            CanaryResult(item_id=item_id, reply=reply, metric=metric, expected=wanted, value=found)
            for reply, wanted in replies.items()
            for metric, found in self.grade(item_id, reply, stopped=True).metrics.items()
            if metric != "format"
        ]

    def evaluator_provenance(
        self, *, settings: EpisodeSettings, item_ids: Sequence[str]
    ) -> dict[str, Any]:
        """What determines a score, as plain JSON data."""
        question = "{question}" + MathEnv.question_suffix()
        return {
            "code_sha256": code_sha256(_grading_modules(self._renderer)),
            "prompt_template": json.dumps(
                {
                    "renderer": self._renderer.name,
                    "messages": [*self._prefix, {"role": "user", "content": question}],
                },
                sort_keys=True,
            ),
            "decoding": {**settings.decoding(), "stop": self._renderer.stop_tokens()},
            "parser": "accuracy, correct_boxed: tinker_cookbook MathEnv.check_answer (last box, "
            "sympy grader); correct_numeric: tinker_cookbook check_gsm8k, 0 without a stop token",
            "items": {"ids": list(item_ids), "data_sha256": self.data_digests["test"]},
        }

    def _env(self, item_id: str) -> MathEnv:
        """The cookbook's env of one task."""
        if item_id not in self._problems:
            raise EnvInputError("item_id", item_id, "a row of this data set, e.g. test-0000")
        problem = self._problems[item_id]
        return _InlineMathEnv(
            problem.question,
            problem.reference,
            self._renderer.renderer,
            format_coef=self.settings.format_coef,
        )


class _InlineMathEnv(MathEnv):
    """The cookbook's env without its time limit.

    That limit starts a thread pool for every answer and does not bound the time: leaving the pool
    waits for the grader. References here are whole numbers, for which grading takes well under a
    millisecond; longer replies are refused before they are graded.
    """

    def check_answer(self, sample_str: str) -> bool:
        answer = boxed_answer(sample_str)
        return answer is not None and bool(math_grading.grade_answer(answer, self.answer))


def boxed_answer(text: str) -> str | None:
    """Return what the training grader reads: the content of the last box, or None.

    A closing brace without its opening one makes the whole reply unreadable to that grader.
    """
    if len(text) > single_turn.MAX_GRADED_CHARS:
        return None
    try:
        return str(math_grading.extract_boxed(text))
    except ValueError:
        return None


def correct_numeric(text: str, reference: str) -> bool:
    """Say whether the cookbook's evaluation grader accepts a reply."""
    if len(text) > single_turn.MAX_GRADED_CHARS:
        return False
    return bool(benchmark_graders.check_gsm8k(text, reference))


def _prefix(settings: Gsm8kSettings, system_prompt: str | None) -> list[dict[str, str]]:
    """Messages before the question."""
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    if settings.example:
        for message in MathEnv.standard_fewshot_prefix():
            messages.append({"role": message["role"], "content": str(message["content"])})
    return messages


def _check_data(data: Gsm8kData, expected: Mapping[str, str]) -> None:
    """Refuse other data than was asked for, empty splits, and questions found in both."""
    for split, digest in expected.items():
        if data.digests.get(split) != digest:
            found = data.digests.get(split)
            raise EnvInputError(f"digest of {split}", found, digest, where=data.source)
    if not data.train or not data.test:
        raise EnvInputError("rows", 0, "at least one in each split", where=data.source)
    data_order.check_disjoint(
        [_question_key(problem) for problem in data.train],
        [_question_key(problem) for problem in data.test],
    )


def _question_key(problem: Problem) -> str:
    """What makes two questions the same: their words and numbers, case and punctuation aside."""
    letters = (character if character.isalnum() else " " for character in problem.question.lower())
    return " ".join("".join(letters).split())


def _grading_modules(renderer: ChatRenderer) -> list[ModuleType]:
    """Every module whose code takes part in a score."""
    found = [
        inspect.getmodule(_question_key),
        inspect.getmodule(type(renderer.renderer)),
        rendering,
        single_turn,
        math_env,
        math_grading,
        problem_env,
        benchmark_graders,
    ]
    return [module for module in found if module is not None]
