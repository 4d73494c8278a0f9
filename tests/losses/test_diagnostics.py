"""Diagnostics: counts with their denominators, tails, pooling, and the record's arithmetic."""

import math

import numpy as np
import pytest

from evidence.tables import UPDATES
from losses.diagnostics import (
    COLUMNS,
    COUNTS,
    FRACTIONS,
    QUANTILES,
    DiagnosticSettings,
    exceedances,
    fractions,
    pool_counts,
    pooled_diagnostics,
    probability_bins,
    quantile,
    record_figures,
    settings_for_arms,
    token_diagnostics,
)
from losses.dppo_rule import DppoRule
from losses.errors import LossConfigError, LossInputError
from losses.reference import policy as reference_policy
from losses.reference.counts import Token, recount
from losses.token_arrays import TokenArrays, concatenate, token_arrays
from tests.losses.builders import DPPO, GRPO, IMPORTANCE, random_batch

TV = DppoRule(divergence="binary_tv", anchor="sampling", delta_low=0.15, delta_high=0.15)


def settings(**over):
    values = {
        "rule": TV,
        "ratio_cap": 10.0,
        "ppo_low_threshold": 0.8,
        "ppo_high_threshold": 1.2,
    }
    return DiagnosticSettings(**(values | over))


def tokens(p, q, advantages, keep, **over) -> TokenArrays:
    return token_arrays(
        target_logprobs=np.log(p),
        sampling_logprobs=np.log(q),
        advantages=advantages,
        loss_mask=np.ones(len(p)),
        keep=keep,
        **over,
    )


#      dropped up, dropped down, restoring, zero A, within, cap hit (kept)
EIGHT = tokens(
    [0.75, 0.25, 0.25, 0.75, 0.55, 0.14],
    [0.50, 0.50, 0.50, 0.50, 0.50, 0.01],
    [1.0, -1.0, 2.0, 0.0, -1.0, 1.0],
    [False, False, True, True, True, True],
)


def test_counts_by_hand():
    """Six tokens, one of each kind.

    Beyond 0.15: the first four. PPO, ratios 1.5, 0.5, 0.5, 1.5, 1.1, 14: (a) tokens 1, 2, 6;
    (b) all but the fifth. Cap 10 is hit by ratio 14 alone.
    """
    record = token_diagnostics(EIGHT, settings=settings())

    expected = {
        "loss_tokens": 6,
        "nonzero_advantage_tokens": 5,
        "positive_advantage_tokens": 3,
        "negative_advantage_tokens": 2,
        "masked_tokens": 2,
        "removed_positive": 1,
        "removed_negative": 1,
        "keep_zero_tokens": 2,
        "keep_zero_advantage_zero_tokens": 0,
        "exceed": 4,
        "exceed_dropped": 2,
        "exceed_dropped_positive": 1,
        "exceed_dropped_negative": 1,
        "exceed_restoring": 1,
        "exceed_zero_advantage": 1,
        "ppo_counterfactual_tokens": 3,
        "ppo_counterfactual_with_zero_advantage_tokens": 3,
        "ppo_two_sided_tokens": 5,
        "cap_hits": 1,
        "cap_hits_kept": 1,
        "nonfinite_tokens": 0,
    }
    assert {name: record[name] for name in expected} == expected
    assert record["masked_fraction"] == 2 / 6
    assert record["masked_fraction_nonzero"] == 2 / 5
    assert record["pg_clipfrac_srl"] == 2 / (5 + 1e-8)
    assert record["pg_clipfrac_verl"] == 2 / (6 + 1e-8)
    assert record["ppo_counterfactual_fraction"] == 3 / 6


def test_zero_advantage_below_the_clip_counts_in_definition_c_alone():
    """A = 0 with ratio 0.5: (a) no, (c) yes; with ratio 1.5: neither."""
    record = token_diagnostics(
        tokens([0.25, 0.75], [0.5, 0.5], [0.0, 0.0], [True, True]), settings=settings()
    )

    assert record["ppo_counterfactual_tokens"] == 0
    assert record["ppo_counterfactual_with_zero_advantage_tokens"] == 1


