"""Judging measured numbers of a service: what conforms, what differs, and what it looks like."""

from __future__ import annotations

import dataclasses

import pytest

from evidence.canonical import loads_strict
from evidence.conformance import (
    ConformanceRecord,
    Measurement,
    judge,
    record_of,
    refusal_to_accept,
)
from evidence.conformance_probes import CLIPPING, NEEDS, PROBES, TEMPERATURE
from evidence.errors import InputError
from tests.evidence.conformance_cases import HEALTHY_VALUES, healthy


def _record(measurements: list[Measurement], **options: object) -> ConformanceRecord:
    settings = {"scope": "whole", "service": {"url": "http://x"}, "base_model": "m"}
    return record_of(measurements, versions={}, **(settings | options))  # type: ignore[arg-type]


def _changed(probe: str, **values: float | None) -> list[Measurement]:
    return [
        dataclasses.replace(one, values={**one.values, **values}) if one.probe == probe else one
        for one in healthy()
    ]


def test_every_probe_but_capacity_has_a_healthy_case() -> None:
    assert PROBES.keys() - HEALTHY_VALUES.keys() == {"capacity_answer"}


def test_healthy_numbers_have_no_finding() -> None:
    record = _record(healthy())

    assert record.verdict == "conforms"
    assert (record.faults, record.blocking, record.unreported) == ((), (), ())
    assert {row.verdict for row in record.probes} == {"conforms"}


# Five and eight trained tokens: a mean over both is 5/13 and 8/13 of what each does alone. A share
# of 1/4 of the movement grows with the root of the step's length: sqrt(1/2)/4 = 0.177, sqrt(5)/4 =
# 0.559, sqrt(3)/4 = 0.433. Halved twice in both factors, (1 - 1/4)^2 = 0.5625 is left of the
# weights with half the decay, (1 - 1/2)^4 = 0.0625 with two steps.
FAULTS = [
    ("sum_over_request", {"first": 5 / 13, "second": -8 / 13}, "mean_instead_of_sum"),
    ("sum_over_request", {"first": 0.5, "second": -0.5}, "mean_over_data"),
    ("sum_over_request", {"first": 1.0, "second": -10.0}, "negative_weights_blown_up"),
    ("custom_loss", {"first": 1.0, "second": -10.0}, "negative_weights_blown_up"),
    ("weights_are_factors", {"ratio": 1.0}, "normalised_by_weight_sum"),
    ("reported_loss", {"ratio": 0.2}, "mean_instead_of_sum"),
    ("reported_loss", {"ratio": 1 / 6}, "normalised_by_weight_sum"),
    ("gradients_accumulate", {"first": 0.0, "second": 1.0}, "gradient_erased_between_chunks"),
    ("forward_adds_nothing", {"nats": 0.5}, "forward_accumulates"),
    ("gradient_cleared", {"left": 1.0}, "gradient_kept_after_step"),
    ("momentum", {"carried": 0.0}, "step_applied_twice"),
    ("learning_rate", {"share": 0.177}, "learning_rate_halved"),
    ("learning_rate", {"share": 0.559}, "mean_instead_of_sum"),
    ("learning_rate", {"share": 0.433}, "normalised_by_weight_sum"),
    ("learning_rate", {"share": 1.0, "shortened": 0.0008}, "learning_rate_1000_times"),
    ("learning_rate", {"share": 0.92, "shortened": 0.0001}, "learning_rate_1000_times"),
    ("gradient_clip", {"share": 1.0}, "gradient_clip_ignored"),
    ("weight_decay", {"left": 1.0}, "weight_decay_ignored"),
    ("weight_decay", {"left": 0.5625}, "learning_rate_halved"),
    ("weight_decay", {"left": 0.0625}, "step_applied_twice"),
    ("replayed_request", {"ratio": 2.0}, "replay_executes_again"),
    ("result_order", {"in_order": None, "reversed": 0.0}, "scrambled_order"),
    ("unweighted_tokens", {"gap": 3.0, "zeros": 1.0}, "zero_logprobs_where_unweighted"),
    ("optimizer_restored", {"resumed": 1.1, "resumed_from_cold": 0.0}, "cold_adam_after_restore"),
    ("optimizer_restored", {"cold": 0.0}, "restore_ignores_weights_only"),
    ("optimizer_restored", {"saved": 1.1, "saved_from_cold": 0.0}, "save_resets_optimizer"),
    ("checkpoint_kinds", {"training": 0.0}, "sampler_overwrites_training"),
    ("checkpoint_kinds", {"sampler": 0.0}, "training_overwrites_sampler"),
    ("published_sampler", {"ratio": 0.33, "gap": 0.67}, "stale_sampler"),
    ("trainer_against_sampler", {"trainer": 1.6, "trainer_shifted": 0.0}, "logprobs_off_by_one"),
    ("trainer_against_sampler", {"trainer": 1.6, "trainer_shifted": 0.04}, "logprobs_off_by_one"),
    ("trainer_against_sampler", {"trainer": 0.03}, "sampler_disagrees_with_trainer"),
    ("scores_of_given_tokens", {"scorer": 1.6, "scorer_shifted": 0.0}, "prompt_logprobs_shifted"),
    ("logprobs_under_temperature", {"gap": 0.5, "slope": 2.0}, "temperature_scaled_logprobs"),
    ("logprobs_under_top_p", {"gap": 0.5, "shift": 0.5}, "top_p_renormalised_logprobs"),
    ("seed", {"same": 0.25}, "ignored_seed"),
    ("seed", {"other": 1.0}, "sampling_is_greedy"),
    ("samples_of_one_request", {"different": 1.0}, "duplicate_samples"),
    ("stop_token", {"included": 0.0}, "stop_token_missing"),
    ("reported_base_model", {"same": 0.0}, "wrong_base_model_report"),
    ("reported_rank", {"same": 0.0}, "wrong_rank_report"),
    ("reported_optimizer", {"known": 0.0}, "lost_optimizer_report"),
]


