"""Refusals that have no other home: unknown names in pure functions and in the reference."""

import numpy as np
import pytest
import torch

from losses.aggregation import aggregate
from losses.anchors import anchor_logprobs
from losses.errors import LossConfigError, LossInputError
from losses.gate_metrics import PilotEvidence, measure
from losses.parity import FixedBatch
from losses.reference import advantages as reference_advantages
from losses.reference import aggregation as reference_aggregation
from losses.reference import policy as reference_policy
from losses.reference import sdpo as reference_sdpo
from losses.sdpo_logit import SdpoLogit
from losses.sdpo_siblings import SiblingRule, context_fractions
from losses.token_arrays import TokenArrays
from tests.losses.builders import inputs, logs, tensor


def test_unknown_anchor_names_the_allowed_ones():
    """Both of them."""
    with pytest.raises(LossConfigError, match=r"anchor: 'old'; expected one of \['sampling'"):
        anchor_logprobs(inputs(logs(0.5), tensor(1.0)), "old")


def test_unknown_support_names_the_allowed_ones():
    """All three."""
    with pytest.raises(LossConfigError, match="support: 'topk'; expected one of"):
        SdpoLogit(alpha=0.5, support="topk")


def test_aggregation_needs_a_mask_per_sequence():
    """Two sequences, one mask."""
    with pytest.raises(LossInputError, match="loss_mask_D: 1 entries; expected 2"):
        aggregate([tensor(1.0), tensor(1.0)], [torch.tensor([True])], mode="sum", denominator=1.0)


def test_fractions_of_an_empty_batch_are_refused():
    """0/0 is not a fraction."""
    rule = SiblingRule(
        success_threshold=0.5,
        choice="first",
        exclude_self=True,
        use_feedback=True,
        feedback_only_without_demonstration=True,
        remove_thinking=True,
    )
    with pytest.raises(LossInputError, match="groups: empty"):
        context_fractions([], [], feedback=[], contexts=[], rule=rule)


def test_share_of_nothing_is_not_measured():
    """No judge call: no rate."""
    metric = measure("judge_parse_success_rate", PilotEvidence(judge_calls_parsed=[]))

    assert (metric.value, metric.reason) == (None, "no calls in the pilot")


def test_token_arrays_of_different_lengths_are_refused():
    """Also when built directly."""
    with pytest.raises(LossInputError, match=r"advantages_N: shape \(2,\); expected \(1,\)"):
        TokenArrays(
            target_logprobs_N=np.zeros(1),
            sampling_logprobs_N=np.zeros(1),
            advantages_N=np.zeros(2),
            keep_N=np.ones(1, dtype=bool),
        )


def test_anchor_is_part_of_a_fixed_batch():
    """It is hashed with the rest."""
    fields = {
        "description": "d",
        "target_logprobs_D": ((-1.0,),),
        "sampling_logprobs_D": ((-1.0,),),
        "advantages_D": ((1.0,),),
        "loss_mask_D": ((True,),),
    }

    plain = FixedBatch(**fields)
    anchored = FixedBatch(**fields, anchor_logprobs_D=((-1.5,),))

    assert b"anchor_logprobs_D" in anchored.canonical_bytes()
    assert plain.sha256 != anchored.sha256


@pytest.mark.parametrize("divergence", ["topk_tv", "js", "ratio_ablation_neither"])
def test_reference_does_not_know_every_mask(divergence):
    """An unknown form, and a top-K form without its values, are errors there too."""
    form = reference_policy.MaskForm(
        divergence=divergence, delta_low=0.1, delta_high=0.1, ratio_cap=None
    )
    with pytest.raises(ValueError, match="divergence: "):
        reference_policy.dppo([-1.0], [-1.0], [1.0], [1], form=form)


def test_reference_does_not_know_every_name():
    """Aggregation mode, correction level, support."""
    with pytest.raises(ValueError, match="mode: 'mean'"):
        reference_aggregation.sequence_weights([[1]], mode="mean", denominator=1.0)
    with pytest.raises(ValueError, match="level: 'batch'"):
        reference_advantages.correction_weights(
            [[0.0]], [[0.0]], [[1]], level="batch", threshold=1.0, batch_normalize=False
        )
    with pytest.raises(ValueError, match="support: 'topk'"):
        reference_sdpo.on_support(np.zeros((1, 2)), "topk")