def test_drift_by_hand():
    """p - q = 0.25, -0.25, -0.25, 0.25, 0.05, 0.13: extremes, means and the linear 0.9 quantile.

    Sorted |p - q|: 0.05, 0.13, 0.25 x 4; position 0.9 * 5 = 4.5 lies between two 0.25.
    """
    record = token_diagnostics(EIGHT, settings=settings())

    assert record["drift_max"] == pytest.approx(0.25, rel=1e-12)
    assert record["drift_min"] == pytest.approx(-0.25, rel=1e-12)
    assert record["drift_mean"] == pytest.approx(0.18 / 6, rel=1e-12)
    assert record["drift_abs_mean"] == pytest.approx(1.18 / 6, rel=1e-12)
    assert record["drift_abs_q90"] == pytest.approx(0.25, rel=1e-12)
    assert record["drift_abs_q50"] == pytest.approx(0.25, rel=1e-12)
    assert record["ratio_max"] == pytest.approx(14.0, rel=1e-12)
    assert record["log_ratio_abs_max"] == pytest.approx(math.log(14.0), rel=1e-12)


def test_quantile_method_is_linear_between_order_statistics():
    """0.9 of four numbers sits at position 2.7: 3 + 0.7 * (4 - 3) by default, 3 or 4 if told."""
    values = [4.0, 1.0, 3.0, 2.0]

    assert quantile(values, 0.9) == pytest.approx(3.7, rel=1e-15)
    assert quantile(values, 0.9, method="lower") == 3.0
    assert quantile(values, 0.9, method="higher") == 4.0


@pytest.mark.parametrize("seed", range(20))
def test_counts_equal_a_recount_token_by_token(seed):
    """Random batches against plain loops, and the identity of the exceedances."""
    batch = random_batch(seed, tokens=200)
    columns = [batch[name] for name in ("current", "sampling", "advantages", "mask")]
    form = reference_policy.MaskForm(
        divergence="binary_tv", delta_low=0.05, delta_high=0.15, ratio_cap=10.0
    )
    keep = reference_policy.dppo(*columns, form=form).keep
    arrays = token_arrays(
        target_logprobs=columns[0],
        sampling_logprobs=columns[1],
        advantages=columns[2],
        loss_mask=columns[3],
        keep=keep,
    )
    rule = DppoRule(divergence="binary_tv", anchor="sampling", delta_low=0.05, delta_high=0.15)

    record = token_diagnostics(arrays, settings=settings(rule=rule))
    expected = recount(
        [
            Token(target_logprob=lp, sampling_logprob=mu, advantage=a, keep=k)
            for lp, mu, a, m, k in zip(*columns, keep, strict=True)
            if m
        ],
        delta_low=0.05,
        delta_high=0.15,
        ppo=(0.8, 1.2),
    )

    assert {name: record[name] for name in expected} == expected
    assert record["exceed"] == (
        record["exceed_dropped"] + record["exceed_restoring"] + record["exceed_zero_advantage"]
    )
    assert record["exceed_dropped"] == record["masked_tokens"]
    assert sum(row.tokens for row in probability_bins(record)) == record["loss_tokens"]
    assert sum(row.masked for row in probability_bins(record)) == record["masked_tokens"]
    assert sum(row.exceed for row in probability_bins(record)) == record["exceed"]
    assert sum(row.ppo for row in probability_bins(record)) == record["ppo_counterfactual_tokens"]


def test_recorded_figures_recompute_bit_for_bit():
    """96 and 1157 of 84496, 96 of 74749, and the symmetric mask's 224: plain float64 divisions."""
    counts = {
        "loss_tokens": 84496,
        "nonzero_advantage_tokens": 74749,
        "masked_tokens": 50 + 46,
        "ppo_counterfactual_tokens": 1157,
        "exceed": 224,
    }

    result = fractions(counts)

    assert result["masked_fraction"] == 0.0011361484567316796
    assert result["ppo_counterfactual_fraction"] == 0.013692955879568263
    assert result["masked_fraction_nonzero"] == 0.0012842981177005712
    assert result["exceed_fraction"] == 0.0026510130657072524
    assert 96 / (84496 + 1e-8) == 0.0011361484567315452 != result["masked_fraction"]


