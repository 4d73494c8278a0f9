"""What a service is asked by the conformance kit, what a right answer is, and what wrong ones mean.

Each probe has measured numbers. A wrong answer is compared with those that known mistakes would
give, so that the record can say which mistake it looks like. The numbers are explained at each
probe; what "movement" means is in `tasks.conformance_bench`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Values = Mapping[str, float | None]

FIRST_TOKENS, SECOND_TOKENS = 5, 8
"""Trained tokens of the two examples that the training probes use."""
FIRST_WEIGHTS, SECOND_WEIGHTS = 3.0, 4.0
"""Sums of their weights."""

STEP_TOLERANCE = 0.1
"""Of a movement in units of another one: both are small, so that they add up nearly linearly."""
NATS_TOLERANCE = 0.01
"""Of log-probabilities of the same tokens, mean absolute difference, where scores repeat."""
TIMES_ROUNDING = 3.0
"""Scores of the same tokens are as good as equal within so many times the rounding that was
measured, where that is more than `NATS_TOLERANCE`."""
ENGINES_NATS = 0.1
"""What two engines of one model differ by at most, mean absolute difference, nats. Measured between
two implementations in bfloat16: 0.01 to 0.04. No rounding widens a bound beyond it."""
_MUCH_FURTHER = 5.0
"""Scores of another token are so many times further away than another engine's of the same one."""
LARGEST_NOISE = 0.05
"""Movements that do not repeat within this share of themselves tell nothing."""
CLIP_SHARE = 0.25
"""To which share of its length, as it should be, the gradient is shortened."""
SHORTER_CLIP = 1e-4
"""So many times as long is the clip that is tried where the first one shortened nothing."""
SHORTENED = 0.5
"""Share of its movement below which a step has been shortened by that clip."""
DECAY_PER_STEP = 0.5
"""Learning rate times weight decay of the decay probe."""

TRAINING, SAMPLING, RESTORE = "training", "sampling", "restore"
TEMPERATURE, TOP_P = "temperature", "top_p"
CLIPPING, DECAY = "grad_clip_norm", "weight_decay"
NEEDS = frozenset({TRAINING, SAMPLING, RESTORE})
"""What every comparison relies on; the others only where its settings use them."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A known mistake and the numbers it gives.

    Attributes:
        fault: its name; that of the embedded service's fault where it has one.
        fits: whether the measured numbers are those of this mistake.
        blocks: whether a comparison that needs the probe must not go on.
    """

    fault: str
    fits: Callable[[Values], bool]
    blocks: bool = True


@dataclass(frozen=True, slots=True)
class Probe:
    """One question to a service.

    Attributes:
        probe: its name.
        asks: the question.
        expected: the right answer, in words.
        conforms: whether the numbers are a right answer; None where they cannot tell.
        explanations: wrong answers that are known, the first that fits counts.
        needed_by: parts of a comparison that rely on it; empty for none.
        short: whether a comparison asks it before it trains.
    """

    probe: str
    asks: str
    expected: str
    conforms: Callable[[Values], bool | None]
    explanations: tuple[Explanation, ...] = ()
    needed_by: tuple[str, ...] = ()
    short: bool = True


def _near(value: float | None, target: float, tolerance: float = STEP_TOLERANCE) -> bool:
    return value is not None and abs(value - target) <= tolerance * max(1.0, abs(target))


def _close(value: float | None, target: float) -> bool:
    """Whether a share is another one, within a tenth of it."""
    return value is not None and abs(value - target) <= 0.1 * abs(target)


def _below(value: float | None, bound: float) -> bool:
    return value is not None and value <= bound


def _above(value: float | None, bound: float) -> bool:
    return value is not None and value > bound


def nats_bound(values: Values) -> float:
    """Difference up to which log-probabilities of the same tokens count as equal, nats.

    Args:
        values: of a probe; ``rounding`` is the difference of two scorings that should be equal
            whatever is asked, where the probe has measured it.
    """
    rounding = values.get("rounding") or 0.0
    return max(NATS_TOLERANCE, min(TIMES_ROUNDING * rounding, ENGINES_NATS))


def _same_scores(name: str) -> Callable[[Values], bool]:
    """Whether a gap between log-probabilities of the same tokens is no more than rounding."""
    return lambda v: _below(v.get(name), nats_bound(v))


