"""Addition of small numbers, on the cookbook's arithmetic env: what a small model can learn.

Data: all ordered pairs (x, y) of numbers from 0 to `operand_max`. The pair of the worked example
in the prompt is left out. Held-out pairs are chosen as unordered pairs, so that 3 + 4 is never
trained on when 4 + 3 is asked in the evaluation.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from types import ModuleType
from typing import Any

import numpy as np
from tinker_cookbook.recipes.math_rl import arithmetic_env
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv
from tinker_cookbook.rl import problem_env

from envs import data_order, rendering, single_turn
from envs.errors import EnvInputError
from envs.protocols import CanaryResult, Episode, EpisodeSettings, Item, Sampler
from envs.provenance import code_sha256, text_sha256
from envs.rendering import ChatRenderer
from envs.settings import SettingsReader
from envs.single_turn import Grade, grade_problem, run_single_turn

DEFAULT_SYSTEM_PROMPT = "Reply with one number."
EXAMPLE = (4, 5)
"""The pair of the cookbook's worked example."""

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ArithmeticSettings:
    """Settings of the environment.

    `operand_max`: largest operand. `held_out`: number of held-out ordered pairs. `split_seed`
    draws them. `example`: whether the prompt holds the worked example. `format_coef`: weight of
    the format term in the reward.
    """

    operand_max: int = 9
    held_out: int = 40
    split_seed: int = 0
    example: bool = True
    format_coef: float = 0.1

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> "ArithmeticSettings":
        """Read and check the settings of an execution file.

        Raises:
            EnvInputError: naming the setting that is unknown or out of range.
        """
        reader = SettingsReader(settings, environment="arithmetic")
        read = cls(
            operand_max=reader.take_int("operand_max", default=9, low=1, high=999),
            held_out=reader.take_int("held_out", default=40, low=1, high=100_000),
            split_seed=reader.take_int("split_seed", default=0, low=0, high=2**31 - 1),
            example=reader.take_bool("example", default=True),
            format_coef=reader.take_float("format_coef", default=0.1, low=0.0, high=1.0),
        )
        reader.finish()
        return read


def split_pairs(settings: ArithmeticSettings) -> tuple[list[Pair], list[Pair]]:
    """Return (training pairs, held-out pairs), both sorted.

    Unordered pairs are permuted with `numpy.random.default_rng(split_seed)`; from the front each
    gives its one or two ordered forms to the held-out set until that holds `held_out` of them (a
    last form too many is dropped and trained on by no one). The rest is the training set.

    Raises:
        EnvInputError: if nothing would be left to train on.
    """
    numbers = range(settings.operand_max + 1)
    unordered = [pair for pair in combinations_with_replacement(numbers, 2) if pair != EXAMPLE]
    order = np.random.default_rng(settings.split_seed).permutation(len(unordered))
    held_out: list[Pair] = []
    train: list[Pair] = []
    for index in order:
        x, y = unordered[int(index)]
        forms = sorted({(x, y), (y, x)})
        if len(held_out) < settings.held_out:
            held_out.extend(forms[: settings.held_out - len(held_out)])
        else:
            train.extend(forms)
    if not train or len(held_out) < settings.held_out:
        raise EnvInputError(
            "environment.settings.held_out",
            settings.held_out,
            f"fewer than the {len(held_out) + len(train)} pairs there are",
        )
    return sorted(train), sorted(held_out)


