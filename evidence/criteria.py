"""Criteria of a decision rule, judged from observations that are held as columns.

For each criterion the arms' values at one item are averaged over the scheduled seeds and summed
with the criterion's weights. The mean of these contrasts over items is the effect; an interval
around it, valid for all criteria at once, must lie entirely on one side of the margin to settle the
criterion. Nothing is inferred: one missing, doubled or impossible observation leaves it open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from evidence.errors import InputError
from evidence.observations import Observations
from evidence.spec import Criterion, DecisionRule
from evidence.statistics import Interval, betting_interval, hoeffding_half_width, item_order
from evidence.values import show

DecisionStatus = Literal["supported", "refuted", "uncertain", "unverified", "not_applicable"]
CriterionStatus = Literal["passed", "failed", "uncertain"]
Floats = NDArray[np.float64]
Positions = NDArray[np.int64]

ITEM_UNIT = "fixed_checkpoint_items"
SEED_UNIT = "training_seeds"
_FEW = 16
"""Known values up to which a column is first tested for holding one value only, which is cheap."""
_MAX_SPARSE = 1_000_000
"""Cells that may be laid out before it is clear that most of them are missing."""


@dataclass(frozen=True, slots=True)
class CriterionResult:
    """One criterion, recomputed.

    Attributes:
        id: the spec's name of the criterion.
        metric: what was measured.
        effect: mean contrast, in the metric's unit.
        half_width: half the length of the interval.
        lower: lower end.
        upper: upper end.
        margin: the spec's margin.
        n_items: independent units the interval rests on.
        status: ``passed`` if the interval lies entirely above the margin, ``failed`` if entirely
            below, else ``uncertain``.
    """

    id: str
    metric: str
    effect: float
    half_width: float
    lower: float
    upper: float
    margin: float
    n_items: int
    status: CriterionStatus

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Sample:
    """What a criterion's interval was computed from.

    Attributes:
        unit_ids: items (or seeds) in the order of the contrasts.
        contrasts: [n] weighted sums of the arms, one per unit.
        low: smallest possible contrast.
        high: largest possible contrast.
        gains: units where only the first of two arms scored 1, where all values are 0 or 1.
        losses: units where only the second did; None where the values are no paired 0/1 outcomes.
    """

    unit_ids: tuple[str, ...]
    contrasts: Floats
    low: float
    high: float
    gains: int | None = None
    losses: int | None = None


@dataclass(frozen=True, slots=True)
class DecisionResult:
    """The answer to a reported decision.

    Attributes:
        status: ``supported`` (every criterion passed), ``refuted`` (every one failed),
            ``uncertain``, or ``unverified`` where the observations could not be read.
        issues: what is missing or wrong; empty when the observations could be judged.
        criteria: one entry for each criterion that was computed.
        outcome_reason: the contract's reason.
        applicability: whether the rule applies, as the contract writes it.
        rule: unit, n_seeds, alpha and method; None where the contract leaves them out.
        reported_verdict: a definitive claim that this answer does not bear out.
        notes: how roles were mapped to arms, where neither spec nor execution file says it.
        samples: criterion id to what its interval rests on; never part of the record.
    """

    status: DecisionStatus
    issues: tuple[str, ...] = ()
    criteria: tuple[CriterionResult, ...] = ()
    outcome_reason: str | None = "insufficient_evidence"
    applicability: Mapping[str, Any] = field(default_factory=dict)
    rule: Mapping[str, Any] | None = None
    reported_verdict: str | None = None
    notes: tuple[str, ...] = ()
    samples: Mapping[str, Sample] = field(default_factory=dict, compare=False)

    def to_record(self) -> dict[str, Any]:
        """Return the contract's object, keys in its order; ``notes`` follow where there are any."""
        record: dict[str, Any] = {
            "status": self.status,
            "issues": list(self.issues),
            "criteria": [criterion.to_record() for criterion in self.criteria],
            "outcome_reason": self.outcome_reason,
            **(self.rule or {}),
            "applicability": dict(self.applicability),
        }
        if self.reported_verdict is not None:
            record["reported_verdict"] = self.reported_verdict
        if self.notes:
            record["notes"] = list(self.notes)
        return record


def decide(
    rule: DecisionRule,
    observations: Observations,
    *,
    roles: Mapping[str, str] | None = None,
    items: Mapping[str, Sequence[str]] | None = None,
) -> DecisionResult:
    """Apply a decision rule to observations, vectorised over them.

    Args:
        rule: the spec's rule.
        observations: any number of observations; those of other arms or metrics are ignored.
        roles: weight name to arm; a name that is not in it is an arm's own name.
        items: metric to the items that must all be there; by default those that were observed.

    Returns:
        A result without applicability and without record fields of the rule.

    Raises:
        InputError: naming the first criterion whose observations are not complete and the reason.
    """
    results, samples = [], {}
    for criterion in rule.criteria:
        values = _table(rule, criterion, observations, roles or {}, items or {})
        sample = _sample(rule, criterion, values)
        results.append(_judge_criterion(rule, criterion, sample))
        samples[criterion.id] = sample
    status, reason = _combine(rule, results)
    return DecisionResult(status, (), tuple(results), reason, samples=samples)


