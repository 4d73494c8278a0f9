"""Measured numbers of a service without a fault, probe by probe."""

from __future__ import annotations

from evidence.conformance import Measurement

HEALTHY_VALUES: dict[str, dict[str, float | None]] = {
    "repeatable": {"gap": 0.004, "target": 0.001},
    "result_order": {"in_order": 0.0, "reversed": None, "rounding": 0.0},
    "unweighted_tokens": {"gap": 0.0, "zeros": 0.0, "rounding": 0.0},
    "sum_over_request": {"first": 0.995, "second": -1.0, "unexplained": 0.001, "noise": 0.004},
    "weights_are_factors": {"ratio": 1.976, "unexplained": 0.007, "noise": 0.004},
    "gradients_accumulate": {"first": 0.983, "second": 0.998, "unexplained": 0.01, "noise": 0.004},
    "forward_adds_nothing": {"nats": 0.0, "rounding": 0.0},
    "gradient_cleared": {"left": 0.0, "noise": 0.004},
    "momentum": {"carried": 0.975, "noise": 0.004},
    "custom_loss": {"first": 0.992, "second": -1.0, "unexplained": 0.002, "noise": 0.004},
    "custom_equals_builtin": {"ratio": 0.998, "unexplained": 0.003, "noise": 0.004},
    "reported_loss": {"ratio": 1.0},
    "learning_rate": {"share": 0.245, "noise": 0.004},
    "gradient_clip": {"share": 0.245, "noise": 0.004},
    "weight_decay": {"left": 0.25, "noise": 0.004},
    "replayed_request": {"ratio": 0.998, "repeats": 2.0, "refused": 0.0, "noise": 0.004},
    "optimizer_restored": {
        "resumed": 0.0,
        "saved": 0.03,
        "saved_from_cold": 5.0,
        "cold": 1.2,
        "resumed_from_cold": 1.15,
        "noise": 0.004,
    },
    "checkpoint_kinds": {"training": 1.0, "sampler": 1.0},
    "published_sampler": {"ratio": 1.0, "gap": 0.0, "noise": 0.004},
    "trainer_against_sampler": {"trainer": 0.0, "trainer_shifted": 1.6, "trainer_to_scorer": 0.0},
    "scores_of_given_tokens": {"scorer": 0.0, "scorer_shifted": 1.6, "trainer_to_scorer": 0.0},
    "logprobs_under_temperature": {"plain": 0.0, "gap": 0.0, "slope": 1.0},
    "logprobs_under_top_p": {"plain": 0.0, "gap": 0.0, "shift": 0.0},
    "seed": {"same": 1.0, "other": 0.0},
    "samples_of_one_request": {"different": 4.0, "samples": 4.0},
    "stop_token": {"stopped": 1.0, "included": 1.0},
    "reported_base_model": {"same": 1.0},
    "reported_rank": {"same": 1.0},
    "reported_optimizer": {"known": 1.0, "asked": 1.0},
    "reported_optimizer_settings": {"known": 1.0},
    "reported_checkpoint": {"known": 1.0},
}


def healthy() -> list[Measurement]:
    """What every probe but the one about capacity measures without a fault."""
    return [Measurement(probe, dict(values)) for probe, values in HEALTHY_VALUES.items()]
