"""Gate metrics of the second pass over a batch: one pool, first passes left out."""

import numpy as np
import pytest

from losses.gate_metrics import PilotEvidence, PilotUpdate, measure
from losses.token_arrays import TokenArrays


def update(position, epoch, p, q, keep):
    return PilotUpdate(
        step=0,
        position=position,
        epoch=epoch,
        tokens=TokenArrays(
            target_logprobs_N=np.log(p),
            sampling_logprobs_N=np.log(q),
            advantages_N=np.array([1.0] * len(p)),
            keep_N=np.array(keep),
        ),
    )


EVIDENCE = PilotEvidence(
    baseline_clip=(0.8, 1.2),
    updates=[
        update(0, 0, [0.9], [0.1], [False]),
        update(1, 1, [0.5, 0.7, 0.5], [0.5, 0.5, 0.5], [True, False, True]),
        update(2, 1, [0.625], [0.5], [True]),
    ],
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch2_dppo_masked_token_fraction", 0.25),  # 1 of 4
        ("epoch2_ppo_counterfactual_clip_fraction", 0.5),  # ratios 1, 1.4, 1, 1.25
        # sorted drifts 0, 0, 0.125, 0.2: 0.9 * 3 = 2.7, so 0.125 + 0.7 * 0.075
        ("epoch2_policy_drift_abs_p_q90", 0.1775),
    ],
)
def test_second_pass_is_one_pool(name, value):
    assert measure(name, EVIDENCE).value == pytest.approx(value, abs=1e-12)


def test_batches_passed_over_once_have_no_second_pass():
    evidence = PilotEvidence(updates=EVIDENCE.updates[:1], baseline_clip=(0.8, 1.2))

    found = measure("epoch2_dppo_masked_token_fraction", evidence)

    assert found.value is None
    assert "second pass" in found.reason
