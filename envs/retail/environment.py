"""The embedded shop as an environment: small, self-contained, and the same flow as tau-bench."""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from envs import conversation, data_order
from envs.conversation import DIMENSIONS, Judge, Judgement, User, World
from envs.dialogue import Scene, play
from envs.errors import EnvInputError
from envs.grading_code import conversation_sha256, partner_records
from envs.protocols import CanaryResult, Episode, EpisodeSettings, Item, Sampler
from envs.provenance import text_sha256
from envs.rendering import ChatRenderer
from envs.retail import data, rule_judge, scripted_user, tasks, tools
from envs.retail.audit import generation_report
from envs.retail.data import database_sha256, fresh_database
from envs.retail.demonstrations import demonstrations
from envs.retail.policy import system_text
from envs.retail.rule_judge import RuleJudge
from envs.retail.scripted_user import ScriptedUser
from envs.retail.tasks import RetailTask, build_tasks
from envs.retail.tools import TRANSFER, WRITES, Shop
from envs.served import Partner
from envs.served_judge import ServedJudge
from envs.settings import SettingsReader
from envs.teacher import SystemTeacher

NATIVE_METRIC = "task_reward"

Reward = Literal["composite", "native"]


@dataclass(frozen=True, slots=True)
class RetailSettings:
    """Settings of the environment. `reward`: what training uses, the composite or task success."""

    reward: Reward = "composite"

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> "RetailSettings":
        """Read and check the settings of an execution file.

        Raises:
            EnvInputError: naming the setting that is unknown or out of range.
        """
        reader = SettingsReader(settings, environment="retail")
        reward = reader.take_text("reward", default="composite")
        reader.finish()
        if reward == "composite":
            return cls(reward="composite")
        if reward == "native":
            return cls(reward="native")
        raise EnvInputError("environment.settings.reward", reward, "composite or native")


class ShopWorld:
    """One episode's shop and the right outcome of its task; implements `World`."""

    def __init__(self, task: RetailTask) -> None:
        self._goal = task.goal_sha256
        self.shop = Shop(fresh_database())

    def call(self, name: str, arguments: Mapping[str, Any]) -> conversation.ToolResult:
        """Execute one tool call."""
        return self.shop.call(name, arguments)

    def reward(self, said: Sequence[str]) -> float:
        """Return 1 if the database is as it should be, else 0; what was said does not count."""
        return float(database_sha256(self.shop.database) == self._goal)