@pytest.mark.parametrize(("probe", "values", "fault"), FAULTS)
def test_fault_is_named_by_its_numbers(probe: str, values: dict[str, float], fault: str) -> None:
    record = _record(_changed(probe, **values))

    assert record.verdict == "differs"
    row = next(row for row in record.probes if row.probe == probe)
    assert (row.verdict, row.looks_like) == ("differs", fault)
    assert fault in (row.reason or "")


def test_only_what_a_comparison_needs_stops_it() -> None:
    """A clip that does nothing matters where the plan clips; a seed that does nothing never."""
    ignored = _changed("gradient_clip", share=1.0)

    assert _record(ignored).blocking == ()
    assert _record(ignored, needs=NEEDS | {CLIPPING}).blocking == ("gradient_clip",)
    assert _record(_changed("seed", same=0.0), needs=NEEDS | {TEMPERATURE}).blocking == ()


def test_low_precision_of_a_sampler_stops_nothing_and_a_shift_does() -> None:
    noisy = _record(_changed("trainer_against_sampler", trainer=0.03))
    shifted = _record(_changed("trainer_against_sampler", trainer=1.6, trainer_shifted=0.0))

    assert (noisy.verdict, noisy.blocking) == ("differs", ())
    assert shifted.blocking == ("trainer_against_sampler",)


@pytest.mark.parametrize(
    ("trainer", "shifted", "to_scorer", "blocks"),
    [
        (0.02, 2.0, 0.02, False),
        (0.02, 2.0, 0.0, False),
        (0.1, 0.51, 0.1, False),
        (0.1, 0.5, 0.1, True),
        (0.11, 2.0, 0.11, True),
        (4.0, 4.0, 0.0, True),
    ],
    ids=["scorer_s_engine", "trainer_s_engine", "bound", "no_nearer", "too_far", "made_up"],
)
def test_sampler_of_another_engine_stops_nothing_wherever_the_scorer_lies(
    trainer: float, shifted: float, to_scorer: float, blocks: bool
) -> None:
    """Within 0.1 nats, and neighbours' scores more than five times as far away."""
    values = {"trainer": trainer, "trainer_shifted": shifted, "trainer_to_scorer": to_scorer}
    record = _record(_changed("trainer_against_sampler", **values))

    assert record.verdict == "differs"
    assert record.faults == (() if blocks else ("sampler_disagrees_with_trainer",))
    assert bool(record.blocking) is blocks


