"""Time and memory of the decision at its stated sizes, in a process of its own.

Processor seconds are counted, which on a quiet machine are the seconds that pass: nothing here waits
or runs in threads.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MILLION = """
import json, resource, sys, time
from evidence.decision import Observations, decide
from evidence.parsing import build
from evidence.spec import DecisionRule

items = int(sys.argv[1])
rule = build(DecisionRule, {
    "seeds": [0], "alpha": 0.05, "method": "paired_hoeffding",
    "criteria": [{"id": "primary", "metric": "accuracy", "margin": 0.0, "bounds": [0, 1],
                  "weights": {"treatment": 1, "baseline": -1}}],
}, where=None)
rows = [
    {"item_id": f"i{i}", "arm": arm, "seed": 0, "metric": "accuracy",
     "value": 1 if (i + shift) % 3 else 0, "evaluator_id": "e"}
    for shift, arm in enumerate(("treatment", "baseline")) for i in range(items)
]
start = time.process_time()
observations = Observations.from_rows(rows)
read = time.process_time()
result = decide(rule, observations)
done = time.process_time()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"read": read - start, "decide": done - read, "peak_mib": peak,
                  "effect": result.criteria[0].effect, "n": result.criteria[0].n_items}))
"""

RECORD = """
import hashlib, json, sys, time
from evidence.decision import validate
from evidence.evaluator import evaluator_id

items = [f"i{i}" for i in range(int(sys.argv[1]))]
provenance = {"code_sha256": "c" * 64, "prompt_template": "t", "decoding": {}, "parser": "p",
              "items": {"ids": items}}
name = evaluator_id(provenance)
rows, scores = [], []
for shift, arm in enumerate(("t", "b")):
    values = [1 if (i + shift) % 3 else 0 for i in range(len(items))]
    rows += [{"item_id": item, "arm": arm, "seed": 0, "metric": "m", "value": value,
              "evaluator_id": name} for item, value in zip(items, values)]
    scores.append({"arm": arm, "metric": "m", "seed": 0, "evaluator_id": name,
                   "value": sum(values) / len(values)})
data = "\\n".join(json.dumps(row, separators=(",", ":")) for row in rows).encode()
spec = {"decision_rule": {
    "seeds": [0], "alpha": 0.05, "method": "paired_hoeffding",
    "criteria": [{"id": "primary", "metric": "m", "margin": 0.0, "bounds": [0, 1],
                  "weights": {"t": 1, "b": -1}}]}}
report = {"version": 1, "observations_file": {
    "name": "o.jsonl", "sha256": hashlib.sha256(data).hexdigest()}}
evaluation = {"evaluators": {name: provenance}, "scores": scores}
inline = {"version": 1, "observations": rows}
start = time.process_time()
from_file = validate(spec, report, evaluation=evaluation, files={"o.jsonl": data})
between = time.process_time()
from_rows = validate(spec, inline, evaluation=evaluation)
done = time.process_time()
print(json.dumps({"file": between - start, "inline": done - between, "mib": len(data) / 2**20,
                  "issues": [*from_file.issues, *from_rows.issues],
                  "rows": len(rows)}))
"""


def run(code, size):
    done = subprocess.run(
        [sys.executable, "-c", code, str(size)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_decision_of_twenty_thousand_rows_is_right():
    """10,000 items: treatment is wrong where 3 divides i (3334), baseline where it divides i + 1
    (3333), so the effect is -1/10000."""
    found = run(MILLION, 10_000)
    assert found["n"] == 10_000
    assert found["effect"] == pytest.approx(-1e-4, abs=1e-12)


@pytest.mark.bench
def test_million_observations_take_under_two_seconds_and_a_gigabyte():
    """The rows themselves, as dictionaries, take most of the memory."""
    found = run(MILLION, 500_000)
    assert found["read"] + found["decide"] < 2.0, found
    assert found["peak_mib"] < 1024, found


@pytest.mark.bench
def test_largest_record_that_fits_its_caps_takes_under_a_second():
    """With full evaluator hashes 100,000 rows exceed 10 MiB, so that the byte cap binds first."""
    found = run(RECORD, 35_000)
    assert found["issues"] == []
    assert 9.0 < found["mib"] < 10.0
    assert found["file"] < 1.0, found


@pytest.mark.bench
def test_hundred_thousand_inline_rows_take_under_a_second():
    """The file of as many rows is over the byte cap and is refused at once."""
    found = run(RECORD, 50_000)
    assert found["rows"] == 100_000
    assert found["inline"] < 1.0, found
    assert found["mib"] > 10.0
    (issue,) = found["issues"]
    assert issue.startswith("Observations were not read: size")
