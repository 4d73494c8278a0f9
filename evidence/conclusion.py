"""Why a mask was active or not: one conclusion from measured findings, in a fixed order.

A later cause is looked at only when the earlier ones are excluded: changed files explain any
figure, a wrong decision explains an inactive mask, and only when files, decisions, reference and
log-probabilities hold does an inactive regime mean something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from evidence.diagnostic_rules import FIXED_RULES

Category = Literal[
    "active",
    "code_or_instrumentation_defect",
    "wrong_reference_or_variant",
    "legitimately_inactive_regime",
    "missing_evidence",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

MATERIAL_NATS = 0.1
"""0.9 quantile of |trainer - sampler| with equal weights beyond which they do not agree. Services
that sample and train in different precisions differ by 0.01 to 0.05."""
STALE_NATS = 0.001
STALE_FACTOR = 10.0
"""A later batch differs this much more than the first: its sampler had other weights."""
SHIFT_SHARE = 0.1
"""What is left of a difference when one side is moved by one token, if that is its cause."""
BFLOAT16_SHARE = 0.99
UNMOVED_NATS = 1e-6
ROUNDING_NATS = 1e-5
"""Two sides with the same weights in the same precision differ less than this."""
SEEN_FACTOR = 1.5
"""Training is seen where sampler and trainer differ this much more after an update than before."""
LOSS_RTOL, GRADIENT_RTOL = 1e-4, 1e-6
RATIO_RTOL = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was measured, as plain numbers; None where it was not.

    Attributes:
        missing: what is not there, one sentence each.
        broken: what does not agree among the files, one sentence each.
        forced: cases run and cases failed.
        replay: figures of the replay against the reference, worst of all updates.
        variants: rules whose decisions are those recorded.
        reach: whether anything can activate the registered rule, by sign.
        registered: the registered loss.
        learning_rate: of the optimizer, largest of all updates.
        temperature: of sampling.
        first_gap: sampler against trainer with equal weights, on the first batch.
        later_gap: the same on later batches; None where there is one batch.
        rescored: returned, rescored and trainer's values of the sentinels, before any update.
        movement_nats: largest change of a log-probability that training brought about.
        within_batches: where no token was scored twice: sampler against trainer ``before`` a
            batch's first update and ``after`` it, on different tokens.
        rewards: completions, truncated ones, groups, groups whose rewards differ.
        figures: pooled figures under the names of `updates`' columns.
        rules: what the four rules say, with their rows.
        scope: which loss calls the figures pool.
    """

    missing: Sequence[str] = ()
    broken: Sequence[str] = ()
    forced: Mapping[str, int] = field(default_factory=dict)
    replay: Mapping[str, Any] = field(default_factory=dict)
    variants: Sequence[str] = ()
    reach: Mapping[str, bool] = field(default_factory=dict)
    registered: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    temperature: float | None = None
    first_gap: Mapping[str, Any] | None = None
    later_gap: Mapping[str, Any] | None = None
    rescored: Mapping[str, Any] | None = None
    movement_nats: float | None = None
    within_batches: Mapping[str, Any] | None = None
    rewards: Mapping[str, int] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, Any] = field(default_factory=dict)
    scope: str = ""

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return {
            name: list(value) if isinstance(value, list | tuple) else _plain(value)
            for name, value in ((name, getattr(self, name)) for name in self.__slots__)
        }


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the findings amount to.

    Attributes:
        category: which of the kinds of explanation.
        cause: the explanation's name.
        sentence: it in words, with its figures.
        figures: the numbers that say so.
        next_action: the cheapest thing to do about it.
    """

    category: Category
    cause: str
    sentence: str
    figures: Mapping[str, Any]
    next_action: str

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return {
            "category": self.category,
            "cause": self.cause,
            "sentence": self.sentence,
            "figures": dict(self.figures),
            "next_action": self.next_action,
        }


def conclude(findings: Findings) -> Conclusion:
    """Return the first explanation that the findings support."""
    for look in _ORDER:
        found = look(findings)
        if found is not None:
            return found
    return _inactive_by_drift(findings)


# ---- files, code, reference ---------------------------------------------------------------------


def _broken(findings: Findings) -> Conclusion | None:
    if not findings.broken:
        return None
    return Conclusion(
        "code_or_instrumentation_defect",
        "records_disagree",
        f"Files of the run contradict each other: {findings.broken[0]}",
        {"contradictions": list(findings.broken)},
        "Find out what changed the files, or what wrote them; no figure of this run counts.",
    )


def _missing(findings: Findings) -> Conclusion | None:
    if not findings.missing:
        return None
    return Conclusion(
        "missing_evidence",
        "incomplete_records",
        f"Not enough was recorded to say anything: {findings.missing[0]}",
        {"missing": list(findings.missing)},
        "Record what is missing and repeat the smallest run that would show it.",
    )


def _forced(findings: Findings) -> Conclusion | None:
    failed = findings.forced.get("failed", 0)
    if not failed:
        return None
    return Conclusion(
        "code_or_instrumentation_defect",
        "forced_case_failed",
        f"{failed} of {findings.forced.get('cases')} tokens whose decision is known beforehand "
        "were decided otherwise.",
        dict(findings.forced),
        "Correct the loss; its decisions on this run do not count.",
    )


def _replay(findings: Findings) -> Conclusion | None:
    replay = findings.replay
    different = replay.get("decisions_different", 0)
    if different:
        return _other_rule(findings, different)
    wrong = [
        name
        for name, limit in (
            ("loss_relative_error", LOSS_RTOL),
            ("gradient_relative_error", GRADIENT_RTOL),
            ("ratio_relative_error", RATIO_RTOL),
        )
        if replay.get(name) is not None and replay[name] > limit
    ]
    wrong += [name for name in ("removed_different",) if replay.get(name)]
    wrong += [f"count {name}" for name in replay.get("counts_different", ())]
    if not wrong:
        return None
    return Conclusion(
        "code_or_instrumentation_defect",
        "figures_not_reproduced",
        f"The recorded tokens do not give what was recorded about them: {', '.join(wrong)}.",
        dict(replay),
        "Correct the code that computes or records these figures.",
    )


def _other_rule(findings: Findings, different: int) -> Conclusion:
    others = [name for name in findings.variants if name != "as registered"]
    tokens = findings.replay.get("loss_tokens")
    figures = {"decisions_different": different, "loss_tokens": tokens, "variants": others}
    if not others:
        return Conclusion(
            "code_or_instrumentation_defect",
            "decisions_not_reproduced",
            f"{different} of {tokens} recorded decisions follow neither the registered rule nor "
            "any known variant of it.",
            figures,
            "Compare the executed loss with the registered one, token by token.",
        )
    thousand = "delta times 1000" in others
    return Conclusion(
        "wrong_reference_or_variant",
        "delta_too_large" if thousand else "another_variant",
        f"{different} of {tokens} recorded decisions are not those of the registered rule, and "
        f"all of them are those of: {', '.join(others)}.",
        figures,
        "Register the rule that is meant, and train with that one.",
    )


def _out_of_reach(findings: Findings) -> Conclusion | None:
    reach = findings.reach
    if not reach or all(reach.values()):
        return None
    signs = [sign for sign, reached in reach.items() if not reached]
    loss = findings.registered
    thresholds = {name: loss.get(name) for name in ("divergence", "delta_low", "delta_high")}
    return Conclusion(
        "wrong_reference_or_variant",
        "delta_too_large",
        f"No pair of probabilities can move beyond the registered threshold ({thresholds}) with "
        f"{' or '.join(signs)} advantage, so the mask cannot fire, whatever is trained.",
        {
            **thresholds,
            "reach": dict(reach),
            "largest_drift": findings.figures.get("drift_abs_max"),
        },
        "Check the threshold against its source; it may be off by a power of ten.",
    )


# ---- log-probabilities --------------------------------------------------------------------------


def _gap_of(findings: Findings) -> tuple[str, Mapping[str, Any]] | None:
    """The place where sampler and trainer, with equal weights, are furthest apart."""
    places = [("first batch", findings.first_gap), ("later batches", findings.later_gap)]
    known = [(name, gap) for name, gap in places if gap is not None]
    return max(known, key=lambda entry: entry[1]["nats_q90"]) if known else None


def _off_by_one(findings: Findings) -> Conclusion | None:
    found = _gap_of(findings)
    if found is None or found[1]["nats_q90"] < STALE_NATS:
        return None
    place, gap = found
    shifts = {name: value for name, value in gap["shift_nats"].items() if value is not None}
    if "+0" not in shifts or len(shifts) < 2:
        return None
    best = min(shifts, key=lambda name: shifts[name])
    if best == "+0" or shifts[best] > SHIFT_SHARE * shifts["+0"]:
        return None
    return Conclusion(
        "code_or_instrumentation_defect",
        "logprobs_off_by_one",
        f"Trainer and sampler differ by {shifts['+0']:.4g} nats a token on the {place}, and by "
        f"{shifts[best]:.4g} when the trainer's values are moved by {best} token.",
        {"where": place, **dict(gap)},
        "Align targets and log-probabilities: token t belongs to the prediction at t - 1.",
    )


def _bfloat16(findings: Findings) -> Conclusion | None:
    found = _gap_of(findings)
    if found is None:
        return None
    place, gap = found
    sides = {name: gap.get(f"bfloat16_{name}") for name in ("sampling", "trainer")}
    rounded = [name for name, share in sides.items() if share and share >= BFLOAT16_SHARE]
    if not rounded or gap["nats_q90"] > MATERIAL_NATS:
        return None
    return Conclusion(
        "code_or_instrumentation_defect",
        "bfloat16_rounding",
        f"{' and '.join(rounded)} log-probabilities hold only bfloat16 values: with equal weights "
        f"the two sides differ by up to {gap['nats_max']:.4g} nats on the {place}.",
        {"where": place, **dict(gap)},
        "Return and keep log-probabilities in float32.",
    )


def _tempered(findings: Findings) -> Conclusion | None:
    found = _gap_of(findings)
    if found is None or findings.temperature in (None, 1.0):
        return None
    place, gap = found
    slope, stretched = gap.get("slope"), 1.0 / float(findings.temperature or 1.0)
    if gap["nats_q90"] < STALE_NATS or slope is None:
        return None
    nearer = abs(slope - stretched) < abs(slope - 1.0)
    if not nearer or _same_when_rescored(findings):
        return None
    return Conclusion(
        "code_or_instrumentation_defect",
        "temperature_scaled_logprobs",
        f"Sampling log-probabilities grow with a slope of {slope:.4g} on the trainer's, where "
        f"equal ones have 1 and those of the distribution at temperature {findings.temperature:g} "
        f"about {stretched:.4g} ({place}).",
        {"where": place, "temperature": findings.temperature, **dict(gap)},
        "Compare untempered log-probabilities, or sample at temperature 1.",
    )


def _same_when_rescored(findings: Findings) -> bool:
    """Whether the sampler repeats its own values: then they are its weights', not processed ones."""
    rescored = findings.rescored
    if rescored is None or rescored["returned_to_trainer"] < STALE_NATS:
        return False
    return bool(rescored["returned_to_rescored"] < SHIFT_SHARE * rescored["returned_to_trainer"])


