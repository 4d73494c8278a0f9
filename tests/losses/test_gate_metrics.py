"""The activation gates' metrics by their exact names, against numbers worked out by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from losses.gate_metrics import MEASURES, PilotEvidence, PilotUpdate, measure, measure_all
from losses.token_arrays import token_arrays

NAN = float("nan")


def update(step, position, *, masked=0, total=10, drift=0.0, clipped=0):
    """An update of ``total`` tokens: ``masked`` removed, ``clipped`` beyond ratio 1.2."""
    q = np.full(total, 0.5)
    p = q + drift
    p[:clipped] = 0.5 * 1.5
    keep = np.ones(total)
    keep[:masked] = 0
    tokens = token_arrays(
        target_logprobs=np.log(p),
        sampling_logprobs=np.log(q),
        advantages=np.ones(total),
        loss_mask=np.ones(total),
        keep=keep,
    )
    return PilotUpdate(step=step, position=position, tokens=tokens)


def test_masked_fraction_is_the_mean_over_steps_of_second_updates():
    """Second updates: 1 of 10 and 4 of 100. Mean of 0.1 and 0.04 is 0.07; pooled it would be 5/110.

    First updates do not count.
    """
    evidence = PilotEvidence(
        updates=[
            update(0, 0, masked=9),
            update(0, 1, masked=1),
            update(1, 0, masked=9),
            update(1, 1, masked=4, total=100),
        ]
    )

    metric = measure("dppo_masked_token_fraction", evidence)

    assert metric.value == pytest.approx(0.07, rel=1e-15)
    assert metric.detail["steps"] == [
        {"step": 0, "masked_tokens": 1, "loss_tokens": 10},
        {"step": 1, "masked_tokens": 4, "loss_tokens": 100},
    ]


def test_removed_tokens_without_advantage_are_no_engagement():
    """Two not kept, one of them with A = 0: 1 of 4, the denominator being all trained tokens."""
    tokens = token_arrays(
        target_logprobs=[-1.0] * 4,
        sampling_logprobs=[-1.0] * 4,
        advantages=[0.0, 1.0, 0.0, 1.0],
        loss_mask=[1] * 4,
        keep=[0, 0, 1, 1],
    )
    evidence = PilotEvidence(updates=[PilotUpdate(step=0, position=1, tokens=tokens)])

    assert measure("dppo_masked_token_fraction", evidence).value == 0.25


@pytest.mark.parametrize("name", ["dppo_masked_token_fraction", "policy_drift_abs_p_q90"])
@pytest.mark.parametrize(
    ("updates", "reason"),
    [
        (None, "pilot updates not retained"),
        ([], "pilot has no update"),
        ([update(0, 0), update(0, 1), update(1, 0)], "pilot step 1: expected one second update"),
        ([update(0, 1), update(0, 1)], "pilot step 0: expected one second update"),
        ([update(0, 1, total=0)], "pilot step 0: expected one second update with a trained token"),
    ],
)
def test_second_update_metrics_need_one_in_every_step(name, updates, reason):
    """A step that lacks it is not averaged away."""
    metric = measure(name, PilotEvidence(updates=updates))

    assert metric.value is None
    assert metric.reason.startswith(reason)


def test_drift_quantile_pools_the_tokens_of_second_updates():
    """30 tokens moved by 0.1 and 10 by 0.2: position 35.1 of 40 is 0.2. Equal weights of the two
    steps' own quantiles would give 0.15."""
    evidence = PilotEvidence(
        updates=[
            update(0, 0, drift=0.4),
            update(0, 1, drift=0.1, total=30),
            update(1, 1, drift=-0.2, total=10),
        ]
    )

    metric = measure("policy_drift_abs_p_q90", evidence)

    assert metric.value == pytest.approx(0.2, rel=1e-12)
    assert metric.detail["loss_tokens"] == 40


def test_clip_fraction_pools_all_updates_of_the_batches():
    """0 of 10 and 3 of 30: 3 of 40, with the second updates' own 3 of 30 beside it."""
    evidence = PilotEvidence(
        updates=[update(0, 0), update(0, 1, clipped=3, total=30)], baseline_clip=(0.8, 1.2)
    )

    metric = measure("grpo_clip_fraction", evidence)

    assert metric.value == 3 / 40
    assert metric.detail["second_update_clipped_tokens"] == 3
    assert metric.detail["second_update_loss_tokens"] == 30


def test_clip_fraction_needs_bounds_and_tokens():
    """Neither is guessed."""
    assert measure("grpo_clip_fraction", PilotEvidence(updates=[update(0, 1)])).value is None
    empty = PilotEvidence(updates=[update(0, 1, total=0)], baseline_clip=(0.8, 1.2))
    assert measure("grpo_clip_fraction", empty).reason == "pilot has no trained token"