def _other_engine(values: Values, own: str, other: str) -> bool:
    """Whether scores are those of the same tokens by another engine of the same model.

    Args:
        values: the measured numbers.
        own: name of the gap to the scores of the same tokens.
        other: name of the gap to those of their neighbours.
    """
    gap = values.get(own)
    return _below(gap, ENGINES_NATS) and _above(values.get(other), _MUCH_FURTHER * (gap or 0.0))


def _pair(first: float, second: float) -> Callable[[Values], bool]:
    """Whether both examples moved the model by these multiples of what each does alone."""
    return lambda v: _near(v.get("first"), first) and _near(v.get("second"), second)


_TOKENS = FIRST_TOKENS + SECOND_TOKENS
_MEANS = (
    Explanation("mean_instead_of_sum", _pair(FIRST_TOKENS / _TOKENS, -SECOND_TOKENS / _TOKENS)),
    Explanation("mean_over_data", _pair(0.5, -0.5)),
    Explanation(
        "negative_weights_blown_up",
        lambda v: _above(v.get("first"), 0.0) and _below(v.get("second"), -1.5),
    ),
)


def _equal_movement(values: Values) -> bool:
    return _near(values.get("ratio"), 1.0) and _below(values.get("unexplained"), STEP_TOLERANCE)


def _share_of_clip(rate: float) -> float:
    """What is left of a shortened movement if steps are `rate` times as long as asked for."""
    return CLIP_SHARE * math.sqrt(rate)


def _is_far_too_long(values: Values) -> bool:
    """Whether a gradient that was to be shortened was not, but is by a much shorter clip.

    The clip has an effect then, and the gradient is shorter than the clip was meant to be: it was
    taken for longer because steps are at least 13 times as long as asked for.
    """
    shortened = values.get("shortened")
    return _near(values.get("share"), 1.0) and _below(shortened, SHORTENED)


def _is_as_long(values: Values) -> bool | None:
    """Whether steps are as long as asked for; None where no clip has any effect."""
    if _is_far_too_long(values):
        return False
    if _near(values.get("share"), 1.0):
        return None
    return _close(values.get("share"), _share_of_clip(1.0))


def _clips(values: Values) -> bool | None:
    if values.get("share") is None:
        return None
    return not _near(values.get("share"), 1.0) or _is_far_too_long(values)