def _stale(findings: Findings) -> Conclusion | None:
    first, later = findings.first_gap, findings.later_gap
    grown = (
        first is not None
        and later is not None
        and later["nats_q90"] > max(STALE_NATS, STALE_FACTOR * first["nats_q90"])
    )
    own = _same_when_rescored(findings)
    material = first is not None and first["nats_q90"] > MATERIAL_NATS
    if not grown and not (own and material):
        return None
    figures = {
        "first_batch": first,
        "later_batches": later,
        "rescored": None if findings.rescored is None else dict(findings.rescored),
    }
    if grown and first is not None and later is not None:
        why = (
            f"agree on the first batch (0.9 quantile {first['nats_q90']:.3g} nats) and not on "
            f"later ones ({later['nats_q90']:.3g})"
        )
    else:
        why = "differ, while the sampler scores its own tokens as it returned them"
    return Conclusion(
        "code_or_instrumentation_defect",
        "stale_sampler_weights",
        f"Sampler and trainer {why}: the sampler held other weights than the version it is "
        "recorded with.",
        figures,
        "Publish the current weights before every rollout, and open a new sampler on them.",
    )


def _apart(findings: Findings) -> Conclusion | None:
    found = _gap_of(findings)
    if found is None or found[1]["nats_q90"] <= MATERIAL_NATS:
        return None
    place, gap = found
    return Conclusion(
        "code_or_instrumentation_defect",
        "sampler_and_trainer_disagree",
        f"With equal weights sampler and trainer differ by {gap['nats_q90']:.3g} nats (0.9 "
        f"quantile) on the {place}, and no known mistake explains it.",
        {"where": place, **dict(gap)},
        "Score one fixed sequence by both and compare logits.",
    )


