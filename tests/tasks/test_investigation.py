"""Planted causes are told apart, and the recorded figures come out, from files alone."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evidence.errors import ConflictError, InputError
from evidence.run import Run
from tasks.frozen_batch import assert_frozen
from tasks.investigation import Investigation, investigate
from tests.tasks import recorded_runs
from tests.tasks.recorded_runs import DPPO, Batch, Plant, create, write_run

DEFECT = "code_or_instrumentation_defect"
VARIANT = "wrong_reference_or_variant"
INACTIVE = "legitimately_inactive_regime"
TOO_LARGE = {**DPPO, "delta_low": 150.0, "delta_high": 150.0}

ONE_PASS = Plant(
    epochs=1, minibatches=2, updates=2, planned=None, learning_rate=2e-5, drift_nats=0.0
)
"""A comparison's batch: no sentinels, and no token is trained on twice."""

PLANTED = {
    "nothing, small drift": (Plant(drift_nats=0.01), INACTIVE, "drift_within_threshold"),
    "nothing, large drift": (Plant(drift_nats=0.8), "active", "mask_active"),
    "stale sampler weights": (
        Plant(sampler_nats=0.3),
        DEFECT,
        "stale_sampler_weights",
    ),
    "log-probabilities off by one token": (Plant(trainer_shift=1), DEFECT, "logprobs_off_by_one"),
    "off by one the other way": (Plant(trainer_shift=-1), DEFECT, "logprobs_off_by_one"),
    "temperature-scaled log-probabilities": (
        Plant(temperature=0.5, tempered=True),
        DEFECT,
        "temperature_scaled_logprobs",
    ),
    "the same without rescoring": (
        Plant(temperature=2.0, tempered=True, rescored=False),
        DEFECT,
        "temperature_scaled_logprobs",
    ),
    "delta times 1000, registered": (
        Plant(loss=TOO_LARGE, drift_nats=0.8),
        VARIANT,
        "delta_too_large",
    ),
    "delta times 1000, applied": (
        Plant(applied_loss=TOO_LARGE, drift_nats=0.8),
        VARIANT,
        "delta_too_large",
    ),
    "another divergence applied": (
        Plant(applied_loss={**DPPO, "divergence": "binary_kl"}, drift_nats=0.8),
        VARIANT,
        "another_variant",
    ),
    "delta divided by 1000, registered": (
        Plant(loss={**DPPO, "delta_low": 0.00015, "delta_high": 0.00015}, drift_nats=0.5),
        VARIANT,
        "delta_too_small",
    ),
    "learning rate zero": (Plant(learning_rate=0.0), INACTIVE, "learning_rate_zero"),
    "updates that change nothing": (Plant(drift_nats=0.0), DEFECT, "updates_without_effect"),
    "every reward equal": (Plant(equal_rewards=True), INACTIVE, "rewards_all_equal"),
    "every answer truncated": (Plant(truncated=True), INACTIVE, "every_answer_truncated"),
    "bfloat16 rounding": (Plant(bfloat16=True), DEFECT, "bfloat16_rounding"),
    "weights of nobody knows what": (
        Plant(sampler_nats=0.3, rescored=False),
        DEFECT,
        "sampler_and_trainer_disagree",
    ),
    "one pass, updates that change nothing": (ONE_PASS, DEFECT, "updates_without_effect"),
    "one pass, small drift": (
        replace(ONE_PASS, drift_nats=0.01),
        INACTIVE,
        "drift_within_threshold",
    ),
    "one pass, updates that change nothing, a sampler of another precision": (
        replace(ONE_PASS, sampler_nats=0.02),
        "missing_evidence",
        "movement_not_seen",
    ),
    "one pass, small drift, a sampler of another precision": (
        replace(ONE_PASS, sampler_nats=0.02, drift_nats=0.8),
        INACTIVE,
        "drift_within_threshold",
    ),
    "cut short": (Plant(updates=5), "missing_evidence", "incomplete_records"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_cause_is_concluded(name: str, tmp_path: Path) -> None:
    plant, category, cause = PLANTED[name]

    found = investigate(write_run(tmp_path, plant)).conclusion

    assert (found.category, found.cause) == (category, cause), found.sentence
    assert found.figures


def test_conclusions_of_the_named_causes_all_differ() -> None:
    """Eight causes, eight conclusions."""
    named = (
        "stale sampler weights",
        "log-probabilities off by one token",
        "temperature-scaled log-probabilities",
        "delta times 1000, registered",
        "learning rate zero",
        "every reward equal",
        "every answer truncated",
        "bfloat16 rounding",
    )

    assert len({PLANTED[name][2] for name in named}) == 8


@pytest.mark.parametrize(("planned", "made"), [(8, 0), (12, 4), (15, 7)])
def test_diagnostic_without_a_whole_second_pass_concludes_nothing(
    planned: int, made: int, tmp_path: Path
) -> None:
    """Everything that was planned was done, and the rules speak of a pass that is not there."""
    plant = Plant(updates=planned, planned=planned, drift_nats=1.5)

    found = investigate(write_run(tmp_path, plant))

    assert found.findings.missing == [
        f"{made} of 8 updates of the second pass over the batch were made"
    ]
    assert (found.conclusion.category, found.conclusion.cause) == (
        "missing_evidence",
        "incomplete_records",
    )


RECOMPUTE = Plant(loss={**DPPO, "anchor": "recompute"}, anchor_nats=-0.05, drift_nats=0.8)


def test_mask_on_a_recomputed_anchor_is_replayed_and_recounted(tmp_path: Path) -> None:
    """The kept scores are what the rule compared with; those of the sampler give other counts."""
    found = investigate(write_run(tmp_path / "recomputed", RECOMPUTE))
    sampled = investigate(write_run(tmp_path / "sampled", Plant(drift_nats=0.8)))

    assert (found.conclusion.category, found.conclusion.cause) == ("active", "mask_active")
    assert found.findings.missing == []
    assert found.findings.replay["updates"] == 16
    assert found.findings.replay["decisions_different"] == 0
    assert found.findings.replay["counts_different"] == []
    assert found.findings.figures["exceed"] != sampled.findings.figures["exceed"]


def test_recomputed_anchor_is_frozen_with_the_batch(tmp_path: Path) -> None:
    run = write_run(tmp_path, RECOMPUTE)
    file = tmp_path / "recorded" / "recomputed" / "dppo" / "diagnostic" / "000000.npy"
    scores = np.load(file)
    scores[-1] -= 0.5
    file.chmod(0o644)
    np.save(file, scores)

    with pytest.raises(ConflictError, match="frozen batch recomputed_logprobs"):
        assert_frozen(run)
    assert investigate(run).conclusion.cause == "records_disagree"


def test_recomputed_anchor_that_is_not_there_is_missing_evidence(tmp_path: Path) -> None:
    run = write_run(tmp_path, RECOMPUTE, freezing=False)
    (tmp_path / "recorded" / "recomputed" / "dppo" / "diagnostic" / "000000.npy").unlink()

    found = investigate(run)

    assert found.conclusion.category == "missing_evidence"
    assert found.findings.missing[0] == (
        "recomputed log-probabilities of rollout step 0 are not there"
    )


def test_arm_is_recounted_by_the_rule_that_counted_it(tmp_path: Path) -> None:
    """Two arms mask at different thresholds: both were counted against the treatment's."""
    narrow = {**DPPO, "delta_low": 0.05, "delta_high": 0.05}
    plant = Plant(drift_nats=0.8, other_loss=narrow)

    found = investigate(write_run(tmp_path, plant), arm="dppo")

    assert found.findings.replay["counts_different"] == []
    assert (found.conclusion.category, found.conclusion.cause) == ("active", "mask_active")


def test_off_by_one_says_which_way(tmp_path: Path) -> None:
    """A trainer that is late by one: what belongs to token i stands at i + 1, and agrees there."""
    shifts = investigate(write_run(tmp_path, Plant(trainer_shift=1))).conclusion.figures[
        "shift_nats"
    ]

    assert shifts["+1"] < 1e-6 < 0.1 < shifts["+0"]


def test_bfloat16_is_seen_in_the_bits(tmp_path: Path) -> None:
    figures = investigate(write_run(tmp_path, Plant(bfloat16=True))).conclusion.figures

    assert figures["bfloat16_sampling"] == 1.0
    assert figures["bfloat16_trainer"] < 0.01
    assert 0 < figures["nats_max"] <= 2.0**-7  # half a unit in the last place below 4 nats


# ---- the record's arithmetic --------------------------------------------------------------------

GROUPS, SIZE = 32, 8
ZERO_TOKENS, NONZERO_TOKENS = 9747, 74749


def record_batch() -> tuple[Plant, Batch]:
    """84496 tokens: four groups without advantage; moves placed where the record counts them."""
    plant = Plant(groups=GROUPS, group_size=SIZE, drift_nats=1.0)
    zero = np.arange(GROUPS * SIZE) < 4 * SIZE
    rewards = np.where(zero, 1.0, (np.arange(GROUPS * SIZE) % 2).astype(float))
    lengths = np.where(zero, ZERO_TOKENS // 32, NONZERO_TOKENS // 224)
    lengths[np.flatnonzero(zero)[: ZERO_TOKENS % 32]] += 1
    lengths[np.flatnonzero(~zero)[: NONZERO_TOKENS % 224]] += 1
    moves = np.zeros(int(lengths.sum()))
    sign = np.repeat(np.where(zero, 0, np.where(rewards == 1.0, 1, -1)), lengths)
    up, down, none = (np.flatnonzero(sign == value) for value in (1, -1, 0))
    moves[up[:50]], moves[down[:46]] = 0.2, -0.2  # beyond delta in the advantage's direction
    moves[up[50:110]], moves[down[46:86]] = -0.2, 0.2  # beyond delta, coming back
    moves[none[:28]] = 0.2  # beyond delta, without advantage
    moves[up[110:1171]] = 0.12  # ratio 1.24 within delta: the clip alone would cut it
    starts = np.cumsum(lengths)[:-1]
    target = np.split(np.log(0.5 + moves), starts)
    base = np.split(np.full(len(moves), np.log(0.5)), starts)
    direction = [(t - b) for t, b in zip(target, base, strict=True)]
    return plant, Batch(lengths, rewards, base, direction)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Investigation:
    """The moves of the record in the second pass, none in the first."""
    plant, batch = record_batch()

    def trainer(_: Plant, found: Batch, updates: int) -> list[np.ndarray]:
        share = 1.0 if updates >= 8 else 0.0
        pairs = zip(found.base, found.direction, strict=True)
        return [(base + share * move).astype(np.float32) for base, move in pairs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_runs, "trainer", trainer)
        return investigate(write_run(tmp_path_factory.mktemp("record"), plant, batch))


def test_record_s_figures_come_out_of_its_counts(recorded: Investigation) -> None:
    """96 of 84496 masked, 50 and 46 by sign, 224 beyond delta whatever the sign, 1157 cut by PPO."""
    found = recorded

    assert found.record["epoch2_n_loss_tokens"] == 84496
    assert found.record["epoch2_dppo_masked_token_fraction"] == 0.0011361484567316796
    assert found.record["epoch2_dppo_masked_nonzero_adv_fraction"] == 0.0012842981177005712
    assert found.record["epoch2_removed_nonzero_grad_pos"] == 50
    assert found.record["epoch2_removed_nonzero_grad_neg"] == 46
    assert found.record["epoch2_abs_drift_gt_delta_tokens"] == 224
    assert found.record["epoch2_ppo_counterfactual_clip_fraction"] == 0.013692955879568263
    assert found.record["epoch2_ratio_cap_hits"] == 0
    assert found.record["epoch1_dppo_masked_token_fraction"] == 0
    assert found.findings.figures["ppo_counterfactual_tokens"] == 1157
    assert found.findings.figures["exceed_restoring"] == 100
    assert found.findings.figures["exceed_zero_advantage"] == 28
    assert found.findings.replay["decisions_different"] == 0


def test_record_s_bins_add_up(recorded: Investigation) -> None:
    """The float32 logarithm of 0.5 lies a little below, so every token is in the bin under it."""
    rows = {row["from"]: row for row in recorded.bins}

    assert (rows[0.1]["tokens"], rows[0.1]["masked"]) == (84496, 96)
    assert (rows[0.1]["exceed"], rows[0.1]["ppo"]) == (224, 1157)


# ---- files that cannot be relied on -------------------------------------------------------------


def rewrite(run: Run, path: str, change) -> None:  # type: ignore[no-untyped-def]
    """Change a column of a Parquet file in place, as nobody should."""
    file = Path(run.path) / path
    table = pq.read_table(io.BytesIO(file.read_bytes()))
    sink = io.BytesIO()
    pq.write_table(change(table), sink)
    file.chmod(0o644)
    file.write_bytes(sink.getvalue())


def moved(table, name: str):  # type: ignore[no-untyped-def]
    index = table.schema.get_field_index(name)
    values = table.column(name).to_pylist()
    values[-1] = values[-1] - 1 if values[-1] is not None else None
    field = table.schema.field(name)
    return table.set_column(index, field, pa.array(values, type=field.type))


@pytest.mark.parametrize(
    ("column", "array"),
    [
        ("token_id", "tokens"),
        ("sampling_logprob", "sampling_logprobs"),
        ("advantage", "advantages"),
    ],
)
def test_changed_frozen_batch_is_refused(column: str, array: str, tmp_path: Path) -> None:
    run = write_run(tmp_path, Plant())
    rewrite(run, "tables/tokens/dppo/diagnostic/000000.parquet", lambda t: moved(t, column))

    with pytest.raises(ConflictError, match=f"frozen batch {array}"):
        assert_frozen(run)
    found = investigate(run).conclusion
    assert (found.category, found.cause) == (DEFECT, "records_disagree")


def test_update_of_other_tokens_is_found(tmp_path: Path) -> None:
    run = write_run(tmp_path, Plant())
    path = "tables/update_tokens/dppo/diagnostic/000003.parquet"
    rewrite(run, path, lambda t: moved(t, "token_id"))

    broken = investigate(run).findings.broken

    assert len(broken) == 1
    assert broken[0].startswith("update 3: token_id of 1 loss tokens is not that of step 0's")


def test_changed_count_is_found(tmp_path: Path) -> None:
    run = write_run(tmp_path, Plant(drift_nats=0.8))
    path = "tables/updates/dppo/diagnostic/000009.parquet"
    rewrite(run, path, lambda t: moved(t, "exceed"))

    found = investigate(run).conclusion

    assert found.cause == "figures_not_reproduced"
    assert "count exceed" in found.sentence


def test_run_without_updates_lacks_evidence(tmp_path: Path) -> None:
    run, _, _ = create(tmp_path, Plant())

    found = investigate(run)

    assert (found.conclusion.category, found.arm) == ("missing_evidence", None)


def test_table_of_an_older_version_is_one_error(tmp_path: Path) -> None:
    run = write_run(tmp_path, Plant())
    rewrite(
        run,
        "tables/updates/dppo/diagnostic/000000.parquet",
        lambda t: t.replace_schema_metadata({"table": "updates", "version": "1"}),
    )

    with pytest.raises(InputError, match="version 2 of table updates"):
        investigate(run)


def test_unknown_arm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--arm: expected one of the arms grpo, dppo"):
        investigate(write_run(tmp_path, Plant()), arm="ppo")