_TRAINING_PROBES = (
    Probe(
        "repeatable",
        "Does half a step move the model by half?",
        "gap 0",
        lambda v: True if _below(v.get("gap"), LARGEST_NOISE) else None,
    ),
    Probe(
        "result_order",
        "Do results come back in the order of the examples, each of its length?",
        "as when each example is sent alone",
        _same_scores("in_order"),
        (Explanation("scrambled_order", _same_scores("reversed")),),
        (TRAINING,),
    ),
    Probe(
        "unweighted_tokens",
        "Are log-probabilities of tokens with weight 0 true ones?",
        "the same as without weights",
        _same_scores("gap"),
        (Explanation("zero_logprobs_where_unweighted", lambda v: _above(v.get("zeros"), 0.9)),),
        (TRAINING,),
    ),
    Probe(
        "sum_over_request",
        "Is the loss of a request a sum over its tokens, negative weights as they are?",
        "first 1, second -1: each example moves the model as it does alone",
        _pair(1.0, -1.0),
        _MEANS,
        (TRAINING,),
        short=False,
    ),
    Probe(
        "weights_are_factors",
        "Do doubled weights double the gradient?",
        "2",
        lambda v: _near(v.get("ratio"), 2.0),
        (Explanation("normalised_by_weight_sum", lambda v: _near(v.get("ratio"), 1.0)),),
        (TRAINING,),
    ),
    Probe(
        "gradients_accumulate",
        "Do two requests before one step add their gradients?",
        "first 1, second 1",
        _pair(1.0, 1.0),
        (Explanation("gradient_erased_between_chunks", _pair(0.0, 1.0)),),
        (TRAINING,),
    ),
    Probe(
        "forward_adds_nothing",
        "Does a forward alone leave the gradient as it is?",
        "0 nats: a step after nothing but forwards moves nothing",
        _same_scores("nats"),
        (Explanation("forward_accumulates", lambda v: _above(v.get("nats"), nats_bound(v))),),
        (TRAINING,),
    ),
    Probe(
        "gradient_cleared",
        "Does a step use the gradient up?",
        "0: a second step without momentum moves nothing",
        lambda v: _near(v.get("left"), 0.0),
        (Explanation("gradient_kept_after_step", lambda v: _near(v.get("left"), 1.0)),),
        (TRAINING,),
    ),
    Probe(
        "momentum",
        "Is a step applied once, so that its momentum is there for the next one?",
        "1: what Adam's first moment adds in a step without a gradient",
        lambda v: _near(v.get("carried"), 1.0),
        (Explanation("step_applied_twice", lambda v: _near(v.get("carried"), 0.0)),),
        (TRAINING,),
    ),
    Probe(
        "custom_loss",
        "Does a loss computed on the client move the model as its gradient says?",
        "first 1, second -1",
        _pair(1.0, -1.0),
        (
            *_MEANS,
            Explanation("no_loss_metric", lambda v: v.get("loss_reported") == 0.0),
        ),
        (TRAINING,),
    ),
    Probe(
        "custom_equals_builtin",
        "Is a custom importance-sampling loss the built-in one, for both advantage signs?",
        "ratio 1, nothing unexplained",
        _equal_movement,
        (),
        (TRAINING,),
        short=False,
    ),
    Probe(
        "reported_loss",
        "Is the reported loss the weighted sum of the returned log-probabilities?",
        "1 (their ratio)",
        lambda v: None if v.get("ratio") is None else _near(v.get("ratio"), 1.0),
        (
            Explanation(
                "mean_instead_of_sum", lambda v: _close(v.get("ratio"), 1.0 / FIRST_TOKENS)
            ),
            Explanation(
                "normalised_by_weight_sum",
                lambda v: _close(v.get("ratio"), 1.0 / (2.0 * FIRST_WEIGHTS)),
            ),
        ),
    ),
    Probe(
        "learning_rate",
        "Is one step as long as learning rate, epsilon and gradient say?",
        f"{CLIP_SHARE:g}: a gradient shortened to that share moves the model by that share",
        _is_as_long,
        (
            Explanation("learning_rate_1000_times", _is_far_too_long),
            Explanation(
                "learning_rate_halved", lambda v: _close(v.get("share"), _share_of_clip(0.5))
            ),
            Explanation(
                "step_applied_twice", lambda v: _close(v.get("share"), _share_of_clip(2.0))
            ),
            Explanation(
                "normalised_by_weight_sum",
                lambda v: _close(v.get("share"), _share_of_clip(FIRST_WEIGHTS)),
            ),
            Explanation(
                "mean_instead_of_sum",
                lambda v: _close(v.get("share"), _share_of_clip(FIRST_TOKENS)),
            ),
        ),
        (TRAINING,),
    ),
    Probe(
        "gradient_clip",
        "Does grad_clip_norm shorten a long gradient?",
        "below 1: the shortened step is shorter",
        _clips,
        (Explanation("gradient_clip_ignored", lambda v: _near(v.get("share"), 1.0)),),
        (CLIPPING,),
    ),
    Probe(
        "weight_decay",
        "Does decoupled weight decay shrink the weights by learning rate times decay?",
        f"{(1.0 - DECAY_PER_STEP) ** 2:g}: both factors of the adapter are halved",
        lambda v: (
            None if v.get("left") is None else _near(v.get("left"), (1.0 - DECAY_PER_STEP) ** 2)
        ),
        (
            Explanation("weight_decay_ignored", lambda v: _near(v.get("left"), 1.0)),
            Explanation(
                "learning_rate_halved",
                lambda v: _near(v.get("left"), (1.0 - DECAY_PER_STEP / 2) ** 2),
            ),
            Explanation(
                "step_applied_twice", lambda v: _near(v.get("left"), (1.0 - DECAY_PER_STEP) ** 4)
            ),
        ),
        (DECAY,),
        short=False,
    ),
    Probe(
        "replayed_request",
        "Is a request that arrives twice (its answer was lost) applied once?",
        "1: the movement of a single one",
        lambda v: _near(v.get("ratio"), 1.0),
        (Explanation("replay_executes_again", lambda v: _above(v.get("ratio"), 1.3)),),
        (TRAINING,),
    ),
)


