"""Every shipped spec can be read, passes its preflight, and agrees with its execution file."""

import json
import re
from pathlib import Path

import pytest

from evidence import spec_preflight
from evidence.execution import ExecutionFile, contradictions, missing_settings
from evidence.plan import plan_check
from evidence.profile import Profile, apply_profile
from evidence.spec import Spec, unresolved
from flows.catalog import SPECS_DIR, find_profile, shipped_profiles, shipped_specs

NAMES = shipped_specs()
RESOLVED = {
    "gsm8k-dppo": "c11c42d0c675146c326235880be20680371dd8e1b4d5192905b3e9e0c9049a15",
    "retail-sdpo": "552d8d3c54e325c063bd63443666e13584d33389426f139c7876eacabb2d3744",
}
REAL_MINIMA = {
    "dppo_masked_token_fraction": (0.001, 0.3),
    "policy_drift_abs_p_q90": (0.005, None),
    "grpo_clip_fraction": (0.0005, None),
    "executed_updates_per_batch": (2, 2),
}


def load(name: str) -> tuple[Spec, ExecutionFile]:
    spec = Spec.parse((SPECS_DIR / f"{name}.json").read_bytes())
    execution = ExecutionFile.parse((SPECS_DIR / f"{name}.execution.json").read_bytes())
    return spec, execution


def test_every_kind_of_experiment_ships():
    wanted = {
        "arithmetic",
        "arithmetic-aa",
        "arithmetic-positive",
        "gsm8k-dppo",
        "retail-sdpo",
        "tiny",
    }

    assert wanted <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_spec_passes_its_preflight_with_nothing_open(name):
    spec, execution = load(name)

    assert spec_preflight.validate(spec.raw).to_record() == {"findings": [], "status": "passed"}
    assert unresolved(spec) == []
    assert missing_settings(spec, execution) == []
    assert [str(finding) for finding in contradictions(spec, execution)] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_arm_has_the_role_that_the_decision_weighs(name):
    spec, execution = load(name)

    for criterion in spec.rule.criteria:
        assert set(criterion.weights) == set(execution.roles)


@pytest.mark.parametrize("name", NAMES)
def test_sources_name_fields_that_exist(name):
    """A source may name a whole section; its path must lead somewhere in the execution file."""
    _, execution = load(name)

    for path in execution.sources:
        if path.startswith("base_model"):
            continue
        node = [execution.raw]
        for part in path.split("."):
            node = [
                child
                for one in node
                for child in (one.values() if part == "*" else [one.get(part, "missing")])
            ]
        assert "missing" not in node, path


@pytest.mark.parametrize("name", sorted(RESOLVED))
def test_resolved_spec_names_its_original_and_every_value_a_source(name):
    spec, execution = load(name)

    assert spec.derived_from == RESOLVED[name]
    assert all(
        {"field", "original", "resolved", "reason"} == set(d) for d in spec.raw["differences"]
    )
    covered = set(execution.sources)
    for section in execution.raw:
        if section in ("version", "spec_sha256", "sources"):
            continue
        assert any(key == section or key.startswith(f"{section}.") for key in covered), section


@pytest.mark.parametrize("name", sorted(RESOLVED))
def test_resolved_spec_differs_from_its_original_only_where_it_says(name, original_specs):
    """Numbers, names and ranges are those of the original; prose and the listed fields are not."""
    spec, _ = load(name)
    listed = " ".join(d["field"] for d in spec.raw["differences"])

    found = changed_paths(original_specs[RESOLVED[name]], spec.raw)

    prose = {
        "title",
        "hypothesis",
        "method",
        "baseline",
        "success_criterion",
        "reason",
        "measures",
        "estimand",
    }
    new = {"derived_from", "differences"}
    unlisted = [
        path
        for path in found
        if path.rsplit(".", 1)[-1] not in prose
        and path.split(".")[0] not in new
        and path.rsplit(".", 1)[-1] not in listed
    ]
    assert unlisted == []