@pytest.mark.parametrize(
    ("probe", "name"),
    [("result_order", "in_order"), ("unweighted_tokens", "gap"), ("forward_adds_nothing", "nats")],
)
@pytest.mark.parametrize(
    ("gap", "rounding", "verdict"),
    [
        (0.01, 0.0, "conforms"),
        (0.011, 0.0, "differs"),
        (0.011, None, "differs"),
        (0.059, 0.02, "conforms"),
        (0.061, 0.02, "differs"),
        (0.1, 0.5, "conforms"),
        (0.101, 0.5, "differs"),
    ],
)
def test_scores_may_differ_by_three_times_the_rounding_up_to_a_bound(
    probe: str, name: str, gap: float, rounding: float | None, verdict: str
) -> None:
    (row,) = judge([Measurement(probe, {name: gap, "rounding": rounding})])

    assert row.verdict == verdict


def test_gate_fails_with_the_probe_s_name_and_its_numbers() -> None:
    gate = _record(_changed("custom_loss", second=-10.0)).to_gate()

    assert gate.status == "failed"
    assert gate.reasons == (
        "custom_loss: expected first 1, second -1, observed first 0.992, second -10, "
        "unexplained 0.002, noise 0.004; looks like negative_weights_blown_up",
    )
    assert _record(healthy()).to_gate().status == "passed"


@pytest.mark.parametrize(
    ("noise", "verdict"), [(0.049, "differs"), (0.05, "differs"), (0.051, "cannot_tell")]
)
def test_noise_above_the_bound_tells_nothing(noise: float, verdict: str) -> None:
    """What does not repeat is neither a finding nor its absence."""
    (row,) = judge(
        [Measurement("sum_over_request", {"first": 0.5, "second": -0.5, "noise": noise})]
    )

    assert row.verdict == verdict


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(0.226, "conforms"), (0.274, "conforms"), (0.22, "differs"), (0.28, "differs")],
)
def test_step_of_another_length_differs_beyond_a_tenth(share: float, verdict: str) -> None:
    (row,) = judge([Measurement("learning_rate", {"share": share})])

    assert row.verdict == verdict


def test_length_of_a_step_cannot_be_told_where_nothing_is_clipped() -> None:
    rows = judge(
        [Measurement("learning_rate", {"share": 1.0}), Measurement("gradient_clip", {"share": 1.0})]
    )

    assert [row.verdict for row in rows] == ["cannot_tell", "differs"]


def test_step_that_only_a_far_shorter_clip_shortens_is_far_too_long() -> None:
    """The clip works, and was taken for a long one because the steps are; ignored, both are 1."""
    too_long, clipped = judge(
        [
            Measurement("learning_rate", {"share": 1.0, "shortened": 0.0008}),
            Measurement("gradient_clip", {"share": 1.0, "shortened": 0.0008}),
        ]
    )
    ignored = judge(
        [
            Measurement("learning_rate", {"share": 1.0, "shortened": 0.99}),
            Measurement("gradient_clip", {"share": 1.0, "shortened": 0.99}),
        ],
        needs=NEEDS | {CLIPPING},
    )

    assert (too_long.verdict, too_long.blocking) == ("differs", True)
    assert too_long.looks_like == "learning_rate_1000_times"
    assert clipped.verdict == "conforms"
    assert [row.verdict for row in ignored] == ["cannot_tell", "differs"]
    assert ignored[1].looks_like == "gradient_clip_ignored"