# ---- the regime ---------------------------------------------------------------------------------


def _truncated(findings: Findings) -> Conclusion | None:
    rewards = findings.rewards
    all_cut = rewards.get("completions") and rewards["truncated"] == rewards["completions"]
    if not all_cut or rewards.get("groups_with_different_rewards"):
        return None
    return Conclusion(
        "legitimately_inactive_regime",
        "every_answer_truncated",
        f"All {rewards['completions']} completions were cut off at the token limit and no group "
        "has different rewards, so there was nothing to learn from.",
        dict(rewards),
        "Raise the token limit until answers end by themselves.",
    )


def _equal_rewards(findings: Findings) -> Conclusion | None:
    rewards = findings.rewards
    if not rewards.get("groups") or rewards.get("groups_with_different_rewards"):
        return None
    if findings.figures.get("nonzero_advantage_tokens"):
        return None
    return Conclusion(
        "legitimately_inactive_regime",
        "rewards_all_equal",
        f"In none of {rewards['groups']} groups do rewards differ, so every advantage is 0 and no "
        "token has a gradient that could be removed.",
        dict(rewards),
        "Choose tasks that are sometimes solved and sometimes not.",
    )


def _no_learning_rate(findings: Findings) -> Conclusion | None:
    if findings.learning_rate != 0:
        return None
    return Conclusion(
        "legitimately_inactive_regime",
        "learning_rate_zero",
        "The learning rate is 0: the policy cannot leave the one that sampled, and a mask on "
        "their difference cannot fire.",
        {"learning_rate": 0.0, "movement_nats": findings.movement_nats},
        "Check the learning rate against the spec's source.",
    )