def recorded_second_epoch() -> list[TokenArrays]:
    """84,496 tokens in 8 updates, made so that they count as the record does.

    Per update 10,562 tokens. Dropped: 50 up with A > 0 and 46 down with A < 0; another 128 beyond
    delta coming back; PPO alone: 1157 - 96 more with a ratio above 1.2 and a small drift.
    """
    kinds = [
        (50, 0.75, 0.5, 1.0, False),
        (46, 0.25, 0.5, -1.0, False),
        (128, 0.75, 0.5, -1.0, True),
        (1157 - 96, 0.013, 0.01, 1.0, True),
    ]
    rest = 84496 - sum(kind[0] for kind in kinds)
    kinds.append((rest, 0.5, 0.5, 1.0, True))
    columns = [np.concatenate([np.full(n, kind[i]) for n, *kind in kinds]) for i in range(4)]
    order = np.random.default_rng(0).permutation(84496)
    parts = np.array_split(order, 8)
    return [tokens(*(column[part] for column in columns)) for part in parts]


def test_pooled_epoch_has_the_recorded_counts():
    """Eight updates pooled by counts: 96 = 50 + 46 masked, 224 beyond delta, 1157 by PPO's clip."""
    updates = recorded_second_epoch()
    records = [token_diagnostics(update, settings=settings()) for update in updates]

    pooled = pool_counts(records)
    figures = record_figures(pooled, prefix="epoch2")

    assert figures["epoch2_n_loss_tokens"] == 84496
    assert figures["epoch2_dppo_masked_token_fraction"] == 0.0011361484567316796
    assert figures["epoch2_removed_nonzero_grad_pos"] == 50
    assert figures["epoch2_removed_nonzero_grad_neg"] == 46
    assert figures["epoch2_abs_drift_gt_delta_tokens"] == 224
    assert figures["epoch2_ppo_counterfactual_clip_fraction"] == 0.013692955879568263
    assert figures["epoch2_ratio_cap_hits"] == 0
    assert pooled["exceed_restoring"] == 128
    mean_of_fractions = sum(record["masked_fraction"] for record in records) / 8
    assert mean_of_fractions != pooled["masked_fraction"]


def test_pooling_tokens_gives_quantiles_and_pooling_records_does_not():
    """Counts agree; the quantile of a pool is not a mean of quantiles, so it is null."""
    updates = recorded_second_epoch()

    from_tokens = pooled_diagnostics(updates, settings=settings())
    from_records = pool_counts(
        [token_diagnostics(update, settings=settings()) for update in updates]
    )

    for name in (*COUNTS, *FRACTIONS):
        assert from_tokens[name] == from_records[name], name
    for name in ("drift_mean", "drift_abs_mean", "ratio_mean", "log_ratio_mean"):
        assert from_records[name] == pytest.approx(from_tokens[name], rel=1e-12)
    for name in ("drift_max", "drift_abs_max", "drift_min", "ratio_max", "log_ratio_abs_max"):
        assert from_records[name] == from_tokens[name]
    assert all(from_records[name] is None for name in QUANTILES)
    assert all(from_tokens[name] is not None for name in QUANTILES)


def test_pooling_keeps_what_is_missing_missing():
    """One update without a rule: its exceedances are unknown, so is their sum."""
    records = [
        token_diagnostics(EIGHT, settings=settings()),
        token_diagnostics(EIGHT, settings=settings(rule=None)),
    ]

    pooled = pool_counts(records)

    assert pooled["exceed"] is None
    assert pooled["exceed_fraction"] is None
    assert pooled["masked_tokens"] == 4


def test_pooling_nothing_is_null():
    """No update: nothing was measured."""
    assert set(pool_counts([]).values()) == {None}


def test_no_trained_token_gives_counts_of_zero_and_null_fractions():
    """0/0 is not a fraction."""
    empty = tokens([], [], [], [])

    record = token_diagnostics(empty, settings=settings())

    assert record["loss_tokens"] == 0
    assert record["masked_tokens"] == 0
    assert record["masked_fraction"] is None
    assert record["drift_abs_q90"] is None


def test_without_rule_and_cap_their_columns_are_null():
    """An arm without a mask still reports drift and the counterfactual clip."""
    record = token_diagnostics(EIGHT, settings=settings(rule=None, ratio_cap=None))

    assert record["exceed"] is None
    assert record["cap_hits"] is None
    assert record["ppo_counterfactual_tokens"] == 3


