"""Which settings of a served user simulator or judge this version carries out."""

from __future__ import annotations

from envs.registry import environment_names, partner_templates
from envs.served_renderer import prints_date, reasoning_effort
from evidence.errors import InputError
from evidence.execution import ExecutionFile
from evidence.run_settings import ServedModel

_OWN = {
    "simulator": "scripted, or null: environment {} asks no served model to play the user",
    "judge": "rules, or null: environment {} asks no served model to score",
}


def refuse_partners(execution: ExecutionFile) -> None:
    """Refuse partners that would be recorded otherwise than they are asked.

    Raises:
        InputError: naming the first setting.
    """
    environment = execution.environment.name
    if environment not in environment_names():
        expected = f"one of {', '.join(environment_names())}"
        raise InputError("environment.name", environment, expected)
    templates = partner_templates(environment)
    for role, settings in (("simulator", execution.simulator), ("judge", execution.judge)):
        if not isinstance(settings, ServedModel):
            continue
        if role not in templates:
            raise InputError(f"{role}.kind", "served", _OWN[role].format(environment))
        template = templates[role]
        if settings.prompt_template != template:
            expected = f"{template}, the one that environment {environment} uses"
            raise InputError(f"{role}.prompt_template", settings.prompt_template, expected)
        _refuse_renderer(role, settings)


def _refuse_renderer(role: str, settings: ServedModel) -> None:
    """Refuse an effort and a date that the renderer does not put into the prompt."""
    renderer = settings.renderer
    if renderer is None:
        expected = "the name of a tinker-cookbook renderer: none is chosen by the model's name"
        raise InputError(f"{role}.renderer", None, expected)
    effort, planned = reasoning_effort(renderer), settings.reasoning_effort
    if planned is not None and planned != effort:
        allowed = "null" if effort is None else f"{effort}, or null"
        expected = f"{allowed}: the effort is what renderer {renderer} asks for"
        raise InputError(f"{role}.reasoning_effort", planned, expected)
    dated, date = prints_date(renderer), settings.current_date
    if dated and date is None:
        expected = f"a date such as 2026-01-31: renderer {renderer} prints one"
        raise InputError(f"{role}.current_date", None, expected)
    if not dated and date is not None:
        expected = f"null: renderer {renderer} prints no date"
        raise InputError(f"{role}.current_date", date, expected)
