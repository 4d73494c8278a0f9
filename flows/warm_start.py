"""Make a warm start on its own: audit, demonstrations, supervised steps, success before and after.

`flows.run` takes the same steps inside a comparison; this is how the adapter that it may start from
is made once, and measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import tinker

from envs.protocols import Environment, EpisodeSettings
from envs.registry import make_environment
from evidence import generation_audit
from evidence.canonical import derive_seed
from evidence.errors import InputError
from evidence.execution import ExecutionFile
from evidence.run_settings import WarmStart
from evidence.spec import Spec
from tasks.context import require_graded, settle_all
from tasks.demonstration_data import Demonstrations, loss_tokens, make_demonstrations
from tasks.planned import planned_lora, planned_rollouts
from tasks.progress import Progress, ProgressEvent
from tasks.sampling import ServiceSampler
from tasks.service import LoraSettings, Service
from tasks.tokenizers import load_tokenizer
from tasks.warm_start import EpochReport, WarmStartTraining


@dataclass(frozen=True, slots=True)
class WarmStartPlan:
    """One warm start.

    Attributes:
        spec: the spec that declares it.
        execution: its execution file.
        service: where it is trained.
        episodes: training tasks that are played before and after.
        progress: listener.
    """

    spec: Spec
    execution: ExecutionFile
    service: Service
    episodes: int
    progress: Progress

    @property
    def settings(self) -> WarmStart:
        """The supervised steps.

        Raises:
            InputError: if the execution file has none.
        """
        if self.execution.warm_start is None:
            raise InputError("warm_start", None, "settings in the execution file")
        return self.execution.warm_start

    @property
    def lora(self) -> LoraSettings:
        """The adapter that is trained."""
        return planned_lora(self.spec, self.execution)

    @property
    def rollouts(self) -> EpisodeSettings:
        """How the comparison will sample its training episodes."""
        return planned_rollouts(self.spec, self.execution)

    def tell(self, message: str, *, done: int = 0, total: int = 0) -> None:
        """Tell the listener what is going on."""
        self.progress(ProgressEvent("warm start", None, done, total, message))


@dataclass(frozen=True, slots=True)
class TrainedWarmStart:
    """A finished warm start.

    Attributes:
        uri: its last checkpoint at the service.
        facts: what was trained on, and the mean loss of every epoch.
        environment: the tasks.
        before: what the base model does on training tasks, as `success` says it.
    """

    uri: str
    facts: dict[str, Any]
    environment: Environment
    before: dict[str, Any]


async def train_warm_start(
    plan: WarmStartPlan,
    *,
    before: dict[str, Any] | None,
    done: Sequence[EpochReport],
    keep: Callable[[dict[str, Any]], None],
) -> TrainedWarmStart:
    """Audit the data, measure the base model, and take the supervised steps.

    Args:
        plan: the warm start.
        before: the base model's measurement, where an earlier call has made it.
        done: epochs that earlier calls have finished.
        keep: keeps `{"before": ...}` and `{"epoch": ...}` for the next call.

    Raises:
        InputError: if the data does not pass its generation audit.
    """
    environment = await _environment(plan)
    require_audited(plan.spec, environment)
    data = await make_demonstrations(environment, plan.settings)
    if before is None:
        before = await _base_success(plan, environment)
        keep({"before": before})
    reports = list(done)

    def kept(report: EpochReport) -> None:
        reports.append(report)
        keep({"epoch": asdict(report)})

    optimizer = plan.execution.optimizer
    training = WarmStartTraining(
        plan.service,
        plan.lora,
        plan.settings,
        adam=tinker.AdamParams(beta1=optimizer.beta1, beta2=optimizer.beta2, eps=optimizer.eps),
        tell=lambda step, steps: plan.tell("supervised step", done=step, total=steps),
    )
    uri = await training.run(data, done=done, keep=kept)
    return TrainedWarmStart(uri, _facts(data, reports), environment, before)


def _facts(data: Demonstrations, reports: Sequence[EpochReport]) -> dict[str, Any]:
    return {
        "demonstrations": len(data.episodes),
        "demonstrations_sha256": data.sha256,
        "loss_tokens": loss_tokens(data.sequences),
        "epoch_losses": [_mean(report.losses) for report in reports],
    }


def _mean(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return round(fmean(known), 6) if known else None


def require_audited(spec: Spec, environment: Environment) -> None:
    """Refuse generated data that does not pass the spec's audit.

    Raises:
        InputError: with the audit's first reason.
    """
    offered = getattr(environment, "generation_report", None)
    report: dict[str, Any] = (offered() if callable(offered) else None) or {}
    result = generation_audit.validate_for_spec(
        spec.raw,
        report.get("report"),
        tasks=report.get("tasks"),
        evaluation=report.get("evaluation"),
    )
    if result.status != "passed":
        reason = (*result.reasons, "no reason")[0]
        raise InputError("generation_audit", result.status, f"passed ({reason})")


async def _environment(plan: WarmStartPlan) -> Environment:
    """Build the environment with the tokenizer that the service names."""
    trainer = await plan.service.create_trainer(plan.lora, label="warm-start-look")
    try:
        tokenizer = load_tokenizer(trainer.info.tokenizer or plan.spec.base_model)
    finally:
        await trainer.close()
    return make_environment(
        plan.execution.environment.name,
        plan.execution.environment.settings,
        tokenizer=tokenizer,
        renderer=plan.execution.renderer,
        seed=plan.spec.rule.seeds[0],
        system_prompt=plan.execution.system_prompt,
    )


async def _base_success(plan: WarmStartPlan, environment: Environment) -> dict[str, Any]:
    plan.tell("playing training tasks with the base model")
    sampler = await plan.service.open_sampler(base_model=plan.spec.base_model, label="base")
    try:
        return await success(plan, environment, sampler)
    finally:
        await sampler.close()


async def adapted_success(
    plan: WarmStartPlan, environment: Environment, uri: str
) -> dict[str, Any]:
    """What the weights of a checkpoint do on training tasks; see `success`."""
    plan.tell("playing training tasks with the warm start")
    trainer = await plan.service.load_weights(uri, plan.lora, label="warm-start-measure")
    try:
        return await success(plan, environment, await trainer.publish("warm-start"))
    finally:
        await trainer.close()


async def success(
    plan: WarmStartPlan, environment: Environment, sampler: ServiceSampler
) -> dict[str, Any]:
    """Play training tasks as the comparison will, and return the mean of every metric.

    Task i of the first `episodes` training tasks is played once, with a seed derived from its id.
    """
    items = environment.train_ids[: plan.episodes]
    episodes = await settle_all(
        [
            environment.run_episode(
                item_id,
                sampler,
                settings=plan.rollouts,
                seed=derive_seed(plan.spec.digest, "warm start", item_id),
            )
            for item_id in items
        ]
    )
    require_graded(episodes)
    means = {
        name: round(fmean(episode.metrics[name] for episode in episodes), 6)
        for name in environment.metrics
    }
    return {
        "episodes": len(episodes),
        "temperature": plan.rollouts.temperature,
        **means,
        "turns": sum(episode.agent_turns for episode in episodes),
        "tool_calls": sum(episode.tool_calls for episode in episodes),
        "parse_failures": sum(episode.parse_failures for episode in episodes),
    }
