"""Before any spending: can the rule settle at all, and how many items would it take?

These are advisories. They change no rule and no gate; they tell whoever launches what the frozen
rule can and cannot say about an experiment of this size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from evidence.criteria import SEED_UNIT
from evidence.errors import InputError
from evidence.parsing import build
from evidence.spec import Criterion, DecisionRule, Spec
from evidence.statistics import (
    Interval,
    betting_interval,
    hoeffding_half_width,
    items_for_power,
    items_for_power_at_deviation,
    items_to_settle,
)
from evidence.values import as_list, as_mapping, is_integer, is_number, is_text, show, spec_mapping

DISTANCES = (0.01, 0.03, 0.05, 0.10, 0.20)
TYPICAL_DEVIATION = sqrt(0.15)
"""Standard deviation of a 0/1 difference of which 15 % of the items are discordant."""

_REPORTED_BY_NO_SERVER = frozenset({"lora_rank"})


@dataclass(frozen=True, slots=True)
class CriterionPlan:
    """What one criterion can settle.

    Attributes:
        id: the criterion.
        metric: what is measured.
        margin: the spec's margin.
        n_units: independent units the interval will rest on.
        half_width: of the frozen interval; for a betting rule, of its narrowest case.
        passes_above: effect that must be exceeded to pass; None where it depends on the data.
        fails_below: effect below which the criterion fails; None where it depends on the data.
        lowest: smallest effect that can occur, given the base score where it is known.
        highest: largest effect that can occur.
        can_pass: whether any possible effect passes.
        can_fail: whether any possible effect fails.
        base_score: the base model's score, if known.
    """

    id: str
    metric: str
    margin: float
    n_units: int
    half_width: float
    passes_above: float | None
    fails_below: float | None
    lowest: float
    highest: float
    can_pass: bool
    can_fail: bool
    base_score: float | None

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def sentence(self) -> str:
        """The finding in plain words."""
        size = f"{self.n_units} units give a half width of {self.half_width:.3f}"
        if self.base_score is None:
            reach = f"effects from {self.lowest:.3f} to {self.highest:.3f} are possible"
        else:
            reach = (
                f"from a base score of {self.base_score:.3f} the largest possible effect is "
                f"{self.highest:.3f}"
            )
        if self.passes_above is None:
            needs = f"the interval can lie above the margin {self.margin:g} at best"
            if not self.can_pass:
                needs = f"the interval cannot lie above the margin {self.margin:g}"
        else:
            needs = f"an effect above {self.passes_above:.3f} is needed (margin {self.margin:g})"
        can = "can pass" if self.can_pass else "cannot pass"
        return f"Criterion {show(self.id)} {can}: {size}, {needs}, and {reach}."


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """What a spec's decision rule can settle before anything is spent.

    Attributes:
        criteria: one plan each, in the spec's order.
        can_support: whether every criterion can pass.
        can_refute: whether every criterion can fail.
        items: items needed at several distances from the margin, for one and for two criteria.
        notes: other weak spots of the spec, one sentence each.
    """

    criteria: tuple[CriterionPlan, ...]
    can_support: bool
    can_refute: bool
    items: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]

    @property
    def sentences(self) -> list[str]:
        """Everything in plain words, the conclusion first."""
        if not self.can_support:
            conclusion = "The rule cannot fire: no possible result of this size supports the claim."
        elif not self.can_refute:
            conclusion = "The rule can support the claim; no possible result refutes it."
        else:
            conclusion = "The rule can support the claim and can refute it."
        return [conclusion, *(plan.sentence for plan in self.criteria), *self.notes]

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return {
            "can_support": self.can_support,
            "can_refute": self.can_refute,
            "criteria": [plan.to_record() for plan in self.criteria],
            "items": [dict(row) for row in self.items],
            "sentences": self.sentences,
        }


def plan_check(
    spec: Spec | Mapping[str, Any],
    *,
    base_score: float | Mapping[str, float] | None = None,
    n_units: int | None = None,
    roles: Collection[str] = (),
) -> PlanCheck:
    """Compare what the rule needs with what can happen.

    An effect is the weighted sum of arm means. Without a base score it may be anything that the
    bounds allow. With one, arms of positive weight may reach either bound while the others stay
    where the base model is: training can hardly do more for the claim than that.

    Args:
        spec: a spec with a decision rule, parsed or as given.
        base_score: the base model's score, for every metric or by metric.
        n_units: items (or seeds); by default the spec's ``eval.n_examples`` (or its seeds).
        roles: roles that the execution file gives to arms.

    Raises:
        InputError: if the rule, the number of items or a base score cannot be used.
    """
    document = spec_mapping(spec)
    rule = build(DecisionRule, as_mapping(document.get("decision_rule")), where="decision_rule")
    units = _units(document, rule) if n_units is None else n_units
    plans = tuple(
        _plan(rule, criterion, units, _base(base_score, criterion)) for criterion in rule.criteria
    )
    ranges = {_value_range(criterion) for criterion in rule.criteria}
    return PlanCheck(
        criteria=plans,
        can_support=all(plan.can_pass for plan in plans),
        can_refute=all(plan.can_fail for plan in plans),
        items=tuple(items_table(value_range=max(ranges), alpha=rule.alpha)),
        notes=tuple(weak_spots(document, roles=roles)),
    )


def items_table(
    *,
    value_range: float,
    alpha: float,
    distances: Sequence[float] = DISTANCES,
    criteria: Sequence[int] = (1, 2),
    deviation: float = TYPICAL_DEVIATION,
) -> list[dict[str, Any]]:
    """Return the items that the Hoeffding rule needs at several distances from the margin.

    Args:
        value_range: R, 2 for a difference of two scores in [0, 1].
        alpha: chance of any miss.
        distances: between the effect and the margin.
        criteria: numbers of criteria judged together.
        deviation: standard deviation of an item's contrast, for the realistic column.

    Returns:
        Rows with ``distance``, ``k``, ``just`` (settles at the observed effect, about half of all
        runs), ``guaranteed`` (80 % of runs for any distribution) and ``realistic`` (80 % at that
        deviation).
    """
    return [
        {
            "distance": distance,
            "k": k,
            "just": items_to_settle(distance, value_range=value_range, k=k, alpha=alpha),
            "guaranteed": items_for_power(distance, value_range=value_range, k=k, alpha=alpha),
            "realistic": items_for_power_at_deviation(
                distance, deviation=deviation, value_range=value_range, k=k, alpha=alpha
            ),
        }
        for distance in distances
        for k in criteria
    ]


def weak_spots(spec: Mapping[str, Any], *, roles: Collection[str] = ()) -> list[str]:
    """Name parts of a spec that no run can satisfy as they are written, one sentence each.

    Args:
        spec: the spec as given.
        roles: roles that the execution file gives to arms.
    """
    arms = {as_mapping(arm).get("name") for arm in as_list(spec.get("arms"))}
    rule = as_mapping(spec.get("decision_rule"))
    criteria = [as_mapping(criterion) for criterion in as_list(rule.get("criteria"))]
    weighed = [name for criterion in criteria for name in as_mapping(criterion.get("weights"))]
    known = {*arms, *roles}
    strange = list(dict.fromkeys(name for name in weighed if is_text(name) and name not in known))
    found = []
    if strange:
        found.append(
            f"The decision weighs {', '.join(map(show, strange))}, which no arm is called; the "
            "execution file must say which arm has which role."
        )
    groups = as_list(as_mapping(spec.get("restoration_preflight")).get("groups"))
    planned = [
        as_mapping(arm) for group in groups for arm in as_list(as_mapping(group).get("arms"))
    ]
    keys = {key for arm in planned for key in as_mapping(arm.get("optimizer_config"))}
    found += [
        f"The restoration preflight asks for {key} in an optimizer's configuration, which no "
        "server reports there; it can never be verified."
        for key in sorted(keys & _REPORTED_BY_NO_SERVER)
    ]
    return found


def _units(spec: Mapping[str, Any], rule: DecisionRule) -> int:
    if rule.unit == SEED_UNIT:
        return len(rule.seeds)
    items = as_mapping(spec.get("eval")).get("n_examples")
    if not is_integer(items) or items < 1:
        raise InputError("eval.n_examples", items, "a number of held-out items")
    return items


def _base(given: float | Mapping[str, float] | None, criterion: Criterion) -> float | None:
    score = given.get(criterion.metric) if isinstance(given, Mapping) else given
    if score is None:
        return None
    low, high = criterion.bounds
    if not is_number(score) or not low <= score <= high:
        raise InputError(f"base score of {criterion.metric}", score, f"from {low:g} to {high:g}")
    return float(score)


def _plan(
    rule: DecisionRule, criterion: Criterion, units: int, base: float | None
) -> CriterionPlan:
    lowest, highest = _reachable(criterion, base)
    if rule.method == "paired_betting":
        passes, fails = None, None
        best = _best_case(rule, criterion, units, highest)
        worst = _best_case(rule, criterion, units, lowest)
        can_pass, can_fail = best.lower > criterion.margin, worst.upper < criterion.margin
        half = min(best.half_width, worst.half_width)
    else:
        half = hoeffding_half_width(
            _value_range(criterion), n=units, k=len(rule.criteria), alpha=rule.alpha
        )
        passes, fails = criterion.margin + half, criterion.margin - half
        can_pass, can_fail = highest > passes, lowest < fails
    return CriterionPlan(
        id=criterion.id,
        metric=criterion.metric,
        margin=criterion.margin,
        n_units=units,
        half_width=half,
        passes_above=passes,
        fails_below=fails,
        lowest=lowest,
        highest=highest,
        can_pass=can_pass,
        can_fail=can_fail,
        base_score=base,
    )


def _best_case(rule: DecisionRule, criterion: Criterion, units: int, effect: float) -> Interval:
    """Return the betting interval of a sample in which every item shows the same effect."""
    low, high = _reachable(criterion, None)
    alpha = rule.alpha / len(rule.criteria)
    return betting_interval(np.full(units, effect), alpha=alpha, low=low, high=high)


def _reachable(criterion: Criterion, base: float | None) -> tuple[float, float]:
    low, high = criterion.bounds
    rising = sum(weight for weight in criterion.weights.values() if weight > 0)
    falling = -sum(weight for weight in criterion.weights.values() if weight < 0)
    if base is not None:
        return rising * low - falling * base, rising * high - falling * base
    return rising * low - falling * high, rising * high - falling * low


def _value_range(criterion: Criterion) -> float:
    low, high = criterion.bounds
    return sum(abs(weight) for weight in criterion.weights.values()) * (high - low)
