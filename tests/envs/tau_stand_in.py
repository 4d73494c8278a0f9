"""A small package with the interfaces of tau-bench's retail domain, written for these tests."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from envs import tau_package
from envs.tau_package import package_sha256

STAND_IN = {
    "__init__.py": "from tau_bench.envs.base import Env\n",
    "types.py": """
from typing import Any, Dict, List
from pydantic import BaseModel
class Action(BaseModel):
    name: str
    kwargs: Dict[str, Any]
class Task(BaseModel):
    user_id: str
    actions: List[Action]
    instruction: str
    outputs: List[str]
class RewardResult(BaseModel):
    reward: float
""",
    "envs/__init__.py": "from tau_bench.envs.user import LLMUserSimulationEnv\n",
    "envs/tool.py": "",
    "envs/user.py": """
from litellm import completion
class LLMUserSimulationEnv:
    def build_system_prompt(self, instruction):
        return "You are a user.\\n\\nInstruction: " + instruction
""",
    "envs/base.py": """
from tau_bench.types import Action, RewardResult
class Env:
    def __init__(self, load, tools, tasks, index):
        self.load, self.data = load, load()
        self.tools_map = {t.get_info()["function"]["name"]: t for t in tools}
        self.tools_info = [t.get_info() for t in tools]
        self.task, self.actions = tasks[index], []
    def calculate_reward(self):
        mine, self.data = self.data, self.load()
        for action in self.task.actions:
            self.tools_map[action.name].invoke(data=self.data, **action.kwargs)
        said = [a.kwargs["content"].lower().replace(",", "") for a in self.actions]
        told = all(any(o.lower() in s for s in said) for o in self.task.outputs)
        return RewardResult(reward=float(mine == self.data and told))
""",
    "envs/retail/__init__.py": "",
    "envs/retail/wiki.md": "Be kind.",
    "envs/retail/wiki.py": 'WIKI = "Be kind."\n',
    "envs/retail/tasks_train.py": """
from tau_bench.types import Task
TASKS_TRAIN = [
    Task(user_id=f"u{n}", instruction=f"Train wish {n}.", outputs=[], actions=[
        {"name": "cancel_pending_order", "kwargs": {"order_id": f"#W{n}"}}]) for n in range(500)
]
""",
    "envs/retail/tasks_test.py": """
from tau_bench.types import Task
TASKS_TEST = [
    Task(user_id=f"t{n}", instruction=f"Test wish {n}.", outputs=["1234"] if n == 1 else [], actions=[
        {"name": "cancel_pending_order", "kwargs": {"order_id": f"#W{n}"}}]) for n in range(115)
]
""",
    "envs/retail/env.py": """
from tau_bench.envs.base import Env
from tau_bench.envs.retail.tasks_test import TASKS_TEST
from tau_bench.envs.retail.tasks_train import TASKS_TRAIN
def info(name, **types):
    return {"type": "function", "function": {"name": name, "description": name, "parameters": {
        "type": "object", "properties": {k: {"type": v} for k, v in types.items()}}}}
class Cancel:
    @staticmethod
    def invoke(data, order_id):
        if order_id in data:
            raise KeyError(order_id)
        data[order_id] = "cancelled"
        return "ok"
    @staticmethod
    def get_info():
        return info("cancel_pending_order", order_id="string")
class Calculate:
    @staticmethod
    def invoke(data, expression):
        return str(round(float(eval(expression)), 2))
    @staticmethod
    def get_info():
        return info("calculate", expression="string")
class Transfer:
    @staticmethod
    def invoke(data, summary):
        return "Transfer successful"
    @staticmethod
    def get_info():
        return info("transfer_to_human_agents", summary="string")
class MockRetailDomainEnv(Env):
    def __init__(self, user_strategy, task_split, task_index):
        assert user_strategy == "human"
        tasks = TASKS_TEST if task_split == "test" else TASKS_TRAIN
        super().__init__(dict, [Cancel, Calculate, Transfer], tasks, task_index)
""",
}


def forget_package() -> None:
    """Let the next import of tau_bench find another one."""
    for name in [name for name in sys.modules if name.split(".")[0] == "tau_bench"]:
        del sys.modules[name]


@contextmanager
def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that holds the stand-in package, whose digest is taken for the pinned one."""
    for name, text in STAND_IN.items():
        path = folder / "tau_bench" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(tau_package, "PINNED_SHA256", package_sha256(folder / "tau_bench"))
    forget_package()
    yield folder
    forget_package()
