"""Make an environment by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tinker_cookbook.renderers import Renderer

from envs.arithmetic import ArithmeticEnvironment, ArithmeticSettings
from envs.errors import EnvInputError
from envs.gsm8k import Gsm8kEnvironment, Gsm8kSettings
from envs.protocols import Environment
from envs.rendering import ChatRenderer, make_renderer
from envs.retail.environment import RetailEnvironment, RetailSettings
from envs.served import Partner
from envs.served_judge import TEMPLATE_ID as JUDGE_TEMPLATE
from envs.served_user import TEMPLATE_ID as USER_TEMPLATE
from envs.tau_retail import TauRetailEnvironment, TauSettings


def make_environment(
    name: str,
    settings: Mapping[str, Any],
    *,
    tokenizer: Any,
    renderer: str | Renderer,
    data_dir: str | Path | None = None,
    seed: int = 0,
    system_prompt: str | None = None,
    partners: Mapping[str, Partner] | None = None,
) -> Environment:
    """Return the environment of that name.

    Args:
        name: one of `environment_names()`.
        settings: of the environment; unknown names are refused.
        tokenizer: the policy model's tokenizer.
        renderer: a tinker-cookbook renderer's name, or a renderer over `tokenizer`.
        data_dir: folder with the data files, for environments that read any.
        seed: of the training order; the spec's seed.
        system_prompt: the first message; the environment's default where None.
        partners: served models, by `simulator` and `judge`; the deterministic ones where missing.

    Raises:
        EnvInputError: if the name is unknown, a setting is wrong, a partner is one that the
            environment never asks, or data is missing.
    """
    if name not in _MAKERS:
        raise EnvInputError("environment.name", name, f"one of {', '.join(environment_names())}")
    for role in partners or {}:
        if role not in partner_templates(name):
            expected = f"nothing served in this role: environment {name} never asks it"
            raise EnvInputError(f"{role}.kind", "served", expected)
    chat = (
        make_renderer(renderer, tokenizer)
        if isinstance(renderer, str)
        else ChatRenderer(renderer=renderer, name=type(renderer).__name__)
    )
    inputs = _Inputs(
        settings=settings,
        renderer=chat,
        data_dir=None if data_dir is None else Path(data_dir),
        seed=seed,
        system_prompt=system_prompt,
        partners=dict(partners or {}),
    )
    return _MAKERS[name](inputs)


def environment_names() -> tuple[str, ...]:
    """Names that `make_environment` knows."""
    return tuple(sorted(_MAKERS))


def partner_templates(name: str) -> Mapping[str, str]:
    """Roles that an environment may have played by a served model, each with the id of its prompt."""
    return _SERVED.get(name, MappingProxyType({}))


def has_teacher(name: str) -> bool:
    """Whether the environment of that name can write a teacher's sequence (`TeacherSource`)."""
    return name in _WITH_TEACHER


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The arguments of `make_environment`, checked."""

    settings: Mapping[str, Any]
    renderer: ChatRenderer
    data_dir: Path | None
    seed: int
    system_prompt: str | None
    partners: Mapping[str, Partner]


def _arithmetic(inputs: _Inputs) -> Environment:
    return ArithmeticEnvironment(
        ArithmeticSettings.read(inputs.settings),
        renderer=inputs.renderer,
        seed=inputs.seed,
        system_prompt=inputs.system_prompt,
    )


def _gsm8k(inputs: _Inputs) -> Environment:
    return Gsm8kEnvironment(
        Gsm8kSettings.read(inputs.settings),
        renderer=inputs.renderer,
        seed=inputs.seed,
        system_prompt=inputs.system_prompt,
        data_dir=inputs.data_dir,
    )


def _retail(inputs: _Inputs) -> Environment:
    return RetailEnvironment(
        RetailSettings.read(inputs.settings),
        renderer=inputs.renderer,
        seed=inputs.seed,
        system_prompt=inputs.system_prompt,
        judge=inputs.partners.get("judge"),
    )


def _tau_retail(inputs: _Inputs) -> Environment:
    folder = inputs.data_dir
    return TauRetailEnvironment(
        TauSettings.read(inputs.settings),
        renderer=inputs.renderer,
        seed=inputs.seed,
        system_prompt=inputs.system_prompt,
        data_dir=folder if folder and (folder / "tau_bench").is_dir() else None,
        simulator=inputs.partners.get("simulator"),
        judge=inputs.partners.get("judge"),
    )


_MAKERS: dict[str, Callable[[_Inputs], Environment]] = {
    "arithmetic": _arithmetic,
    "gsm8k": _gsm8k,
    "retail": _retail,
    "tau_retail": _tau_retail,
}
_SERVED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "retail": MappingProxyType({"judge": JUDGE_TEMPLATE}),
        "tau_retail": MappingProxyType({"simulator": USER_TEMPLATE, "judge": JUDGE_TEMPLATE}),
    }
)
_WITH_TEACHER = frozenset({"retail", "tau_retail"})
