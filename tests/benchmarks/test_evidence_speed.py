"""Writing two million token rows, and verifying a bundle of 40 MiB, at their stated sizes.

Processor seconds are counted, which on a quiet machine are the seconds that pass.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evidence.bundle import build_bundle
from tests.evidence.finished_run import build_finished_run

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.bench

TOKENS = """
import json, sys, tempfile, time
import numpy as np
from evidence.run import Run

rows, groups, samples = int(sys.argv[1]), 64, 8
each = rows // (groups * samples)
rows = each * groups * samples
rng = np.random.default_rng(0)
mask = rng.random(rows) < 0.5
columns = {
    "group": np.repeat(np.arange(groups), samples * each),
    "sample": np.tile(np.repeat(np.arange(samples), each), groups),
    "position": np.tile(np.arange(each), groups * samples),
    "turn": np.zeros(rows, dtype=np.int64),
    "token_id": rng.integers(0, 49152, rows),
    "loss_mask": mask,
    "sampling_logprob": np.ma.array(-rng.exponential(size=rows).astype(np.float32), mask=~mask),
    "advantage": np.ma.array(rng.normal(size=rows).astype(np.float32), mask=~mask),
}
with tempfile.TemporaryDirectory() as folder:
    run = Run.create(folder, run_id="r", spec={})
    run.write_table("tokens", {k: v[:10] for k, v in columns.items()}, key=("a", "probe", 0))
    start = time.process_time()
    ref = run.write_table("tokens", columns, key=("a", "train", 0))
    print(json.dumps({"seconds": time.process_time() - start, "rows": ref.rows}))
"""

VERIFY = """
import json, sys, time
from evidence.verify import verify_bundle

start = time.process_time()
found = verify_bundle(sys.argv[1])
print(json.dumps({"seconds": time.process_time() - start, "problems": found.problems}))
"""


def _measure(code, argument):
    done = subprocess.run(
        [sys.executable, "-c", code, str(argument)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_million_token_rows_are_written_in_two_seconds():
    """Bound by Parquet's encoder (zstd, one thread); the checks take a tenth of it."""
    found = min((_measure(TOKENS, 2_000_000) for _ in range(3)), key=lambda m: m["seconds"])

    assert found["rows"] >= 1_999_000
    assert found["seconds"] < 2.0, found


def test_bundle_of_40_mib_is_verified_in_two_seconds(large_bundle):
    """Bound by reading JSON: 39 MiB in 67,500 predictions and 45,000 observations."""
    size = sum(path.stat().st_size for path in large_bundle.iterdir())
    found = min((_measure(VERIFY, large_bundle) for _ in range(3)), key=lambda m: m["seconds"])

    assert 38 * 2**20 < size <= 40 * 2**20
    assert found["problems"] == []
    assert found["seconds"] < 2.0, found


@pytest.fixture
def large_bundle(tmp_path):
    """A sealed bundle close to the limit, of a run built with the builders of the bundle tests."""
    run = build_finished_run(
        tmp_path, items=22_500, treatment=22_500, baseline=19_500, prediction="12 eggs. " * 48
    )
    return Path(run.path, build_bundle(run, environment={}).folder)