@dataclass(frozen=True, slots=True)
class _Table:
    """Values of one criterion: arms by scheduled seeds by items, none missing."""

    values: Floats
    weights: Floats
    item_ids: Sequence[str]


def _table(
    rule: DecisionRule,
    criterion: Criterion,
    observations: Observations,
    roles: Mapping[str, str],
    items: Mapping[str, Sequence[str]],
) -> _Table:
    arms = {roles.get(name, name): weight for name, weight in criterion.weights.items() if weight}
    if len(arms) < sum(1 for weight in criterion.weights.values() if weight):
        raise InputError(
            place_of(criterion), dict(criterion.weights), "another arm for each weight"
        )
    chosen = np.flatnonzero(positions_in(observations.metrics, [criterion.metric]) >= 0)
    arm = positions_in(observations.arms, list(arms))[chosen]
    chosen, arm = chosen[arm >= 0], arm[arm >= 0]
    if not chosen.size:
        expected = f"observations of {show(criterion.metric)} for arms {', '.join(map(show, arms))}"
        raise InputError(place_of(criterion), 0, expected)
    seed = _known(criterion, observations.seeds, chosen, rule.seeds, "a scheduled seed")
    given = items.get(criterion.metric)
    listed: Sequence[str]
    if given is None:
        item, listed = _numbered(_taken(observations.item_ids, chosen))
    else:
        listed, expected = given, "an item of the evaluator"
        item = _known(criterion, observations.item_ids, chosen, listed, expected)
    cells = len(arms) * len(rule.seeds) * len(listed)
    if cells > _MAX_SPARSE + 4 * len(chosen):
        expected = f"{cells} observations (arms times seeds times items)"
        raise InputError(place_of(criterion), len(chosen), expected)
    shape = (len(arms), len(rule.seeds), len(listed))
    flat = np.ravel_multi_index((arm, seed, item), shape)
    counts = np.bincount(flat, minlength=cells)
    _complete(criterion, counts.reshape(shape), list(arms), rule.seeds, listed)
    flat_values = np.empty(cells)
    flat_values[flat] = observations.values[chosen]
    values = flat_values.reshape(shape)
    _bounded(criterion, values, list(arms), rule.seeds, listed)
    return _Table(values, np.array(list(arms.values())), listed)


def _numbered(column: Sequence[str]) -> tuple[Positions, list[str]]:
    """Number the values of a column in the order of their first appearance."""
    index: defaultdict[str, int] = defaultdict(count().__next__)
    codes = np.fromiter(map(index.__getitem__, column), dtype=np.int64, count=len(column))
    return codes, list(index)


def _taken(column: Sequence[Any], chosen: Positions) -> Sequence[Any]:
    if len(chosen) == len(column):
        return column
    return [column[position] for position in chosen.tolist()]


def positions_in(column: Sequence[Any], known: Sequence[Any]) -> Positions:
    """Return the position of each value in a list of known ones, -1 where it is not there."""
    index = {value: position for position, value in enumerate(known)}
    if len(index) <= _FEW and len(present := set(column)) == 1:
        return np.full(len(column), index.get(present.pop(), -1))
    found = map(index.get, column, repeat(-1))
    return np.fromiter(found, dtype=np.int64, count=len(column))


def _known(
    criterion: Criterion,
    column: Sequence[Any],
    chosen: Positions,
    known: Sequence[Any],
    expected: str,
) -> Positions:
    found = positions_in(column, known)[chosen]
    if (found < 0).any():
        row = int(chosen[found < 0][0])
        raise InputError(f"{place_of(criterion)}, row {row}", column[row], expected)
    return found


def _complete(
    criterion: Criterion,
    counts: Positions,
    arms: Sequence[str],
    seeds: Sequence[int],
    items: Sequence[str],
) -> None:
    """Refuse gaps and doubles, identical ones too: neither of two values may be chosen."""
    for wrong, what in ((counts > 1, "more than one observation"), (counts == 0, "no observation")):
        if wrong.any():
            place = _first(wrong, arms, seeds, items)
            found = f"{what} in {int(wrong.sum())} places, first {place}"
            raise InputError(place_of(criterion), found, "one observation per item, arm and seed")


def _bounded(
    criterion: Criterion,
    values: Floats,
    arms: Sequence[str],
    seeds: Sequence[int],
    items: Sequence[str],
) -> None:
    low, high = criterion.bounds
    outside = (values < low) | (values > high)
    if outside.any():
        place = f"{place_of(criterion)}, {_first(outside, arms, seeds, items)}"
        expected = f"a value from {low:g} to {high:g} (never clipped)"
        raise InputError(place, float(values[outside][0]), expected)


