"""The golden runner fails where it must: a wrong value, an unknown mode, an output left out."""

import copy
import json
import shutil

import pytest

from tests.losses.golden import loading
from tests.losses.golden.compare import check
from tests.losses.golden.families import FAMILIES, family
from tests.losses.golden.loading import Block

BLOCKS = [
    block for path in sorted(loading.OWN_FOLDER.glob("*.json")) for block in loading.load(path)
]


def find(file: str, dtype: str = "float64") -> Block:
    block = next(b for b in BLOCKS if b.file == file and b.dtype == dtype)
    return copy.deepcopy(block)


def run(block: Block) -> None:
    for implementation in FAMILIES[family(block)].values():
        check(block, implementation(block))


def test_own_folder_has_every_family_and_precision():
    """26 files; nothing is silently left out."""
    assert len({block.file for block in BLOCKS}) == 26
    assert {family(block) for block in BLOCKS} == set(FAMILIES)
    assert {block.dtype for block in BLOCKS} == {"float64", "float32"}


@pytest.mark.parametrize("field", ["loss_mode", "loss_agg_mode"])
def test_unknown_mode_is_a_failure(field):
    """Never a skip."""
    block = find("dppo_binary_tv")
    block.params[field] = "dppo_binary_js"

    with pytest.raises((AssertionError, ValueError), match="dppo_binary_js"):
        run(block)


def test_unknown_parameter_is_a_failure():
    """A setting that the runner would ignore may change the answer."""
    block = find("grpo_clip")
    block.params["entropy_coeff"] = 0.1

    with pytest.raises(AssertionError, match="entropy_coeff"):
        run(block)


def test_unknown_family_is_a_failure():
    """Parameters of no known form."""
    block = find("grpo_clip")
    block.params.clear()

    with pytest.raises(AssertionError, match="known forms"):
        family(block)


def test_output_that_nobody_computes_is_a_failure():
    """A new golden key must be handled, not passed over."""
    block = find("dppo_binary_tv")
    block.expected["entropy"] = 0.5

    with pytest.raises(AssertionError, match="'entropy' is not computed"):
        run(block)


@pytest.mark.parametrize(
    ("file", "key", "change"),
    [
        ("dppo_binary_tv", "loss", lambda v: v * (1 + 1e-8)),
        ("dppo_binary_tv", "n_dropped_positive", lambda v: v + 1),
        ("dppo_binary_tv", "keep_mask", lambda v: [[1 - x for x in row] for row in v]),
        ("grpo_clip", "grad", lambda v: [[x * (1 + 1e-7) for x in row] for row in v]),
        ("rollout_correction", "rollout_is_weights", lambda v: [[x + 1 for x in r] for r in v]),
        ("verl_grpo_advantage", "advantages", lambda v: [[x + 1e-6 for x in r] for r in v]),
        ("diagnostics", "exceed_restoring_direction", lambda v: v - 1),
    ],
)
def test_wrong_golden_value_is_a_failure(file, key, change):
    """The comparison is not vacuous."""
    block = find(file)
    block.expected[key] = change(block.expected[key])

    with pytest.raises(AssertionError, match=key):
        run(block)


def test_folder_comes_from_the_environment(tmp_path, monkeypatch):
    """Other files of the same form go through the same runner."""
    shutil.copy(loading.OWN_FOLDER / "rollout_correction.json", tmp_path / "other_set.json")
    monkeypatch.setenv(loading.FOLDER_VARIABLE, str(tmp_path))

    assert {block.file for block in loading.all_blocks()} == {"other_set"}


def test_empty_folder_is_a_failure(tmp_path, monkeypatch):
    """No files must not look like no failures."""
    monkeypatch.setenv(loading.FOLDER_VARIABLE, str(tmp_path))

    with pytest.raises(AssertionError, match="no golden files"):
        loading.all_blocks()


@pytest.mark.parametrize(
    "document",
    [
        {"meta": {}, "cases": []},
        {"meta": {}, "cases": [{"name": "x", "params": {}, "inputs": {}, "outputs": {}}]},
        {"meta": {}, "cases": [{"name": "x", "params": {}, "outputs": {"float64": {}}}]},
        {
            "meta": {},
            "cases": [
                {"name": "x", "params": {}, "inputs": {}, "outputs": {"bfloat16": {}}},
            ],
        },
    ],
)
def test_file_of_another_form_is_a_failure(tmp_path, document):
    """Cases without inputs, outputs or a known precision."""
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(document), encoding="utf-8")

    with pytest.raises(AssertionError, match=r"odd\.json"):
        loading.load(path)