def changed_paths(old, new, path=""):
    """Paths whose values differ between two JSON documents."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from changed_paths(old.get(key), new.get(key), f"{path}.{key}".strip("."))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, two) in enumerate(zip(old, new, strict=True)):
            yield from changed_paths(one, two, f"{path}[{index}]")
    elif old != new:
        yield path


@pytest.fixture
def original_specs():
    """The originals by digest, where the tests' data holds them."""
    folder = Path(__file__).resolve().parents[1]
    found = {}
    for path in folder.rglob("*_spec.json"):
        spec = Spec.parse(path.read_bytes())
        found[spec.digest] = spec.raw
    assert set(RESOLVED.values()) <= set(found), "an original spec is not in the tests' data"
    return found


def test_arithmetic_gate_keeps_the_real_minima():
    """The embedded comparison is held to the ranges of the GSM8K experiment."""
    for name in ("arithmetic", "gsm8k-dppo"):
        spec, _ = load(name)
        checks = {check.metric: (check.min, check.max) for check in spec.activation_gate.checks}

        assert {metric: checks[metric] for metric in REAL_MINIMA} == REAL_MINIMA
        model = next(c for c in spec.activation_gate.checks if c.metric == "executed_base_model")
        assert model.one_of == (spec.base_model,)


def test_controls_differ_from_the_comparison_only_where_they_must():
    """The A/A arms are one arm under two names; the positive control's baseline is untrained."""
    _, same = load("arithmetic-aa")
    _, positive = load("arithmetic-positive")

    assert same.arms["grpo_a"].loss == same.arms["grpo_b"].loss
    assert not positive.arms["untrained"].trained
    assert positive.evaluation.items >= 40


def test_specs_name_no_place_of_a_machine():
    for path in SPECS_DIR.rglob("*.json"):
        text = path.read_text()
        assert not re.search(r"(?<!\w)/(work|tmp|root|home)/", text), path.name
        assert json.loads(text)


@pytest.mark.parametrize("profile", shipped_profiles())
@pytest.mark.parametrize("name", NAMES)
def test_profile_gives_a_plan_that_agrees_with_itself(name, profile):
    """A scaled plan passes the preflight, and says what it changed."""
    spec, execution = load(name)
    scaling = Profile.parse(find_profile(profile).read_bytes())

    plan = apply_profile(spec, execution, scaling)

    assert spec_preflight.validate(plan.spec.raw).status == "passed"
    assert [str(finding) for finding in contradictions(plan.spec, plan.execution)] == []
    assert plan.original_spec_sha256 == spec.digest
    assert plan.original_hypothesis_tested == (not plan.deviations)


def test_laptop_profile_makes_the_real_specs_small():
    """4 groups of 4, 3 rollout steps of 2 updates, 24 items of 96 tokens."""
    spec, execution = load("gsm8k-dppo")

    plan = apply_profile(spec, execution, Profile.parse(find_profile("laptop").read_bytes()))

    assert plan.spec.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (plan.spec.steps, plan.spec.batch_size, plan.spec.eval.n_examples) == (6, 16, 24)
    assert plan.execution.rollout.max_tokens == 96
    assert not plan.original_hypothesis_tested


@pytest.mark.parametrize(
    ("name", "half_width", "can_support"),
    [
        ("arithmetic", 0.4295, True),
        ("arithmetic-aa", 0.4295, True),
        ("arithmetic-positive", 0.4295, True),
        ("gsm8k-dppo", 0.0748, True),
        ("retail-sdpo", 0.3822, True),
        ("tiny", 0.7841, True),
    ],
)
def test_plan_check_says_what_the_rule_could_settle(name, half_width, can_support):
    """Half width 2 * sqrt(ln(2k / 0.05) / (2n)): k = 1 with n = 40, 1319, 12; k = 2 with n = 60."""
    spec, _ = load(name)

    plan = plan_check(spec)

    assert plan.criteria[0].half_width == pytest.approx(half_width, abs=5e-5)
    assert plan.can_support == can_support
