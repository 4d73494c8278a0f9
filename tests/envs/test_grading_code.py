"""An evaluator's identity holds every module that takes part in a score, and every partner."""

import ast
import inspect
import json
import sys
from dataclasses import replace

import pytest

from envs import arithmetic, gsm8k, rendering, single_turn, tau_retail
from envs.errors import EnvInputError
from envs.grading_code import grading_modules
from envs.protocols import EpisodeSettings
from envs.registry import make_environment
from envs.rendering import make_renderer
from envs.retail import environment as retail
from envs.served import make_partner
from envs.served_renderer import prints_date, reasoning_effort
from evidence.evaluator import evaluator_id

SETTINGS = EpisodeSettings(max_tokens=40, temperature=0.0, max_turns=3)
SERVED = {
    "kind": "served",
    "model": "m",
    "prompt_template": "rubric-judge-v1",
    "renderer": "gpt_oss_low_reasoning",
    "temperature": 0.0,
    "max_tokens": 64,
    "current_date": "2026-01-01",
}
NO_SCORE = {
    "envs.data_order",
    "envs.errors",
    "envs.protocols",
    "envs.provenance",
    "envs.settings",
}
"""Order, values, errors and settings: they decide no score, or are in the identity as data."""


@pytest.fixture
def partner(tokenizer, scripted):
    """Makes a judge from the settings with changes."""

    def make(**changes):
        settings = SERVED | changes
        return make_partner("judge", settings, sampler=scripted([]), tokenizer=tokenizer)

    return make


def identity_of(tokenizer, **partners):
    env = make_environment(
        "retail", {}, tokenizer=tokenizer, renderer="qwen3_instruct", partners=partners
    )
    return evaluator_id(env.evaluator_provenance(settings=SETTINGS, item_ids=env.eval_ids[:1]))


def test_judges_that_differ_in_anything_are_different_evaluators(tokenizer, partner):
    changes = (
        {},
        {"model": "n"},
        {"temperature": 0.5},
        {"max_tokens": 65},
        {"max_attempts": 2},
        {"renderer": "gpt_oss_medium_reasoning"},
        {"current_date": "2026-01-02"},
    )

    found = [identity_of(tokenizer)]
    found += [identity_of(tokenizer, judge=partner(**one)) for one in changes]

    assert len(set(found)) == 8
    assert identity_of(tokenizer, judge=partner()) == found[1]


def test_identity_names_the_partners(tokenizer, partner):
    env = make_environment(
        "retail", {}, tokenizer=tokenizer, renderer="qwen3_instruct", partners={"judge": partner()}
    )

    found = env.evaluator_provenance(settings=SETTINGS, item_ids=env.eval_ids[:1])

    assert json.loads(found["prompt_template"])["partners"] == {
        "simulator": None,
        "judge": {
            "role": "judge",
            "model": "m",
            "prompt_template": "rubric-judge-v1",
            "renderer": "gpt_oss_low_reasoning",
            "current_date": "2026-01-01",
            "temperature": 0.0,
            "max_tokens": 64,
            "max_attempts": 3,
        },
    }


@pytest.mark.parametrize(
    ("name", "role"), [("retail", "simulator"), ("arithmetic", "judge"), ("gsm8k", "simulator")]
)
def test_partner_that_is_never_asked_is_refused(name, role, tokenizer, partner):
    with pytest.raises(EnvInputError, match=f"{role}.kind is 'served'; expected nothing served"):
        make_environment(
            name,
            {},
            tokenizer=tokenizer,
            renderer="qwen3_instruct",
            partners={role: replace(partner(), role=role)},
        )


def imported(module):
    """Names of the modules of this package that a module imports when it is loaded."""
    found = set()
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("envs"):
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & set(sys.modules)
            found |= inside or {node.module}
    return found


@pytest.mark.parametrize("environment", [retail, tau_retail], ids=["retail", "tau_retail"])
def test_modules_that_grading_code_imports_are_in_the_identity(environment, partner):
    """The environment's own file is left out: it also imports what makes demonstrations."""
    judge = partner()
    modules = grading_modules(environment._own_modules(), simulator=judge, judge=judge)
    names = {module.__name__ for module in modules}

    needed = {
        name
        for module in modules
        if module.__name__ != environment.__name__
        for name in imported(module)
    }

    assert environment.__name__ in names
    assert needed - names <= NO_SCORE
    assert {"envs.rendering", "envs.strict_json", "envs.xml_calls", "envs.served"} <= names


@pytest.mark.parametrize("environment", [arithmetic, gsm8k], ids=["arithmetic", "gsm8k"])
def test_code_that_turns_tokens_into_graded_text_is_in_the_identity(environment, tokenizer):
    """A reply is graded as text: whatever reads it from tokens decides the score with the grader."""
    modules = environment._grading_modules(make_renderer("qwen3_instruct", tokenizer))
    names = {module.__name__ for module in modules}

    inside = {name for module in (rendering, single_turn) for name in imported(module)}

    assert {environment.__name__, "envs.rendering", "envs.single_turn"} <= names
    assert inside - names <= NO_SCORE


def test_code_of_partners_that_nobody_serves_is_not_part_of_it():
    names = {one.__name__ for one in grading_modules([], simulator=None, judge=None)}

    assert {name for name in names if "served" in name} == set()


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_names_of_dated_renderers_say_what_they_ask_for(effort, partner):
    name = f"gpt_oss_{effort}_reasoning"

    made = partner(renderer=name).renderer.renderer

    assert (reasoning_effort(name), prints_date(name)) == (effort, True)
    assert (made.reasoning_effort, made.use_system_prompt) == (effort, True)


@pytest.mark.parametrize(
    ("name", "effort"),
    [
        ("gpt_oss_no_sysprompt", None),
        ("qwen3_disable_thinking", None),
        ("nemotron3_low_thinking", "low"),
        ("glm5_3_max_reasoning", "max"),
    ],
)
def test_other_renderers_print_no_date(name, effort):
    assert (reasoning_effort(name), prints_date(name)) == (effort, False)
