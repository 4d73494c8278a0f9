"""tau-bench's retail domain behind the same conversation as the embedded shop.

Tools, database, tasks and reward are the package's own; its user simulators, its loop and its
litellm are not used. Each episode has an environment object of its own.
"""

import inspect
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from envs import data_order, instruction_user, tau_package
from envs.conversation import DIMENSIONS, Judge, Judgement, ToolResult, User, clipped
from envs.dialogue import Scene, play, turn_seed
from envs.errors import EnvInputError
from envs.grading_code import conversation_sha256, partner_records
from envs.instruction_user import InstructionUser
from envs.protocols import CanaryResult, Episode, EpisodeSettings, Item, Sampler
from envs.rendering import ChatRenderer
from envs.retail import rule_judge
from envs.retail.rule_judge import RuleJudge
from envs.served import Partner
from envs.served_judge import ServedJudge
from envs.served_user import ServedUser
from envs.settings import SettingsReader
from envs.tau_package import COMMIT, TauRetail, load_tau_retail
from envs.teacher import SystemTeacher
from envs.xml_calls import ParameterTypes

NATIVE_METRIC = "tau_bench_task_reward"
TRANSFER = "transfer_to_human_agents"
WRITES = (
    "cancel_pending_order",
    "exchange_delivered_order_items",
    "modify_pending_order_address",
    "modify_pending_order_items",
    "modify_pending_order_payment",
    "modify_user_address",
    "return_delivered_order_items",
)
MAX_EXPRESSION_CHARS = 200
MAX_ERROR_CHARS = 1_000
"""Of a tool's error, which may quote its arguments."""

QUESTIONABLE = (12, 13, 18, 34, 49)
"""Test tasks whose reference was corrected in later versions of the benchmark."""
SOLVED_BY_NOTHING = (10, 12, 25, 50, 57)
"""Test tasks among the first 60 that doing nothing solves."""


@dataclass(frozen=True, slots=True)
class TauSettings:
    """Settings: the package's commit, and how many training and held-out tasks are used."""

    commit: str = COMMIT
    train_tasks: int = 80
    eval_tasks: int = 60

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> "TauSettings":
        """Read and check the settings of an execution file.

        Raises:
            EnvInputError: naming the setting that is unknown or out of range.
        """
        reader = SettingsReader(settings, environment="tau_retail")
        read = cls(
            commit=reader.take_text("commit", default=COMMIT) or COMMIT,
            train_tasks=reader.take_int("train_tasks", default=80, low=1, high=500),
            eval_tasks=reader.take_int("eval_tasks", default=60, low=1, high=115),
        )
        reader.finish()
        return read


def guarded_expression(arguments: Mapping[str, Any]) -> str | None:
    """Say why an expression must not be given to the package's calculator; None if it may.

    `9**9**9` passes its character filter and then computes for hours inside one C call that no
    time limit can interrupt.
    """
    expression = arguments.get("expression")
    if not isinstance(expression, str):
        return "expression must be a text"
    if len(expression) > MAX_EXPRESSION_CHARS:
        return f"expression has more than {MAX_EXPRESSION_CHARS} characters"
    if "**" in expression.replace(" ", ""):
        return "powers are not supported"
    return None


class TauWorld:
    """One episode's tau-bench environment; implements `World`."""

    def __init__(self, package: TauRetail, split: str, index: int) -> None:
        # The strategy "human" builds no language model and asks nobody.
        self.env = package.make_env(user_strategy="human", task_split=split, task_index=index)
        self._action = package.action

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Execute one tool call as the package's `step` does."""
        if name not in self.env.tools_map:
            return ToolResult(f"Unknown action {name[:80]}", error="unknown tool", unknown=True)
        problem = guarded_expression(arguments) if name == "calculate" else None
        if problem is not None:
            return ToolResult(f"Error: {problem}", error=problem)
        try:
            text = str(self.env.tools_map[name].invoke(data=self.env.data, **arguments))
        except Exception as error:  # noqa: BLE001 - the package's tools raise anything
            text = clipped(f"Error: {error}", MAX_ERROR_CHARS)
        failed = text.startswith("Error")
        return ToolResult(text, error=text[:200] if failed else None, ends=name == TRANSFER)

    def reward(self, said: Sequence[str]) -> float:
        """Return the package's reward. It replaces the database, so it is asked for once."""
        self.env.actions = [self._action(name="respond", kwargs={"content": text}) for text in said]
        return float(self.env.calculate_reward().reward)