def _unmoved(findings: Findings) -> Conclusion | None:
    if not findings.learning_rate:
        return None
    moved = findings.movement_nats
    if moved is None:
        return _unmoved_within_batches(findings)
    if moved > UNMOVED_NATS:
        return None
    return _without_effect(
        findings,
        f"no log-probability moved by more than {UNMOVED_NATS:g} nats",
        {"movement_nats": moved},
    )


def _unmoved_within_batches(findings: Findings) -> Conclusion | None:
    gaps = findings.within_batches
    if gaps is None or not findings.figures.get("nonzero_advantage_tokens"):
        return None
    if max(gaps[when]["nats_max"] for when in ("before", "after")) > ROUNDING_NATS:
        return None
    return _without_effect(
        findings,
        "after a batch's first update the trainer still scores as the sampler does, within "
        f"{gaps['after']['nats_max']:.3g} nats",
        {"within_batches": dict(gaps)},
    )


def _without_effect(findings: Findings, seen: str, figures: Mapping[str, Any]) -> Conclusion:
    return Conclusion(
        "code_or_instrumentation_defect",
        "updates_without_effect",
        f"The learning rate is {findings.learning_rate:g} and tokens have advantages, yet {seen}.",
        {"learning_rate": findings.learning_rate, **figures},
        "Check that gradients and optimizer steps reach the model that is scored.",
    )


