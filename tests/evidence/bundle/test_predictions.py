"""Scores are tied to the predictions item by item, and posted metrics to their means."""

import json

import pytest

from evidence.bundle import build_bundle
from evidence.canonical import sha256_hex
from evidence.errors import InputError
from evidence.predictions import mean_of, pairing_issue, totals_of
from evidence.verify import verify_bundle


def _row(item="i0", value=1.0, **over):
    return {
        "item_id": item,
        "arm": "dppo",
        "seed": 0,
        "metric": "accuracy",
        "evaluator_id": "e",
        "value": value,
        **over,
    }


@pytest.fixture
def folder(make_finished_run, tmp_path):
    run = make_finished_run(treatment=14)
    return tmp_path / "r1" / build_bundle(run, environment={}).folder


def _swap(data, first, second):
    """Exchange the values of two rows; the mean stays as it is."""
    rows = [json.loads(line) for line in data.splitlines()]
    rows[first]["value"], rows[second]["value"] = rows[second]["value"], rows[first]["value"]
    return b"".join(json.dumps(row, sort_keys=True).encode() + b"\n" for row in rows)


def test_observations_in_another_pairing_are_found(folder, reseal):
    """i0 (right) and i39 (wrong) of one arm change places: every mean stays, the pairs do not."""
    name = "scored-observations.jsonl"
    data = _swap((folder / name).read_bytes(), 0, 39)
    reseal(folder, name, data)
    result = json.loads((folder / "result.json").read_text())
    result["decision"]["observations_file"]["sha256"] = sha256_hex(data)
    reseal(folder, "result.json", json.dumps(result).encode())

    problems = verify_bundle(folder).problems

    first = json.loads(data.splitlines()[0])
    assert (
        "observations: 2 values are not those of the predictions "
        f"(first: item_id {first['item_id']!r}, arm {first['arm']!r}, metric 'accuracy')"
    ) in problems
    assert not any("posted" in problem for problem in problems if "mean of" in problem)


def test_posted_metric_that_is_no_mean_is_found(folder, reseal):
    """14 of 40 right is 0.35; the arm's metric says 0.95, the score still 0.35."""
    result = json.loads((folder / "result.json").read_text())
    result["metrics"]["arms"]["dppo"]["accuracy"] = 0.95
    reseal(folder, "result.json", json.dumps(result).encode())

    problems = verify_bundle(folder).problems

    assert "result.json: metrics.arms.dppo.accuracy: 0.95 posted, 0.35 found" in problems
    assert "per-arm-metrics.json: is not what the result posted" in problems


def test_per_arm_metrics_of_another_run_are_found(folder, reseal):
    reseal(folder, "per-arm-metrics.json", b'{"dppo":{"accuracy":1.0}}\n')

    assert "per-arm-metrics.json: is not what the result posted" in verify_bundle(folder).problems


@pytest.mark.parametrize("field", ["arm", "metric", "evaluator_id", "seed"])
@pytest.mark.parametrize("value", [["dppo"], {"a": 1}])
def test_group_that_is_no_name_is_refused(field, value):
    with pytest.raises(InputError, match=rf"line 2\.{field}: expected text or a number"):
        totals_of([_row(), _row(**{field: value})], where="p.jsonl")


def test_prediction_of_a_list_is_one_problem(folder, reseal):
    data = (folder / "predictions-dppo.jsonl").read_bytes()
    bad = data.replace(b'"item_id":"i1"', b'"item_id":["i1"]')
    reseal(folder, "predictions-dppo.jsonl", bad)
    named = [text for text in verify_bundle(folder).problems if "item_id" in text]
    assert named == ["observations: prediction's item_id: expected text, found list of 1"]

    worse = data.replace(b'"arm":"dppo"', b'"arm":["dppo"]', 1)
    reseal(folder, "predictions-dppo.jsonl", worse)
    assert any("line 1.arm: expected text" in text for text in verify_bundle(folder).problems)


def test_mean_is_over_the_rows_of_one_score():
    """(1 + 0) / 2 over both seeds, 0 for seed 1 alone, nothing for seed 2."""
    totals = totals_of([_row(), _row(seed=1, value=0.0)], where="p.jsonl")
    score = {"arm": "dppo", "metric": "accuracy", "evaluator_id": "e"}

    assert mean_of(totals, score) == 0.5
    assert mean_of(totals, score | {"seed": 1}) == 0.0
    assert mean_of(totals, score | {"seed": 2}) is None


@pytest.mark.parametrize(
    ("observed", "found"),
    [
        ([_row()], None),
        ([_row(value=1)], None),
        ([_row(arm="other", value=0.0)], None),
        ([_row("i1", 0.0)], None),
        ([_row("i1", 1.0)], "1 values"),
        ([_row("i9")], "1 values"),
        ([_row(seed=1), _row(metric="m"), _row(evaluator_id="f")], "3 values"),
        ([_row(value="1.0"), _row(value=None)], "2 values"),
        ([_row("i2")], "1 values"),
        ([_row(item=["i0"])], "1 values"),
    ],
)
def test_value_of_an_item_is_that_of_its_prediction(observed, found):
    """i0 is right, i1 is wrong, and i2 was predicted twice with different values."""
    predictions = [[_row("i0", 1.0), _row("i1", 0.0)], [_row("i2", 1.0), _row("i2", 0.0)]]

    issue = pairing_issue(observed, predictions)

    assert (issue and issue[:8]) == found


@pytest.mark.parametrize("space", [b" ", b"\t", b"  ", b"\t "])
def test_key_twice_with_space_before_a_colon_is_found(folder, reseal, space):
    """A value that is hidden behind another, and a text that makes up for the lost key."""
    data = (folder / "predictions-dppo.jsonl").read_bytes()
    hidden = data.replace(b'"value":1.0', b'"value"' + space + b':0.0,"value":1.0', 1)
    reseal(folder, "predictions-dppo.jsonl", hidden)

    assert any("'value'" in problem for problem in verify_bundle(folder).problems)
