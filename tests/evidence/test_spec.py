"""Real specs are read unchanged; what cannot be a spec is refused by field, value and expectation."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from evidence.errors import InputError
from evidence.spec import Spec, unresolved

SEEDS = Path(__file__).parent / "seeds"
REAL = ["dppo_spec.json", "dppo_launch_spec.json", "sdpo_spec.json"]


def read(name):
    return (SEEDS / name).read_bytes()


@pytest.fixture
def raw():
    return json.loads(read("sdpo_spec.json"))


@pytest.mark.parametrize("name", REAL)
def test_real_spec_is_read_unchanged(name):
    """Every field is kept, known or not, and nothing is filled in."""
    spec = Spec.parse(read(name))
    assert spec.raw == json.loads(read(name))


def test_triage_document_gives_the_spec_it_holds():
    assert Spec.parse(read("sdpo_triage.json")).digest == Spec.parse(read("sdpo_spec.json")).digest


def test_digest_ignores_key_order_and_layout():
    """The launch contract printed the same spec with other key order."""
    assert (
        Spec.parse(read("dppo_launch_spec.json")).digest
        == Spec.parse(read("dppo_spec.json")).digest
    )


def test_digest_is_golden():
    """A change of the canonical form or of what is hashed would orphan every bundle."""
    digest = Spec.parse(read("dppo_spec.json")).digest
    assert digest == "c11c42d0c675146c326235880be20680371dd8e1b4d5192905b3e9e0c9049a15"


def test_digest_changes_with_a_number_in_a_field_nobody_knows(raw):
    before = Spec.parse(raw).digest
    raw["somebody_elses_field"] = {"x": 1}
    assert Spec.parse(raw).digest != before
    assert Spec.parse(raw).raw["somebody_elses_field"] == {"x": 1}


def test_typed_fields_hold_the_spec_of_the_retail_experiment():
    spec = Spec.parse(read("sdpo_spec.json"))
    assert spec.arm_names == ("grpo", "sdpo_token")
    assert (spec.steps, spec.batch_size, spec.lora_rank, spec.max_seq_len) == (20, 16, 32, 8192)
    assert [c.id for c in spec.rule.criteria] == ["primary", "reward_guard"]
    assert spec.rule.criteria[1].margin == -0.1
    assert spec.correctness_preflight.paths[1].tolerances["reference_gradient"].min_cosine == 0.999
    assert spec.restoration_preflight.groups[0].arms[0].optimizer_config["lora_rank"] == 32
    assert spec.activation_gate.checks[5].one_of == ("Qwen/Qwen3.5-4B",)
    assert spec.generation_audit.answer_comparison == "categorical_exact"
    assert spec.budget.max_wall_minutes == 120


def test_spec_is_frozen_and_its_raw_form_is_a_copy():
    spec = Spec.parse(read("dppo_spec.json"))
    spec.raw["steps"] = 1
    assert spec.raw["steps"] == 100
    with pytest.raises(ValidationError):
        spec.steps = 1


NAN = float("nan")
WRONG = [
    (("decision_rule", "criteria", 0, "margin"), NAN, "decision_rule.criteria[0].margin", "finite"),
    (
        ("decision_rule", "criteria", 0, "bounds"),
        [1, 0],
        "decision_rule.criteria[0].bounds",
        "lower",
    ),
    (
        ("decision_rule", "criteria", 0, "bounds"),
        [0, 1, 2],
        "decision_rule.criteria[0].bounds",
        "two",
    ),
    (
        ("decision_rule", "criteria", 0, "weights"),
        {"a": 0},
        "decision_rule.criteria[0].weights",
        "not 0",
    ),
    (
        ("decision_rule", "criteria", 0, "tie_band"),
        0.0,
        "decision_rule.criteria[0].tie_band",
        "above 0",
    ),
    (
        ("decision_rule", "criteria", 0, "tie_band"),
        [1, -1],
        "decision_rule.criteria[0].tie_band",
        "lower",
    ),
    (
        ("decision_rule", "criteria", 0, "tie_band"),
        "narrow",
        "decision_rule.criteria[0].tie_band",
        "a number",
    ),
    (("decision_rule", "criteria", 1, "id"), "primary", "decision_rule.criteria[1].id", "no other"),
    (("decision_rule", "criteria"), [], "decision_rule.criteria", "at least 1"),
    (("decision_rule", "seeds"), [2**63], "decision_rule.seeds[0]", "at most 9223372036854775807"),
    (("decision_rule", "seeds"), [-1], "decision_rule.seeds[0]", "at least 0"),
    (("decision_rule", "seeds"), [True], "decision_rule.seeds[0]", "whole number"),
    (("decision_rule", "seeds"), [0, 0], "decision_rule.seeds", "each seed once"),
    (("decision_rule", "seeds"), [], "decision_rule.seeds", "at least 1"),
    (("decision_rule", "alpha"), 1, "decision_rule.alpha", "below 1"),
    (("decision_rule", "alpha"), 0, "decision_rule.alpha", "above 0"),
    (("decision_rule", "method"), "student_t", "decision_rule.method", "paired_hoeffding"),
    (("arms", 1, "name"), "grpo", "arms[1].name", "no other arm"),
    (("arms", 1, "name"), "", "arms[1].name", "at least 1"),
    (("arms", 1, "seed"), 2**63, "arms[1].seed", "at most"),
    (("arms", 1, "lr"), [1e-5, 4e-5], "arms[1].lr", "not supported yet"),
    (("arms", 1, "lr_grid"), [1e-5, 4e-5], "arms[1].lr_grid", "not supported yet"),
    (("optimizer", "lr"), {"grid": [1e-5]}, "optimizer.lr", "not supported yet"),
    (("optimizer", "learning_rates"), [1e-5], "optimizer.learning_rates", "not supported yet"),
    (("lr_grid",), [1e-5], "lr_grid", "not supported yet"),
    (("optimizer", "lr"), "4e-5", "optimizer.lr", "a number"),
    (("arms",), [], "arms", "at least 1"),
    (("arms",), {}, "arms", "a list"),
    (("budget", "gpu_hours"), 0, "budget.gpu_hours", "above 0"),
    (("budget", "max_wall_minutes"), 0, "budget.max_wall_minutes", "above 0"),
    (("steps",), 0, "steps", "at least 1"),
    (("steps",), 20.5, "steps", "whole number"),
    (("steps",), "20", "steps", "whole number"),
    (("steps",), True, "steps", "whole number"),
    (("lora_rank",), 0, "lora_rank", "at least 1"),
    (("decision_rule",), None, "decision_rule", "a decision rule"),
    (("base_model",), 4, "base_model", "text"),
    (("eval", "n_examples"), 0, "eval.n_examples", "at least 1"),
]


@pytest.mark.parametrize(("path", "value", "field", "expected"), WRONG)
def test_wrong_value_is_named_with_its_expectation(raw, put, path, value, field, expected):
    with pytest.raises(InputError) as error:
        Spec.parse(put(raw, path, value), where="my.json")
    assert error.value.field == field
    assert expected in error.value.expected
    assert str(error.value).startswith("my.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "title",
        "hypothesis",
        "base_model",
        "lora_rank",
        "dataset",
        "optimizer",
        "steps",
        "batch_size",
        "max_seq_len",
        "eval",
        "arms",
        "budget",
        "decision_rule",
    ],
)
def test_missing_field_is_named(raw, put, name):
    with pytest.raises(InputError) as error:
        Spec.parse(put(raw, (name,)))
    assert error.value.field == name


def test_several_problems_are_counted(raw, put):
    changed = put(put(raw, ("steps",), 0), ("batch_size",), 0)
    with pytest.raises(InputError, match=r"steps.*\(and 1 more problem\)"):
        Spec.parse(changed)


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        (b'{"title": ', "line 1 column 11", "valid JSON"),
        (b"\xff\xfe{}", "byte 0", "UTF-8"),
        (b"[]", "document", "a JSON object"),
        (b"17", "document", "a JSON object"),
        (b"", "line 1 column 1", "valid JSON"),
        (b'{"title": "a", "title": "b"}', "object key", "no key twice"),
        (b"[" * 100_000, "nesting", "at most 200"),
        (b'{"budget": {"gpu_hours": NaN}}', "budget.gpu_hours", "a finite number"),
        (b'{"arms": [{"lr": -Infinity}]}', "arms[0].lr", "a finite number"),
        (b'{"arms": [{"lr": 1e999}]}', "arms[0].lr", "a finite number"),
    ],
)
def test_text_that_is_no_spec_is_refused_with_the_place(text, field, expected):
    with pytest.raises(InputError) as error:
        Spec.parse(text, where="my.json")
    assert error.value.field == field
    assert expected in error.value.expected


def test_spec_without_declared_comparison_needs_no_rule(raw, put):
    """One arm that is only trained and shown has nothing to decide; asking for the rule says so."""
    changed = put(put(raw, ("decision_rule",)), ("experiment_features",), {"custom_loss": True})
    spec = Spec.parse(changed)
    with pytest.raises(InputError, match="decision_rule"):
        _ = spec.rule


def test_unresolved_lists_the_placeholders_of_the_dppo_spec():
    found = dict(unresolved(Spec.parse(read("dppo_spec.json"))))
    assert sorted(found) == [
        "correctness_preflight.paths[0].baseline_revision",
        "correctness_preflight.paths[0].reference_revision",
        "correctness_preflight.status",
    ]
    assert found["correctness_preflight.paths[0].reference_revision"].startswith("UNRESOLVED: pin")


def test_unresolved_lists_pins_that_name_nothing_in_the_sdpo_spec():
    """Its method speaks of pins too, but prose is never read."""
    assert [path for path, _ in unresolved(Spec.parse(read("sdpo_spec.json")))] == [
        "correctness_preflight.paths[0].baseline_revision",
        "correctness_preflight.paths[0].reference_revision",
        "correctness_preflight.paths[1].baseline_revision",
        "correctness_preflight.paths[1].reference_revision",
        "correctness_preflight.status",
        "dataset.name",
    ]


@pytest.mark.parametrize(
    ("field", "text", "open_point"),
    [
        ("revision", "UNRESOLVED", True),
        ("status", "unresolved until revisions are pinned", True),
        ("revision", "commit pinned at run time (8d01e5f)", True),
        ("revision", "pinned commit", True),
        ("revision", "pinned commit 59a200c6d575d595120f1cb70fea53cef0632f6b", False),
        ("revision", "tinker-cookbook, pinned to 0.5.8", False),
        ("revision", "TBD", True),
        ("status", "resolved", False),
        ("note", "was UNRESOLVED in the original", False),
        ("method", "UNRESOLVED prose", False),
    ],
)
def test_placeholder_is_told_from_a_pin(field, text, open_point):
    assert unresolved({"block": {field: text}}) == (
        [(f"block.{field}", text)] if open_point else []
    )


def test_endpoint_text_falls_back_to_the_metric(raw, put):
    assert Spec.parse(raw).primary_endpoint_text == "heldout_composite_rubric_score_mean"
    without = Spec.parse(put(raw, ("primary_endpoint",), None))
    assert without.primary_endpoint_text.startswith("mean composite rubric score")


@pytest.mark.parametrize("text", ["\ud83d", "a\x00b", "<script>"])
def test_odd_text_in_a_field_nobody_knows_is_kept(raw, text):
    raw["note"] = text
    assert Spec.parse(raw).raw["note"] == text


def test_odd_key_is_written_so_that_any_terminal_can_show_it(raw):
    raw["experiment_features"] = "x"
    raw["decision_rule"]["criteria"][0]["weights"] = {"\ud83d\n": "x", "b": 1}
    with pytest.raises(InputError) as error:
        Spec.parse(raw)
    str(error.value).encode("ascii")


@pytest.mark.parametrize("value", [3, "x", [], None])
def test_section_of_another_kind_is_named(raw, put, value):
    with pytest.raises(InputError) as error:
        Spec.parse(put(raw, ("optimizer",), value))
    assert error.value.field == "optimizer"
