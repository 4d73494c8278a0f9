"""Which settings of self-distillation this version carries out."""

from __future__ import annotations

from typing import Any

from envs.registry import has_teacher
from envs.teacher import TEMPLATE_ID
from evidence.errors import InputError
from evidence.execution import ExecutionFile

MAX_FALLBACKS = 2
"""Fallbacks that have a phase of their own."""


def refuse_distillation(execution: ExecutionFile) -> None:
    """Refuse a teacher that cannot be asked as it is registered.

    Raises:
        InputError: naming the first setting.
    """
    for name, arm in execution.arms.items():
        settings = execution.advantage_of(name)
        distils = str(settings.kind).startswith("sdpo_")
        loss = None if arm.loss is None else arm.loss.kind
        if loss in ("sdpo_token", "sdpo_logit") and not distils:
            expected = f"an SDPO advantage, which says what the teacher of loss {loss} is shown"
            raise InputError(f"advantage of arm {name}", settings.kind, expected)
        if loss == "sdpo_logit":
            _refuse_support(f"arms.{name}.loss", arm.loss, execution)
        if distils:
            _refuse_teacher(f"arms.{name}.advantage", settings, execution)
    _refuse_fallbacks(execution)


def _refuse_teacher(where: str, settings: Any, execution: ExecutionFile) -> None:
    environment = execution.environment.name
    if not has_teacher(environment):
        expected = "an environment with a teacher's prompt, for an SDPO advantage"
        raise InputError("environment.name", environment, expected)
    if settings.prompt_template != TEMPLATE_ID:
        raise InputError(f"{where}.prompt_template", settings.prompt_template, TEMPLATE_ID)
    if settings.feedback == "environment":
        expected = "judge or none: these environments have no other words on an attempt"
        raise InputError(f"{where}.feedback", settings.feedback, expected)
    temperature = execution.rollout.temperature
    if temperature != 1.0:
        expected = "1.0: a teacher's scores are at temperature 1, and the two are subtracted"
        raise InputError("rollout.temperature", temperature, expected)


def _refuse_support(where: str, loss: Any, execution: ExecutionFile) -> None:
    """Refuse what a logit-level loss cannot be given: all tokens, or values of another pass."""
    if loss.top_k is None:
        expected = "a number of tokens: no service returns the whole vocabulary's scores"
        raise InputError(f"{where}.top_k", None, expected)
    if loss.anchor != "sampling":
        expected = "sampling: recomputed values are those of sampled tokens alone"
        raise InputError(f"{where}.anchor", loss.anchor, expected)
    if execution.rollout_correction is not None:
        expected = f"null with {where}.kind sdpo_logit"
        raise InputError("rollout_correction", "a correction", expected)


def _refuse_fallbacks(execution: ExecutionFile) -> None:
    """Refuse fallbacks that would change nothing, and ones without a bound on trying them."""
    if not execution.fallbacks:
        return
    if execution.calibration is None:
        raise InputError("calibration", None, "how much the fallbacks may be tried")
    if len(execution.fallbacks) > MAX_FALLBACKS:
        raise InputError("fallbacks", len(execution.fallbacks), f"at most {MAX_FALLBACKS}")
    kinds = {str(execution.advantage_of(name).kind) for name in execution.arms}
    for index, fallback in enumerate(execution.fallbacks):
        frozen = fallback.kind == "frozen_initial_teacher"
        if frozen and not any(kind.startswith("sdpo_") for kind in kinds):
            expected = "a fallback of an arm with a teacher"
            raise InputError(f"fallbacks[{index}].kind", fallback.kind, expected)
        planned = execution.rollout.max_turns
        if not frozen and (fallback.value is None or fallback.value <= planned):
            expected = f"more than {planned}, the planned turns"
            raise InputError(f"fallbacks[{index}].value", fallback.value, expected)