def test_cap_hit_is_strict():
    """Ratio 0.25 / 0.5 against a cap of exactly that: no hit."""
    arrays = token_arrays(
        target_logprobs=[-2.0],
        sampling_logprobs=[-1.0],
        advantages=[1.0],
        loss_mask=[1],
        keep=[1],
    )

    at = token_diagnostics(arrays, settings=settings(ratio_cap=float(np.exp(-1.0))))
    below = token_diagnostics(arrays, settings=settings(ratio_cap=0.36))

    assert (at["cap_hits"], below["cap_hits"]) == (0, 1)


@pytest.mark.parametrize(("advantage", "low", "high"), [(-1.0, 0.5, 2.0), (1.0, 0.5, 2.0)])
def test_counterfactual_clip_is_strict(advantage, low, high):
    """Ratio 0.5 with A < 0 and ratio 2 with A > 0 against exactly these bounds: not clipped."""
    q, p = (1.0, 0.5) if advantage < 0 else (0.5, 1.0)

    record = token_diagnostics(
        tokens([p], [q], [advantage], [True]),
        settings=settings(ppo_low_threshold=low, ppo_high_threshold=high),
    )

    assert record["ppo_counterfactual_tokens"] == 0
    assert record["ppo_two_sided_tokens"] == 0


def test_cap_hits_of_dropped_and_weightless_tokens_change_no_gradient():
    """Ratio 50 dropped and ratio 14 with A = 0: two hits, none kept."""
    arrays = tokens([0.5, 0.14], [0.01, 0.01], [1.0, 0.0], [False, True])

    record = token_diagnostics(arrays, settings=settings())

    assert (record["cap_hits"], record["cap_hits_kept"]) == (2, 0)


def test_exceedances_follow_the_rules_divergence_and_anchor():
    """KL against the recomputed anchor 0.7: 0.75 is near it; against the sampler 0.5 it is far."""
    arrays = tokens([0.75], [0.5], [1.0], [True], anchor_logprobs=np.log([0.7]))
    kl = {"divergence": "binary_kl", "delta_low": 0.05, "delta_high": 0.05}

    near = token_diagnostics(arrays, settings=settings(rule=DppoRule(anchor="recompute", **kl)))
    far = token_diagnostics(arrays, settings=settings(rule=DppoRule(anchor="sampling", **kl)))

    assert (near["exceed"], far["exceed"]) == (0, 1)


@pytest.mark.parametrize(
    "rule",
    [
        DppoRule(divergence="binary_tv", anchor="recompute", delta_low=0.1, delta_high=0.1),
        DppoRule(divergence="topk_tv", anchor="sampling", delta_low=0.1, delta_high=0.1),
    ],
)
def test_exceedances_without_what_the_rule_compares_with_are_null(rule):
    """The tokens of another arm: sampling log-probabilities never stand in for the anchor."""
    record = token_diagnostics(EIGHT, settings=settings(rule=rule))

    nulls = {name for name, value in record.items() if value is None}
    assert nulls == {
        "exceed",
        "exceed_dropped",
        "exceed_dropped_positive",
        "exceed_dropped_negative",
        "exceed_restoring",
        "exceed_zero_advantage",
        "exceed_fraction",
        *(f"prob_bin_{index}_exceed" for index in range(6)),
    }
    assert record["masked_tokens"] == token_diagnostics(EIGHT, settings=settings())["masked_tokens"]


@pytest.mark.parametrize(
    ("rule", "missing"),
    [
        (
            DppoRule(divergence="binary_tv", anchor="recompute", delta_low=0.1, delta_high=0.1),
            "anchor_logprobs_N: None",
        ),
        (
            DppoRule(divergence="topk_tv", anchor="sampling", delta_low=0.1, delta_high=0.1),
            "divergence_T: None",
        ),
    ],
)
def test_exceedances_themselves_are_refused_without_it(rule, missing):
    with pytest.raises(LossInputError, match=missing):
        exceedances(EIGHT, rule)


