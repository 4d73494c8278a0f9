"""What a decided sample says beyond the frozen rule: descriptive, never a verdict."""

from __future__ import annotations

from typing import Any

from evidence.criteria import SEED_UNIT, CriterionResult, DecisionResult, Sample, betting_of
from evidence.spec import Criterion, DecisionRule
from evidence.statistics import (
    Interval,
    clopper_pearson_discordant,
    empirical_bernstein_interval,
    item_order,
    mcnemar_exact,
)


def advisories(rule: DecisionRule, result: DecisionResult) -> list[dict[str, Any]]:
    """Return other intervals and tests for the same observations, beside the frozen interval.

    Each criterion gets a betting interval and an empirical Bernstein interval, and where it is a
    difference of two arms' 0/1 outcomes also Clopper-Pearson on discordant pairs and McNemar's
    exact test. All intervals hold for all criteria at once (``alpha / k`` each). The first two
    depend on the order of items, which is fixed by the hash of the rule's first seed and the item.

    Args:
        rule: the rule that decided.
        result: what it decided, with the samples of its criteria.

    Returns:
        Rows with ``criterion``, ``method``, ``lower``, ``upper``, ``half_width``, ``margin``,
        ``would_settle``, ``p_value`` and ``note``; what a method does not give is None.
    """
    rows = []
    alpha = rule.alpha / len(rule.criteria)
    for criterion, decided in zip(rule.criteria, result.criteria, strict=False):
        sample = result.samples.get(criterion.id)
        if sample is not None:
            rows += _of_criterion(rule, criterion, decided, sample, alpha)
    return rows


def scope_statement(rule: DecisionRule, n_units: int) -> str:
    """Say in one sentence what the interval speaks about, and what it does not."""
    if rule.unit == SEED_UNIT:
        return (
            f"The interval rests on {n_units} training seeds and speaks about further training "
            "runs like these on exactly these items, not about other items."
        )
    seeds = len(rule.seeds)
    runs = (
        "the one trained checkpoint" if seeds == 1 else f"the mean of {seeds} trained checkpoints"
    )
    return (
        f"The interval rests on {n_units} items and speaks about {runs} of each arm on further "
        "items like these, not about training again with other seeds."
    )


def _of_criterion(
    rule: DecisionRule,
    criterion: Criterion,
    decided: CriterionResult,
    sample: Sample,
    alpha: float,
) -> list[dict[str, Any]]:
    order = item_order(rule.seeds[0], sample.unit_ids)
    bernstein = empirical_bernstein_interval(
        sample.contrasts[order], alpha=alpha, low=sample.low, high=sample.high
    )
    note = "valid for any bounded values; items in the order fixed by their hashes"
    rows = [_interval_row(decided, "empirical_bernstein", bernstein, note)]
    if rule.method != "paired_betting":
        betting = betting_of(sample, alpha=alpha, seed=rule.seeds[0])
        rows.insert(0, _interval_row(decided, "betting", betting, note))
    if sample.gains is None or sample.losses is None:
        return rows
    gains, losses, n = sample.gains, sample.losses, sample.contrasts.size
    exact = clopper_pearson_discordant(gains, losses, n=n, alpha=alpha)
    counts = f"{gains} items better, {losses} worse, {n - gains - losses} equal"
    rows.append(_interval_row(decided, "clopper_pearson_discordant", exact, counts))
    row = _row(decided, "mcnemar_exact", f"{counts}; tests no difference, not the margin")
    rows.append(row | {"p_value": mcnemar_exact(gains, losses)})
    return rows


def _interval_row(
    decided: CriterionResult, method: str, interval: Interval, note: str
) -> dict[str, Any]:
    settles = interval.lower > decided.margin or interval.upper < decided.margin
    return _row(decided, method, note) | {
        "lower": interval.lower,
        "upper": interval.upper,
        "half_width": interval.half_width,
        "would_settle": settles,
    }


def _row(decided: CriterionResult, method: str, note: str) -> dict[str, Any]:
    return {
        "criterion": decided.id,
        "method": method,
        "lower": None,
        "upper": None,
        "half_width": None,
        "margin": decided.margin,
        "would_settle": None,
        "p_value": None,
        "note": note,
    }