def _first(
    wrong: NDArray[np.bool_], arms: Sequence[str], seeds: Sequence[int], items: Sequence[str]
) -> str:
    a, s, i = (int(axis[0]) for axis in np.nonzero(wrong))
    return f"item {show(items[i])}, arm {show(arms[a])}, seed {seeds[s]}"


def _sample(rule: DecisionRule, criterion: Criterion, table: _Table) -> Sample:
    seeds_are_units = rule.unit == SEED_UNIT
    with np.errstate(over="ignore", invalid="ignore"):
        by_unit = np.tensordot(table.weights, table.values, axes=1)
        contrasts = by_unit.mean(axis=1 if seeds_are_units else 0)
        effect = float(contrasts.mean())
    if not np.isfinite(effect):
        raise InputError(place_of(criterion), effect, "a finite effect (bounds are too large)")
    low, high = criterion.bounds
    rising = float(table.weights[table.weights > 0].sum())
    falling = float(-table.weights[table.weights < 0].sum())
    gains, losses = (None, None) if seeds_are_units else _discordant(table)
    return Sample(
        unit_ids=tuple(map(str, rule.seeds)) if seeds_are_units else tuple(table.item_ids),
        contrasts=contrasts,
        low=rising * low - falling * high,
        high=rising * high - falling * low,
        gains=gains,
        losses=losses,
    )


def _discordant(table: _Table) -> tuple[int | None, int | None]:
    """Count paired 0/1 outcomes that differ, where the criterion is a plain difference of two."""
    plain = sorted(table.weights.tolist()) == [-1.0, 1.0] and table.values.shape[1] == 1
    if not plain or not np.isin(table.values, (0.0, 1.0)).all():
        return None, None
    difference = np.tensordot(table.weights, table.values[:, 0], axes=1)
    return int((difference == 1).sum()), int((difference == -1).sum())


def _judge_criterion(rule: DecisionRule, criterion: Criterion, sample: Sample) -> CriterionResult:
    interval, half_width = _interval(rule, criterion, sample)
    status: CriterionStatus = "uncertain"
    if interval.lower > criterion.margin:
        status = "passed"
    elif interval.upper < criterion.margin:
        status = "failed"
    return CriterionResult(
        id=criterion.id,
        metric=criterion.metric,
        effect=float(sample.contrasts.mean()),
        half_width=half_width,
        lower=interval.lower,
        upper=interval.upper,
        margin=criterion.margin,
        n_items=sample.contrasts.size,
        status=status,
    )


def _interval(rule: DecisionRule, criterion: Criterion, sample: Sample) -> tuple[Interval, float]:
    """Return the interval that the rule's method gives at ``alpha / k``, and its half width."""
    k = len(rule.criteria)
    if rule.method == "paired_betting":
        interval = betting_of(sample, alpha=rule.alpha / k, seed=rule.seeds[0])
        return interval, interval.half_width
    low, high = criterion.bounds
    total = sum(abs(weight) for weight in criterion.weights.values())
    half = hoeffding_half_width(
        total * (high - low), n=sample.contrasts.size, k=k, alpha=rule.alpha
    )
    effect = float(sample.contrasts.mean())
    return Interval(effect - half, effect + half), half


def betting_of(sample: Sample, *, alpha: float, seed: int) -> Interval:
    """Return the betting interval of a sample, its units in the order fixed by their hashes."""
    order = item_order(seed, sample.unit_ids)
    return betting_interval(sample.contrasts[order], alpha=alpha, low=sample.low, high=sample.high)


def _combine(rule: DecisionRule, results: Sequence[CriterionResult]) -> tuple[DecisionStatus, str]:
    statuses = {result.status for result in results}
    if statuses == {"passed"}:
        return "supported", "supported"
    if statuses == {"failed"}:
        return "refuted", "refuted"
    if "uncertain" not in statuses:
        return "uncertain", "mixed_criteria"
    tied = all(
        result.status == "passed" or _within_tie_band(criterion, result)
        for criterion, result in zip(rule.criteria, results, strict=True)
    )
    return "uncertain", "tie" if tied else "insufficient_evidence"


def _within_tie_band(criterion: Criterion, result: CriterionResult) -> bool:
    band = criterion.tie_band
    if band is None:
        return False
    low, high = band if isinstance(band, tuple) else (-band, band)
    return low <= result.lower and result.upper <= high


def place_of(criterion: Criterion) -> str:
    """Name a criterion in an error."""
    return f"criterion {show(criterion.id)}"


def arms_of(criterion: Criterion, roles: Mapping[str, str]) -> list[str]:
    """Return the arms that a criterion weighs, in the order of its weights."""
    return [roles.get(name, name) for name, weight in criterion.weights.items() if weight]


def rows_of(criterion: Criterion, arms: Sequence[str], observations: Observations) -> Positions:
    """Return where the observations of a criterion's metric and of some arms stand."""
    measured = positions_in(observations.metrics, [criterion.metric]) >= 0
    return np.flatnonzero(measured & (positions_in(observations.arms, arms) >= 0))