def _movement_hidden(findings: Findings) -> Conclusion | None:
    """Where sampler and trainer differ as much without training, a policy that stood still fits."""
    gaps = findings.within_batches
    if findings.movement_nats is not None or gaps is None:
        return None
    before, after = gaps["before"], gaps["after"]
    if before["nats_max"] <= ROUNDING_NATS < after["nats_max"]:
        return None
    if any(
        after[name] > SEEN_FACTOR * before[name] + UNMOVED_NATS for name in ("nats_q50", "nats_q90")
    ):
        return None
    return Conclusion(
        "missing_evidence",
        "movement_not_seen",
        f"No token was scored before and after an update, and sampler and trainer differ by "
        f"{after['nats_q90']:.3g} nats (0.9 quantile) after a batch's first update and by "
        f"{before['nats_q90']:.3g} before it: whether any update had an effect cannot be told.",
        {"learning_rate": findings.learning_rate, "within_batches": dict(gaps)},
        "Run the bounded diagnostic, which scores the same tokens before and after its updates.",
    )


def _active(findings: Findings) -> Conclusion | None:
    if findings.rules.get("status") != "passed":
        return None
    figures = findings.figures
    return Conclusion(
        "active",
        "mask_active",
        f"The mask removed {figures['masked_tokens']} of {figures['loss_tokens']} gradients "
        f"({findings.scope}), and every fixed rule holds.",
        dict(figures),
        "Launch the frozen revised comparison spec, if that experiment is wanted.",
    )


def _excessive(findings: Findings) -> Conclusion | None:
    share = findings.figures.get("masked_fraction")
    highest = FIXED_RULES["masked_fraction"]["max"]
    if share is None or share <= highest:
        return None
    loss = findings.registered
    thresholds = {name: loss.get(name) for name in ("divergence", "delta_low", "delta_high")}
    return Conclusion(
        "wrong_reference_or_variant",
        "delta_too_small",
        f"The mask removed {share:.3g} of all gradients ({findings.scope}), more than "
        f"{highest:g}: the registered threshold ({thresholds}) does not fit this regime.",
        {**thresholds, **findings.figures},
        "Check the threshold against its source; it may be off by a power of ten.",
    )


def _inactive_by_drift(findings: Findings) -> Conclusion:
    figures = findings.figures
    failed = [
        f"{row['check']} ({row['reason']})"
        for row in findings.rules.get("checks", ())
        if row["status"] != "passed"
    ]
    return Conclusion(
        "legitimately_inactive_regime",
        "drift_within_threshold",
        f"Files, decisions and log-probabilities hold, and the policy moved too little: "
        f"{figures.get('exceed')} of {figures.get('loss_tokens')} tokens moved beyond the "
        f"threshold, {figures.get('masked_tokens')} of them removed, "
        f"{figures.get('exceed_restoring')} coming back and "
        f"{figures.get('exceed_zero_advantage')} without advantage; the 0.9 "
        f"quantile of the drift is {_number(figures.get('drift_abs_q90'))}, the largest "
        f"{_number(figures.get('drift_abs_max'))} ({findings.scope}). Not met: "
        f"{', '.join(failed) or 'nothing'}.",
        dict(figures),
        "More updates per batch or a larger learning rate, registered as another experiment.",
    )


def _number(value: Any) -> str:
    return "unknown" if value is None else f"{value:.4g}"


_ORDER: tuple[Callable[[Findings], Conclusion | None], ...] = (
    _broken,
    _missing,
    _forced,
    _replay,
    _out_of_reach,
    _off_by_one,
    _bfloat16,
    _tempered,
    _stale,
    _apart,
    _truncated,
    _equal_rewards,
    _no_learning_rate,
    _unmoved,
    _excessive,
    _active,
    _movement_hidden,
)