class ArithmeticEnvironment:
    """What is x + y? Graded by the last whole number of the reply.

    Args:
        settings: see `ArithmeticSettings`.
        renderer: turns messages into tokens.
        seed: of the training order (the spec's seed).
        system_prompt: first message; `DEFAULT_SYSTEM_PROMPT` where None.
    """

    name = "arithmetic"
    metrics = ("accuracy", "format")

    def __init__(
        self,
        settings: ArithmeticSettings,
        *,
        renderer: ChatRenderer,
        seed: int,
        system_prompt: str | None = None,
    ) -> None:
        self.settings = settings
        self._renderer = renderer
        self._seed = seed
        self._prefix = _prefix(settings, system_prompt)
        train, held_out = split_pairs(settings)
        data_order.check_disjoint(
            [_unordered_key(pair) for pair in train], [_unordered_key(pair) for pair in held_out]
        )
        self.train_ids = tuple(_item_id(pair) for pair in train)
        self.eval_ids = tuple(_item_id(pair) for pair in held_out)
        self._pairs = {_item_id(pair): pair for pair in [*train, *held_out]}
        self.data_digests: Mapping[str, str] = {
            "train": text_sha256("".join(f"{item}\n" for item in self.train_ids)),
            "eval": text_sha256("".join(f"{item}\n" for item in self.eval_ids)),
        }
        self.data_order: Mapping[str, Any] = data_order.order_record(self.train_ids, seed=seed)

    def item(self, item_id: str) -> Item:
        """Return one task, of either split."""
        env = self._env(item_id)
        messages = [*self._prefix, {"role": "user", "content": env.get_question()}]
        return Item(
            item_id=item_id,
            prompt_tokens=self._renderer.prompt(messages),
            reference=env.get_reference_answer(),
            info={"x": env.x, "y": env.y},
        )

    def train_batch(self, step: int, groups: int) -> list[str]:
        """Return the ids of rollout step `step`."""
        return data_order.batch_ids(self.train_ids, seed=self._seed, step=step, groups=groups)

    async def run_episode(
        self, item_id: str, sampler: Sampler, *, settings: EpisodeSettings, seed: int
    ) -> Episode:
        """Sample one answer and grade it."""
        return await run_single_turn(
            self.item(item_id),
            sampler,
            renderer=self._renderer,
            grader=lambda text, stopped: self.grade(item_id, text, stopped=stopped),
            settings=settings,
            seed=seed,
        )

    def grade(self, item_id: str, text: str, *, stopped: bool) -> Grade:
        """Grade a reply given as text."""
        grade = grade_problem(self._env(item_id), text, stopped=stopped)
        return Grade(
            reward=grade.reward,
            correct=grade.correct,
            format_ok=grade.format_ok,
            extracted=_last_number(text),
            metrics={"accuracy": float(grade.correct), "format": float(grade.format_ok)},
        )

    def canaries(self) -> list[CanaryResult]:
        """Grade a right and a wrong reply to the first held-out task."""
        item_id = self.eval_ids[0]
        right = sum(self._pairs[item_id])
        replies = {f"{right}": 1.0, f"The answer is {right}.": 1.0, f"{right + 1}": 0.0, "": 0.0}
        return [
            CanaryResult(
                item_id=item_id,
                reply=reply,
                metric="accuracy",
                expected=expected,
                value=self.grade(item_id, reply, stopped=True).metrics["accuracy"],
            )
            for reply, expected in replies.items()
        ]

    def evaluator_provenance(
        self, *, settings: EpisodeSettings, item_ids: Sequence[str]
    ) -> dict[str, Any]:
        """What determines a score, as plain JSON data."""
        return {
            "code_sha256": code_sha256(_grading_modules(self._renderer)),
            "prompt_template": json.dumps(
                {
                    "renderer": self._renderer.name,
                    "messages": [*self._prefix, {"role": "user", "content": "What is {x} + {y}?"}],
                },
                sort_keys=True,
            ),
            "decoding": {**settings.decoding(), "stop": self._renderer.stop_tokens()},
            "parser": "tinker_cookbook ArithmeticEnv.check_answer: last whole number of the reply",
            "items": {"ids": list(item_ids)},
        }

    def _env(self, item_id: str) -> ArithmeticEnv:
        """The cookbook's env of one task."""
        if item_id not in self._pairs:
            raise EnvInputError("item_id", item_id, "a pair such as 3+4 of this environment")
        x, y = self._pairs[item_id]
        return _SafeArithmeticEnv(
            x, y, self._renderer.renderer, format_coef=self.settings.format_coef
        )


class _SafeArithmeticEnv(ArithmeticEnv):
    """The cookbook's env; a number too long for Python to read is wrong instead of an error."""

    def check_answer(self, sample_str: str) -> bool:
        try:
            return bool(super().check_answer(sample_str))
        except ValueError:
            return False


def _prefix(settings: ArithmeticSettings, system_prompt: str | None) -> list[dict[str, str]]:
    """Messages before the question."""
    text = DEFAULT_SYSTEM_PROMPT if system_prompt is None else system_prompt
    messages = [{"role": "system", "content": text}] if text else []
    if settings.example:
        for message in ArithmeticEnv.standard_fewshot_prefix():
            messages.append({"role": message["role"], "content": str(message["content"])})
    return messages


def _last_number(text: str) -> str | None:
    """The whole number that the grader reads, as written."""
    if len(text) > single_turn.MAX_GRADED_CHARS:
        return None
    found = arithmetic_env._INTEGER_PATTERN.findall(text.replace(",", ""))
    return found[-1] if found else None


def _item_id(pair: Pair) -> str:
    return f"{pair[0]}+{pair[1]}"


def _unordered_key(pair: Pair) -> str:
    return _item_id((min(pair), max(pair)))


def _grading_modules(renderer: ChatRenderer) -> list[ModuleType]:
    """Every module whose code takes part in a score."""
    this, own_renderer = inspect.getmodule(_item_id), inspect.getmodule(type(renderer.renderer))
    found = [this, own_renderer, rendering, single_turn, arithmetic_env, problem_env]
    return [module for module in found if module is not None]