def _restored(values: Values) -> bool:
    same = _below(values.get("resumed"), STEP_TOLERANCE) and _below(
        values.get("saved"), STEP_TOLERANCE
    )
    return same and _above(values.get("cold"), STEP_TOLERANCE)


def _is_stale(values: Values) -> bool:
    return _above(values.get("gap"), 0.3) and not _near(values.get("ratio"), 1.0)


_STATE_PROBES = (
    Probe(
        "optimizer_restored",
        "Does a client restored with its optimizer take the next step as the live one does?",
        "resumed 0, saved 0, cold above 0: differences from a client that was never saved",
        _restored,
        (
            Explanation(
                "save_resets_optimizer",
                lambda v: (
                    _above(v.get("saved"), STEP_TOLERANCE)
                    and _below(v.get("saved_from_cold"), STEP_TOLERANCE)
                ),
            ),
            Explanation(
                "cold_adam_after_restore",
                lambda v: (
                    _above(v.get("resumed"), STEP_TOLERANCE)
                    and _below(v.get("resumed_from_cold"), STEP_TOLERANCE)
                ),
            ),
            Explanation(
                "restore_ignores_weights_only",
                lambda v: (
                    _below(v.get("resumed"), STEP_TOLERANCE)
                    and _below(v.get("cold"), STEP_TOLERANCE)
                ),
                blocks=False,
            ),
        ),
        (RESTORE,),
    ),
    Probe(
        "checkpoint_kinds",
        "Do a training and a sampler checkpoint of one name live side by side?",
        "training 1, sampler 1: both can be opened",
        lambda v: v.get("training") == 1.0 and v.get("sampler") == 1.0,
        (
            Explanation("sampler_overwrites_training", lambda v: v.get("training") == 0.0),
            Explanation("training_overwrites_sampler", lambda v: v.get("sampler") == 0.0),
        ),
        (RESTORE,),
        short=False,
    ),
    Probe(
        "published_sampler",
        "Does a published sampler have the weights of that moment?",
        "ratio 1, gap 0: it moves between two publications as the trainer does",
        lambda v: _near(v.get("ratio"), 1.0) and _below(v.get("gap"), STEP_TOLERANCE),
        (Explanation("stale_sampler", _is_stale),),
        (SAMPLING,),
    ),
)


def _is_shifted(values: Values) -> bool:
    return _below(values.get("trainer_shifted"), NATS_TOLERANCE) or _other_engine(
        values, "trainer_shifted", "trainer"
    )


def _is_another_engine(values: Values) -> bool:
    """Whether sampler and trainer score the same tokens alike but for rounding.

    Where the scorer lies does not matter: it may be the sampler's engine or the trainer's.
    """
    return _other_engine(values, "trainer", "trainer_shifted")


def _scorers_agree(values: Values) -> bool:
    return _below(values.get("trainer_to_scorer"), NATS_TOLERANCE)


