"""A run whose environment and service are small fakes: no model, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.protocols import CanaryResult, Episode, Item
from evidence.execution import ExecutionFile
from evidence.run import Run
from evidence.spec import Spec
from tasks.context import LaunchChoices, RunContext
from tasks.patience import Patience, RetryPolicy
from tasks.reachability import ServerInfo
from tests.flows import tiny_spec
from tests.tasks.fakes import FakeClock, FixedRandom


def episode(item_id: str, **changes: Any) -> Episode:
    """A graded episode of one prompt token and one sampled token."""
    fields: dict[str, Any] = {
        "tokens": (1, 2),
        "loss_mask": (False, True),
        "sampling_logprobs": (None, -0.5),
        "turn_of_token": (0, 0),
        "reward": 1.0,
        "stop_reason": "stop",
        "truncated": False,
        "text": "5",
        "metrics": {"accuracy": 1.0},
    }
    return Episode(item_id=item_id, **fields | changes)


def ungraded(item_id: str) -> Episode:
    """What a dialogue leaves when its judge has failed."""
    return episode(
        item_id,
        reward=float("nan"),
        metrics={},
        graded=False,
        info={"failure": "judge: no answer after 3 tries"},
    )


@dataclass
class FakeEnvironment:
    """Ten held-out items; every episode succeeds unless it is listed in `failing`."""

    eval_ids: Sequence[str] = tuple(f"item-{index}" for index in range(10))
    metrics: Sequence[str] = ("accuracy",)
    failing: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    before: Any = None

    async def run_episode(self, item_id: str, sampler: Any, *, settings: Any, seed: int) -> Episode:
        self.asked.append(item_id)
        if self.before is not None:
            self.before(item_id)
        return ungraded(item_id) if item_id in self.failing else episode(item_id)

    def item(self, item_id: str) -> Item:
        return Item(item_id=item_id, prompt_tokens=(1,), reference="5", info={})

    def train_batch(self, step: int, groups: int) -> list[str]:
        return [f"train-{step}-{group}" for group in range(groups)]

    def canaries(self) -> list[CanaryResult]:
        return [
            CanaryResult(item_id="item-0", reply="5", metric="accuracy", expected=1.0, value=1.0)
        ]

    def evaluator_provenance(self, *, settings: Any, item_ids: Sequence[str]) -> Mapping[str, Any]:
        return {"grader": "fake", "items": list(item_ids)}


class FakeService:
    """Time, patience and nothing else."""

    def __init__(self) -> None:
        self.clock = FakeClock()

    def patience(self) -> Patience:
        return Patience(
            RetryPolicy(),
            self.clock,
            FixedRandom(),  # type: ignore[arg-type]
            steps_completed=lambda: 0,
        )

    async def retrying(self, what: str, operation: Any, *, from_scratch: bool = False) -> Any:
        return await operation()


class FakeSampler:
    """A sampler that is only closed."""

    async def close(self) -> bool:
        return True


async def open_fake() -> Any:
    """Open a `FakeSampler`."""
    return FakeSampler()


def _any(fake: object) -> Any:
    """A fake in the place of the real thing."""
    return fake


def context(
    folder: Path,
    environment: Any = None,
    *,
    service: Any = None,
    limit: int | None = None,
    planned: Mapping[str, Any] | None = None,
    **changes: Any,
) -> RunContext:
    """A run of the small spec in a folder, with top-level fields of the spec replaced.

    `planned` replaces top-level fields of the execution file.
    """
    document = tiny_spec.spec(**changes)
    execution = tiny_spec.execution(document, **(planned or {}))
    run = Run.create(str(folder), run_id="fake", spec=document, execution=execution)
    ctx = RunContext(
        run=run,
        spec=Spec.parse(document),
        execution=ExecutionFile.parse(execution),
        service=service if service is not None else _any(FakeService()),
        server=ServerInfo(models=("tiny",)),
        choices=LaunchChoices(limit=limit),
    )
    ctx.environment = environment if environment is not None else _any(FakeEnvironment())
    return ctx