def test_refused_probe_cannot_tell_unless_a_comparison_needs_it_itself() -> None:
    refused = Measurement("seed", refused="HTTP 400: no seeds here")
    unusable = Measurement(
        "custom_loss",
        {"loss_reported": 0.0},
        refused="the service returned no metric loss:sum",
        unusable=True,
    )
    record = _record([refused, unusable])

    assert [row.verdict for row in record.probes] == ["differs", "cannot_tell"]
    assert record.blocking == ("custom_loss",)
    assert record.faults == ("no_loss_metric",)


def test_silence_is_no_difference_and_is_listed() -> None:
    silent = [
        Measurement("reported_rank", {"same": None}, silent=True),
        Measurement("reported_loss", {"ratio": None}, silent=True),
        Measurement("reported_checkpoint", {"known": 0.0}, silent=True),
    ]
    record = _record(silent)

    assert {row.verdict for row in record.probes} == {"cannot_tell"}
    assert record.unreported == ("checkpoint_details", "lora_rank", "loss")
    assert record.blocking == ()


def test_optimizer_that_the_client_does_not_read_is_no_difference() -> None:
    (row,) = judge([Measurement("reported_optimizer", {"known": 0.0, "asked": 0.0}, silent=True)])

    assert row.verdict == "cannot_tell"


@pytest.mark.parametrize(
    ("values", "verdict", "fault"),
    [
        ({"refused": 1.0, "recognised": 1.0, "room_again": 1.0}, "conforms", None),
        ({"refused": 0.0, "recognised": None, "room_again": None}, "cannot_tell", None),
        (
            {"refused": 1.0, "recognised": 0.0, "room_again": 1.0},
            "differs",
            "capacity_answer_unknown",
        ),
        (
            {"refused": 1.0, "recognised": 1.0, "room_again": 0.0},
            "differs",
            "release_frees_nothing",
        ),
    ],
)
def test_capacity_answer_is_judged_only_where_there_was_one(
    values: dict[str, float | None], verdict: str, fault: str | None
) -> None:
    (row,) = judge([Measurement("capacity_answer", values)])

    assert (row.verdict, row.looks_like) == (verdict, fault)


def test_missing_evidence_is_accepted_only_where_the_service_is_silent() -> None:
    assert refusal_to_accept("restoration", {"optimizer"}) is None
    assert refusal_to_accept("correctness", {"builtin_loss"}) is None
    assert refusal_to_accept("activation", ()) is None
    assert "the service reports builtin_loss, loss" in (
        refusal_to_accept("correctness", {"optimizer"}) or ""
    )


def test_one_mistake_is_not_named_twice() -> None:
    """A loss divided by its weights' sum also blows negative weights up."""
    measured = _changed("weights_are_factors", ratio=1.0)
    both = [
        dataclasses.replace(one, values={"first": 0.5, "second": -30.0})
        if one.probe == "sum_over_request"
        else one
        for one in measured
    ]

    assert _record(both).faults == ("normalised_by_weight_sum",)


def test_infinite_numbers_are_written_as_missing_and_differ() -> None:
    record = _record(_changed("custom_loss", first=float("inf"), second=float("nan")))

    row = next(row for row in record.probes if row.probe == "custom_loss")
    assert (row.observed["first"], row.verdict) == (None, "differs")
    assert loads_strict(record.to_bytes(), where="record")


def test_record_is_read_back_and_another_document_refused() -> None:
    record = _record(healthy(), seconds=1.5)

    assert ConformanceRecord.parse(record.to_bytes()) == record
    with pytest.raises(InputError, match="scope"):
        ConformanceRecord.parse({**record.to_record(), "scope": "half"})
    with pytest.raises(InputError, match="surprise"):
        ConformanceRecord.parse({**record.to_record(), "surprise": 1})


@pytest.mark.parametrize("probes", [["unheard"], ["seed", "seed"]])
def test_unknown_or_doubled_probe_is_refused(probes: list[str]) -> None:
    with pytest.raises(InputError, match="probe"):
        judge([Measurement(probe, {}) for probe in probes])
