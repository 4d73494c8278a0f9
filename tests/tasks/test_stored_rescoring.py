"""Advantages computed anew from stored scores, by hand."""

import numpy as np
import pytest

from tasks.stored_rescoring import expected_advantages

NAN = float("nan")
COLUMNS = {
    "group": np.array([0, 0, 0, 1]),
    "sample": np.array([0, 0, 1, 0]),
    "teacher_logprob": np.array([-1.0, -9.0, NAN, -2.0], dtype=np.float32),
    "sampling_logprob": np.array([-3.0, -1.0, -1.0, -2.5], dtype=np.float32),
}
REWARDED = {(0, 0): 1.0, (0, 1): -1.0, (1, 0): 0.0}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "sdpo_token", "clip": 5.0}, [2.0, -5.0, 0.0, 0.5]),
        ({"kind": "sdpo_token", "clip": None}, [2.0, -8.0, 0.0, 0.5]),
        ({"kind": "sdpo_sequence", "clip": 2.5}, [-2.5, -2.5, 0.0, 0.5]),
        ({"kind": "sdpo_hybrid", "clip": 5.0, "grpo_weight": 0.5}, [1.5, -2.0, -0.5, 0.25]),
    ],
)
def test_advantages_follow_from_scores_and_settings(
    settings: dict[str, object], expected: list[float]
) -> None:
    """Gaps 2, -8, none and 0.5; the mean of the first two is -3."""
    assert expected_advantages(COLUMNS, settings, REWARDED).tolist() == expected