def test_updates_per_batch_is_one_number_or_none():
    """2 and 2 is 2. 1 and 3 is not 2 on average."""
    name = "executed_updates_per_batch"

    assert measure(name, PilotEvidence(optimizer_steps={0: 2, 1: 2})).value == 2
    uneven = measure(name, PilotEvidence(optimizer_steps={0: 1, 1: 3}))
    assert uneven.value is None
    assert uneven.reason == "optimizer steps per rollout batch: [1, 3]; expected one number"
    assert measure(name, PilotEvidence(optimizer_steps={})).value is None


def test_base_model_is_what_every_client_reported():
    """Two names are none."""
    name = "executed_base_model"

    assert measure(name, PilotEvidence(base_models=["a/b", "a/b"])).value == "a/b"
    assert measure(name, PilotEvidence(base_models=["a/b", "a/c"])).value is None
    assert measure(name, PilotEvidence(base_models=[])).value is None


def test_token_advantage_metrics_by_hand():
    """Gaps 0.05, 0.125, 7, none: strictly above 0.1 are two of four; mean 7.175 / 4.

    A gap of exactly 0.1 would not count, and the clip at 5 nats plays no part.
    """
    evidence = PilotEvidence(
        teacher_logprobs=[-1.0, -1.125, -8.0, NAN], student_logprobs=[-0.95, -1.0, -1.0, -2.0]
    )

    share = measure("sdpo_frac_tokens_abs_adv_gt_0.1", evidence)
    mean = measure("sdpo_mean_abs_token_adv", evidence)

    assert share.value == 0.5
    assert mean.value == pytest.approx(7.175 / 4, rel=1e-12)
    assert share.detail["tokens_without_teacher"] == 1


def test_token_advantage_of_exactly_a_tenth_is_not_above_it():
    """Strict."""
    evidence = PilotEvidence(teacher_logprobs=[0.0], student_logprobs=[-0.1])

    assert measure("sdpo_frac_tokens_abs_adv_gt_0.1", evidence).value == 0.0


@pytest.mark.parametrize(
    ("teacher", "student"),
    [(None, [-1.0]), ([-1.0], None), ([], []), ([-1.0], [-1.0, -2.0]), ([-1.0], [NAN])],
)
def test_token_advantage_needs_both_sides(teacher, student):
    """Missing, empty, misfitting or broken: not measured."""
    evidence = PilotEvidence(teacher_logprobs=teacher, student_logprobs=student)

    assert measure("sdpo_mean_abs_token_adv", evidence).value is None


def test_feedback_counts_rationales_that_are_not_blank():
    """Two of four."""
    evidence = PilotEvidence(judge_rationales=["asked twice", "", "  \n", "no check"])

    assert measure("sdpo_frac_trajectories_with_feedback", evidence).value == 0.5


def test_feedback_missing_counts_against():
    """None is no feedback."""
    evidence = PilotEvidence(judge_rationales=["x", None])

    assert measure("sdpo_frac_trajectories_with_feedback", evidence).value == 0.5


def test_groups_with_any_difference_count():
    """0.1 three times is constant whatever its mean rounds to; a group of one is constant."""
    evidence = PilotEvidence(group_rewards_PG=[[0.1, 0.1, 0.1], [0.0, 1.0], [0.5], [0.3, 0.3001]])

    assert measure("grpo_frac_groups_nonzero_adv", evidence).value == 0.5


def test_judge_parse_rate():
    """19 of 20."""
    evidence = PilotEvidence(judge_calls_parsed=[True] * 19 + [False])

    assert measure("judge_parse_success_rate", evidence).value == 0.95


@pytest.mark.parametrize("name", MEASURES)
def test_nothing_retained_is_not_measured(name):
    """Never a zero, never a default."""
    metric = measure(name, PilotEvidence())

    assert metric.value is None
    assert "not retained" in metric.reason


def test_unknown_metric_is_not_measured():
    """The message names it and the known ones."""
    metric = measure("dppo_masked_fraction", PilotEvidence(updates=[update(0, 1)]))

    assert metric.value is None
    assert metric.reason.startswith("unknown metric 'dppo_masked_fraction'; known: dppo_masked")


def test_measure_all_keeps_the_order_of_the_names():
    """One entry per name."""
    names = ["judge_parse_success_rate", "nonsense", "executed_base_model"]

    assert list(measure_all(names, PilotEvidence())) == names


def test_shipped_specs_name_known_metrics_only():
    """Every metric that a spec under flows/specs gates on can be measured."""
    specs = sorted(Path(__file__).parents[2].glob("flows/specs/*.json"))
    for path in specs:
        document = json.loads(path.read_text(encoding="utf-8"))
        for check in (document.get("activation_gate") or {}).get("checks", []):
            assert check["metric"] in MEASURES, f"{path.name}: {check['metric']}"