_SAMPLING_PROBES = (
    Probe(
        "trainer_against_sampler",
        "Does the trainer give the log-probabilities that came with a sample?",
        "0 nats",
        lambda v: _below(v.get("trainer"), NATS_TOLERANCE),
        (
            Explanation("logprobs_off_by_one", _is_shifted),
            Explanation("sampler_disagrees_with_trainer", _is_another_engine, blocks=False),
        ),
        (TRAINING,),
    ),
    Probe(
        "scores_of_given_tokens",
        "Does scoring given tokens give the log-probabilities that came with the sample?",
        "0 nats",
        lambda v: _below(v.get("scorer"), NATS_TOLERANCE),
        (
            Explanation(
                "prompt_logprobs_shifted",
                lambda v: _below(v.get("scorer_shifted"), NATS_TOLERANCE),
            ),
            Explanation("sampler_disagrees_with_trainer", _scorers_agree),
        ),
    ),
    Probe(
        "logprobs_under_temperature",
        "What do log-probabilities of samples at temperature 0.5 mean?",
        "those of the model itself, as at temperature 1: 0 nats",
        lambda v: _no_further(v, "gap"),
        (
            Explanation(
                "temperature_scaled_logprobs",
                lambda v: v.get("slope") is None or _above(v.get("slope"), 1.5),
            ),
        ),
        (TEMPERATURE,),
        short=False,
    ),
    Probe(
        "logprobs_under_top_p",
        "What do log-probabilities of samples with top_p 0.5 mean?",
        "those of the model itself, as without top_p: 0 nats",
        lambda v: _no_further(v, "gap"),
        (Explanation("top_p_renormalised_logprobs", lambda v: _above(v.get("shift"), 0.0)),),
        (TOP_P,),
        short=False,
    ),
    Probe(
        "seed",
        "Does a seed decide a sample?",
        "same 1, other 0: shares of samples that are equal",
        lambda v: v.get("same") == 1.0 and v.get("other") != 1.0,
        (
            Explanation("ignored_seed", lambda v: _below(v.get("same"), 0.99)),
            Explanation("sampling_is_greedy", lambda v: v.get("other") == 1.0),
        ),
        short=False,
    ),
    Probe(
        "samples_of_one_request",
        "Do the samples of one request differ?",
        "above 1 different ones",
        lambda v: _above(v.get("different"), 1.0),
        (Explanation("duplicate_samples", lambda v: v.get("different") == 1.0),),
        short=False,
    ),
    Probe(
        "stop_token",
        "Is the token that ended a sample part of it?",
        "1",
        lambda v: None if v.get("stopped") != 1.0 else v.get("included") == 1.0,
        (Explanation("stop_token_missing", lambda v: v.get("included") == 0.0),),
        short=False,
    ),
)


def _no_further(values: Values, name: str) -> bool | None:
    """Whether a gap is no larger than that of plain samples."""
    plain, gap = values.get("plain"), values.get(name)
    return None if plain is None or gap is None else gap <= 1.5 * plain + NATS_TOLERANCE


_REPORT_PROBES = (
    Probe(
        "reported_base_model",
        "Is the model that was asked for reported?",
        "1",
        lambda v: None if v.get("same") is None else v.get("same") == 1.0,
        (Explanation("wrong_base_model_report", lambda v: v.get("same") == 0.0),),
        (TRAINING,),
    ),
    Probe(
        "reported_rank",
        "Is the adapter's rank reported?",
        "1",
        lambda v: None if v.get("same") is None else v.get("same") == 1.0,
        (Explanation("wrong_rank_report", lambda v: v.get("same") == 0.0),),
        (TRAINING,),
    ),
    Probe(
        "reported_optimizer",
        "Is the optimizer reported?",
        "1",
        lambda v: None if v.get("asked") == 0.0 else v.get("known") == 1.0,
        (Explanation("lost_optimizer_report", lambda v: v.get("known") == 0.0),),
    ),
    Probe(
        "reported_optimizer_settings",
        "Are the optimizer's settings and step count reported?",
        "1",
        lambda v: True if v.get("known") == 1.0 else None,
    ),
    Probe(
        "reported_checkpoint",
        "Does the service say what a checkpoint holds?",
        "1",
        lambda v: True if v.get("known") == 1.0 else None,
    ),
    Probe(
        "capacity_answer",
        "Is a refusal for lack of room recognisable, and is there room again after a release?",
        "recognised 1, room_again 1",
        lambda v: (
            None
            if v.get("refused") != 1.0
            else v.get("recognised") == 1.0 and v.get("room_again") == 1.0
        ),
        (
            Explanation("capacity_answer_unknown", lambda v: v.get("recognised") == 0.0),
            Explanation("release_frees_nothing", lambda v: v.get("room_again") == 0.0),
        ),
        short=False,
    ),
)

PROBES: Mapping[str, Probe] = {
    probe.probe: probe
    for probe in (*_TRAINING_PROBES, *_STATE_PROBES, *_SAMPLING_PROBES, *_REPORT_PROBES)
}
"""Every probe by name, in the order of the table."""

EXPLAINS_AWAY: Mapping[str, frozenset[str]] = {
    "normalised_by_weight_sum": frozenset(
        {"negative_weights_blown_up", "mean_over_data", "mean_instead_of_sum"}
    ),
    "sampler_disagrees_with_trainer": frozenset(
        {"temperature_scaled_logprobs", "top_p_renormalised_logprobs"}
    ),
}
"""A mistake, and those that its wrong answers can also look like."""
