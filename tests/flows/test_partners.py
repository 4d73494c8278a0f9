"""A simulator or judge that would be recorded otherwise than it is asked is refused at once."""

from __future__ import annotations

import pytest

from envs.registry import environment_names, partner_templates
from evidence.errors import InputError
from evidence.execution import ExecutionFile
from evidence.spec import Spec
from flows.catalog import find_spec, shipped_specs
from flows.partners import refuse_partners
from flows.plan import check_launchable
from tests.flows import retail_spec
from tests.flows.tiny_spec import Document

TAU: Document = {"environment": {"name": "tau_retail", "settings": {}}}
USER: Document = {
    "kind": "served",
    "model": "m",
    "prompt_template": "tau-user-v1",
    "temperature": 0.0,
    "max_tokens": 8,
    "renderer": "qwen3_disable_thinking",
}
JUDGE: Document = USER | {
    "prompt_template": "rubric-judge-v1",
    "renderer": "gpt_oss_low_reasoning",
    "current_date": "2026-01-01",
}


def _execution(**changes: Document) -> ExecutionFile:
    return ExecutionFile.parse(retail_spec.execution(retail_spec.spec(), **changes))


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (
            {"simulator": USER},
            "simulator.kind: expected scripted, or null: environment retail asks no served model "
            "to play the user, found 'served'",
        ),
        (
            {"environment": {"name": "gsm8k", "settings": {}}, "judge": JUDGE},
            "judge.kind: expected rules, or null: environment gsm8k asks no served model to score, "
            "found 'served'",
        ),
        (
            {"environment": {"name": "shop", "settings": {}}},
            "environment.name: expected one of arithmetic, gsm8k, retail, tau_retail, found 'shop'",
        ),
        (
            {"judge": JUDGE | {"prompt_template": "rubric-judge-v2"}},
            "judge.prompt_template: expected rubric-judge-v1, the one that environment retail "
            "uses, found 'rubric-judge-v2'",
        ),
        (
            TAU | {"simulator": USER | {"prompt_template": "rubric-judge-v1"}},
            "simulator.prompt_template: expected tau-user-v1, the one that environment "
            "tau_retail uses, found 'rubric-judge-v1'",
        ),
        (
            {"judge": JUDGE | {"reasoning_effort": "high"}},
            "judge.reasoning_effort: expected low, or null: the effort is what renderer "
            "gpt_oss_low_reasoning asks for, found 'high'",
        ),
        (
            TAU | {"simulator": USER | {"reasoning_effort": "low"}},
            "simulator.reasoning_effort: expected null: the effort is what renderer "
            "qwen3_disable_thinking asks for, found 'low'",
        ),
        (
            {"judge": JUDGE | {"renderer": None}},
            "judge.renderer: expected the name of a tinker-cookbook renderer: none is chosen by "
            "the model's name, found None",
        ),
        (
            {"judge": JUDGE | {"current_date": None}},
            "judge.current_date: expected a date such as 2026-01-31: renderer "
            "gpt_oss_low_reasoning prints one, found None",
        ),
        (
            TAU | {"simulator": USER | {"current_date": "2026-01-01"}},
            "simulator.current_date: expected null: renderer qwen3_disable_thinking prints no "
            "date, found '2026-01-01'",
        ),
    ],
)
def test_partner_that_is_not_asked_as_registered_is_refused(
    changes: Document, refused: str
) -> None:
    with pytest.raises(InputError) as error:
        refuse_partners(_execution(**changes))

    assert str(error.value).startswith(refused)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"judge": JUDGE},
        {"judge": JUDGE | {"reasoning_effort": "low"}},
        TAU | {"simulator": USER, "judge": JUDGE},
        TAU,
    ],
)
def test_partner_that_is_asked_as_registered_is_not(changes: Document) -> None:
    refuse_partners(_execution(**changes))


def test_launch_refuses_a_partner_before_anything_else_is_asked() -> None:
    document = retail_spec.spec()
    execution = ExecutionFile.parse(retail_spec.execution(document, simulator=USER))

    with pytest.raises(InputError, match=r"^simulator.kind: expected scripted"):
        check_launchable(Spec.parse(document), execution)


@pytest.mark.parametrize("name", shipped_specs())
def test_shipped_specs_have_partners_that_are_asked_as_registered(name: str) -> None:
    files = find_spec(name)
    assert files.execution is not None

    refuse_partners(ExecutionFile.parse(files.execution.read_bytes()))


def test_roles_have_templates_in_environments_that_have_conversations() -> None:
    assert {name: dict(partner_templates(name)) for name in environment_names()} == {
        "arithmetic": {},
        "gsm8k": {},
        "retail": {"judge": "rubric-judge-v1"},
        "tau_retail": {"simulator": "tau-user-v1", "judge": "rubric-judge-v1"},
    }