class RetailEnvironment(SystemTeacher):
    """Orders to cancel, change, return and exchange, with a scripted user and a rule-based judge.

    Args:
        settings: see `RetailSettings`.
        renderer: turns messages into tokens.
        seed: of the training order (the spec's seed).
        system_prompt: replaces the shop's policy text where not None.
        judge: a served model that scores transcripts; the rule-based judge where None.
    """

    name = "retail"
    metrics = ("composite_rubric_score", NATIVE_METRIC, *DIMENSIONS)

    def __init__(
        self,
        settings: RetailSettings,
        *,
        renderer: ChatRenderer,
        seed: int,
        system_prompt: str | None = None,
        judge: Partner | None = None,
    ) -> None:
        self.settings = settings
        self._renderer = renderer
        self._seed = seed
        self._judge_partner = judge
        self._judge: Judge = (
            ServedJudge(judge) if judge else RuleJudge(writes=WRITES, transfer=TRANSFER)
        )
        self.system = system_text() if system_prompt is None else system_prompt
        train, held_out = build_tasks()
        data_order.check_disjoint([task.email for task in train], [task.email for task in held_out])
        self._tasks = {task.task_id: task for task in (*train, *held_out)}
        self.train_ids = tuple(task.task_id for task in train)
        self.eval_ids = tuple(task.task_id for task in held_out)
        self.data_digests: Mapping[str, str] = {
            "database": database_sha256(fresh_database()),
            "train": _tasks_sha256(train),
            "eval": _tasks_sha256(held_out),
        }
        self.data_order: Mapping[str, Any] = data_order.order_record(self.train_ids, seed=seed)

    def task(self, item_id: str) -> RetailTask:
        """Return one task with its right outcome; never shown to a model."""
        if item_id not in self._tasks:
            raise EnvInputError("item_id", item_id, "a task such as retail-W100")
        return self._tasks[item_id]

    def item(self, item_id: str) -> Item:
        """Return one task as it opens."""
        task = self.task(item_id)
        messages = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": task.opening},
        ]
        return Item(
            item_id=item_id,
            prompt_tokens=self._renderer.prompt(messages),
            reference=json.dumps(task.actions),
            info={"kind": task.kind},
        )

    def train_batch(self, step: int, groups: int) -> list[str]:
        """Return the ids of rollout step `step`."""
        return data_order.batch_ids(self.train_ids, seed=self._seed, step=step, groups=groups)

    async def run_episode(
        self, item_id: str, sampler: Sampler, *, settings: EpisodeSettings, seed: int
    ) -> Episode:
        """Play one task and grade it; see `envs.dialogue.play`."""
        return await play(
            self._scene(item_id), sampler, renderer=self._renderer, settings=settings, seed=seed
        )

    def canaries(self) -> list[CanaryResult]:
        """Check that the right call, and only it, earns the task reward of the first task."""
        task = self.task(self.eval_ids[0])
        found = []
        for actions, expected in ((task.actions, 1.0), ((), 0.0)):
            world = ShopWorld(task)
            for name, arguments in actions:
                world.call(name, arguments)
            found.append(
                CanaryResult(
                    item_id=task.task_id,
                    reply=json.dumps(actions),
                    metric=NATIVE_METRIC,
                    expected=expected,
                    value=world.reward(()),
                )
            )
        return found

    def evaluator_provenance(
        self, *, settings: EpisodeSettings, item_ids: Sequence[str]
    ) -> dict[str, Any]:
        """What determines a score, as plain JSON data."""
        partners = {"simulator": None, "judge": self._judge_partner}
        return {
            "code_sha256": conversation_sha256(_own_modules(), **partners),
            "prompt_template": json.dumps(
                {
                    "renderer": self._renderer.name,
                    "system": self.system,
                    "partners": partner_records(**partners),
                },
                sort_keys=True,
            ),
            "decoding": {**settings.decoding(), "stop": self._renderer.stop_tokens()},
            "parser": "envs.tool_calls.parse_turn; task_reward: database digest; "
            f"judge: {type(self._judge).__name__}",
            "items": {"ids": list(item_ids), "data_sha256": dict(self.data_digests)},
        }

    def generation_report(self) -> dict[str, Any]:
        """The audit of the training tasks, which are generated; see `envs.retail.audit`."""
        return generation_report()

    async def demonstrations(self, count: int, *, seed: int) -> list[Episode]:
        """Solved training tasks for a warm start; see `envs.retail.demonstrations`."""
        return await demonstrations(self, renderer=self._renderer, count=count, seed=seed)

    def _scene(self, item_id: str) -> Scene:
        """A fresh shop and user for one episode."""
        task = self.task(item_id)
        world = ShopWorld(task)
        user: User = ScriptedUser(task, world.shop)
        typed: World = world
        return Scene(
            item_id=item_id,
            system=self.system,
            world=typed,
            user=user,
            judge=self._judge,
            reward_of=self._reward_of,
            native_metric=NATIVE_METRIC,
        )

    def _reward_of(self, native: float, judgement: Judgement) -> float:
        return native if self.settings.reward == "native" else judgement.composite


def _tasks_sha256(found: Sequence[RetailTask]) -> str:
    rows = [[t.task_id, t.kind, t.email, t.opening, t.actions, t.goal_sha256] for t in found]
    return text_sha256(json.dumps(rows))


def _own_modules() -> list[ModuleType]:
    """This package's modules whose code takes part in a score."""
    found = [inspect.getmodule(_own_modules), data, tasks, tools, scripted_user, rule_judge]
    return [module for module in found if module is not None]