def test_bins_put_edges_into_the_upper_bin_and_one_into_the_last():
    """0.5 belongs to [0.5, 0.9), 1 to [0.99, 1]."""
    arrays = token_arrays(
        target_logprobs=np.log([0.5, 0.5, 0.5]),
        sampling_logprobs=[math.log(0.5), 0.0, -30.0],
        advantages=[1.0, 1.0, 1.0],
        loss_mask=[1, 1, 1],
        keep=[1, 1, 1],
    )

    bins = probability_bins(token_diagnostics(arrays, settings=settings()))

    assert [(row.lower, row.tokens) for row in bins] == [
        (0.0, 1),
        (0.01, 0),
        (0.1, 0),
        (0.5, 1),
        (0.9, 0),
        (0.99, 1),
    ]


def test_every_diagnostic_column_of_the_updates_table_is_produced():
    """The table's names are the record's; the method and the service's norm come from elsewhere."""
    names = [column.name for column in UPDATES.columns]
    start, end = names.index("masked_tokens"), names.index("gradient_norm")
    wanted = set(names[start:end]) - {"quantile_method"}

    assert wanted <= set(COLUMNS)
    assert {"loss_tokens", "nonzero_advantage_tokens"} <= set(COLUMNS)
    assert set(token_diagnostics(EIGHT, settings=settings())) == set(COLUMNS)


def test_padding_is_left_out_whatever_it_holds():
    """NaN off the mask is not read."""
    arrays = token_arrays(
        target_logprobs=[[-1.0, math.nan]],
        sampling_logprobs=[[-1.0, -math.inf]],
        advantages=[[1.0, math.nan]],
        loss_mask=[[1.0, 0.0]],
        keep=[[1, 0]],
    )

    assert len(arrays) == 1


def test_non_finite_trained_token_is_refused():
    """Field, position and value."""
    with pytest.raises(LossInputError, match="sampling_logprobs_N: nan on trained token 1"):
        token_arrays(
            target_logprobs=[-1.0, -1.0],
            sampling_logprobs=[-1.0, math.nan],
            advantages=[1.0, 1.0],
            loss_mask=[1, 1],
            keep=[1, 1],
        )


def test_arrays_of_other_shape_are_refused():
    """A column must not be broadcast."""
    with pytest.raises(LossInputError, match=r"advantages: shape \(1,\)"):
        token_arrays(
            target_logprobs=[-1.0, -1.0],
            sampling_logprobs=[-1.0, -1.0],
            advantages=[1.0],
            loss_mask=[1, 1],
            keep=[1, 1],
        )


def test_concatenation_needs_optional_fields_in_all_updates_or_none():
    """Half an anchor is none."""
    with_anchor = tokens([0.5], [0.5], [1.0], [True], anchor_logprobs=[-1.0])

    with pytest.raises(LossInputError, match="anchor_logprobs_N: given for 1 of 2"):
        concatenate([with_anchor, EIGHT])
    assert len(concatenate([])) == 0


@pytest.mark.parametrize("bounds", [(0.2, 0.2), (1.1, 1.2), (-0.1, 1.2)])
def test_clip_bounds_are_on_the_ratio(bounds):
    """An epsilon where a bound belongs is refused."""
    with pytest.raises(LossConfigError, match="bounds on the ratio, not epsilons"):
        settings(ppo_low_threshold=bounds[0], ppo_high_threshold=bounds[1])


def test_settings_come_from_the_arms():
    """Rule and cap from DPPO, bounds from GRPO; the same for every arm."""
    found = settings_for_arms([GRPO, DPPO, DPPO])

    assert found == settings()


def test_settings_without_a_mask_or_a_clip():
    """No DPPO arm: no rule. No GRPO arm: bounds must be stated."""
    assert settings_for_arms([GRPO, IMPORTANCE]).rule is None
    stated = settings_for_arms([DPPO], ppo_low_threshold=0.8, ppo_high_threshold=1.28)
    assert (stated.rule, stated.ppo_high_threshold) == (TV, 1.28)
    with pytest.raises(LossConfigError, match="and 0 different grpo_clip bounds"):
        settings_for_arms([DPPO, IMPORTANCE])


def test_settings_of_arms_that_differ_are_refused():
    """Two masks or two clips: nobody could say which a count refers to."""
    with pytest.raises(LossConfigError, match="2 different dppo losses"):
        settings_for_arms([GRPO, DPPO, DPPO | {"delta_low": 0.1}])
    with pytest.raises(LossConfigError, match="2 different grpo_clip bounds"):
        settings_for_arms([GRPO, GRPO | {"clip_high_threshold": 1.28}])