class TauRetailEnvironment(SystemTeacher):
    """Retail tasks of tau-bench.

    Args:
        settings: see `TauSettings`.
        renderer: turns messages into tokens; it also writes the tools into the system message.
        seed: of the choice and order of training tasks (the spec's seed).
        system_prompt: replaces the package's policy text where not None.
        data_dir: a checkout of tau-bench; the installed package where None.
        simulator: plays the user; a deterministic one where None.
        judge: scores transcripts; the rule-based one where None.
    """

    name = "tau_retail"
    metrics = ("composite_rubric_score", NATIVE_METRIC, *DIMENSIONS)

    def __init__(
        self,
        settings: TauSettings,
        *,
        renderer: ChatRenderer,
        seed: int,
        system_prompt: str | None = None,
        data_dir: Path | None = None,
        simulator: Partner | None = None,
        judge: Partner | None = None,
    ) -> None:
        self.settings = settings
        self._renderer, self._simulator, self._judge_partner = renderer, simulator, judge
        self._package = load_tau_retail(data_dir, commit=settings.commit)
        order = list(range(len(self._package.tasks["train"])))
        random.Random(seed).shuffle(order)
        train = order[: settings.train_tasks]
        held_out = range(settings.eval_tasks)
        data_order.check_disjoint(
            [self._package.tasks["train"][n].instruction for n in train],
            [self._package.tasks["test"][n].instruction for n in held_out],
        )
        self.train_ids = tuple(f"tau-train-{n:03d}" for n in train)
        self.eval_ids = tuple(f"tau-test-{n:03d}" for n in held_out)
        self.data_digests: Mapping[str, str] = {"tau_bench": self._package.sha256}
        self.data_order: Mapping[str, Any] = {
            "source": f"sierra-research/tau-bench@{settings.commit}",
            "generator": "random.Random(seed).shuffle(list(range(500))), taken in order",
            "seed": seed,
            "n": len(train),
            "ids": list(self.train_ids),
        }
        tools = [info["function"] for info in self._world("tau-test-000").env.tools_info]
        self._xml_types = parameter_types(tools)
        policy = self._package.wiki if system_prompt is None else system_prompt
        self.system = renderer.system_with_tools(tools, policy)

    def item(self, item_id: str) -> Item:
        """Return one task.

        The user opens it anew in every episode, so the prompt is the system message alone.
        """
        split, index = self._place(item_id)
        task = self._package.tasks[split][index]
        return Item(
            item_id=item_id,
            prompt_tokens=self._renderer.prompt([{"role": "system", "content": self.system}]),
            reference=json.dumps([action.model_dump() for action in task.actions]),
            info=_flags(split, index),
        )

    def train_batch(self, step: int, groups: int) -> list[str]:
        """Return the ids of rollout step `step`: the shuffled tasks in order, over and over."""
        if not 1 <= groups <= len(self.train_ids) or step < 0:
            raise EnvInputError("groups", groups, f"1 to {len(self.train_ids)}, and step >= 0")
        batch = step % (len(self.train_ids) // groups)
        return list(self.train_ids[batch * groups : (batch + 1) * groups])

    async def run_episode(
        self, item_id: str, sampler: Sampler, *, settings: EpisodeSettings, seed: int
    ) -> Episode:
        """Play one task and grade it; see `envs.dialogue.play`."""
        episode = await play(
            self._scene(item_id, seed),
            sampler,
            renderer=self._renderer,
            settings=settings,
            seed=seed,
        )
        return replace(episode, info={**episode.info, **_flags(*self._place(item_id))})

    def canaries(self) -> list[CanaryResult]:
        """Check that the reference solution of the first held-out task, and only it, earns 1."""
        item_id = self.eval_ids[0]
        split, index = self._place(item_id)
        task = self._package.tasks[split][index]
        found = []
        for actions, said, expected in ((task.actions, task.outputs, 1.0), ([], [], 0.0)):
            world = self._world(item_id)
            for action in actions:
                world.call(action.name, action.kwargs)
            value = world.reward(said)
            found.append(CanaryResult(item_id, str(len(actions)), NATIVE_METRIC, expected, value))
        return found

    def evaluator_provenance(
        self, *, settings: EpisodeSettings, item_ids: Sequence[str]
    ) -> dict[str, Any]:
        """What determines a score, as plain JSON data."""
        partners = {"simulator": self._simulator, "judge": self._judge_partner}
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
            "parser": "envs.tool_calls.parse_turn; tau_bench Env.calculate_reward; "
            f"judge: {'served' if self._judge_partner else 'rules'}",
            "items": {"ids": list(item_ids), "data_sha256": dict(self.data_digests)},
        }

    def _scene(self, item_id: str, seed: int) -> Scene:
        """A fresh environment, user and judge for one episode."""
        return Scene(
            item_id=item_id,
            system=self.system,
            world=self._world(item_id),
            user=self._user(item_id, seed),
            judge=self._judge(seed),
            reward_of=_composite,
            native_metric=NATIVE_METRIC,
            xml_types=self._xml_types,
        )

    def _user(self, item_id: str, seed: int) -> User:
        split, index = self._place(item_id)
        instruction = self._package.tasks[split][index].instruction
        if self._simulator is None:
            return InstructionUser(instruction)
        partner = replace(self._simulator, seed=turn_seed(seed, -1))
        return ServedUser(partner, system=str(self._package.user_prompt(instruction)))

    def _judge(self, seed: int) -> Judge:
        if self._judge_partner is None:
            return RuleJudge(writes=WRITES, transfer=TRANSFER)
        return ServedJudge(replace(self._judge_partner, seed=turn_seed(seed, -2)))

    def _world(self, item_id: str) -> TauWorld:
        return TauWorld(self._package, *self._place(item_id))

    def _place(self, item_id: str) -> tuple[str, int]:
        """Split and index of an id of this environment."""
        if item_id not in (*self.train_ids, *self.eval_ids):
            raise EnvInputError("item_id", item_id, "a task such as tau-test-000")
        _, split, number = item_id.split("-")
        return split, int(number)


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> ParameterTypes:
    """Return the JSON schema type of every parameter of every tool."""
    return {
        tool["name"]: {
            name: str(schema.get("type", "string"))
            for name, schema in tool["parameters"].get("properties", {}).items()
        }
        for tool in tools
    }


def _composite(native: float, judgement: Judgement) -> float:
    return judgement.composite


def _flags(split: str, index: int) -> dict[str, bool]:
    """What is known about a task, so that results can be read with and without it."""
    test = split == "test"
    return {
        "questionable_reference": test and index in QUESTIONABLE,
        "solved_by_nothing": test and index in SOLVED_BY_NOTHING,
    }


def _own_modules() -> list[ModuleType]:
    """This environment's modules; the package's own are in the data digest."""
    found = [inspect.getmodule(_own_modules), instruction_user, rule_judge, tau_package]
    return [module for module in found if module is not None]
