"""The decision of a record: its observations checked, and judged by the spec's frozen rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evidence import verdict
from evidence.advisories import advisories, scope_statement
from evidence.applicability import check_applicability
from evidence.criteria import (
    ITEM_UNIT,
    SEED_UNIT,
    CriterionResult,
    DecisionResult,
    DecisionStatus,
    arms_of,
    decide,
    place_of,
    positions_in,
    rows_of,
)
from evidence.errors import InputError
from evidence.evaluator import evaluator_id
from evidence.observations import MAX_ROWS, NotRetainedError, Observations, read_file
from evidence.output import DEFINITIVE
from evidence.parsing import build
from evidence.spec import Criterion, DecisionRule
from evidence.values import (
    as_list,
    as_mapping,
    is_count,
    is_number,
    is_text,
    jsonable,
    show,
    spec_mapping,
)

__all__ = [
    "CriterionResult",
    "DecisionResult",
    "DecisionStatus",
    "FinalVerdict",
    "Observations",
    "advisories",
    "decide",
    "final_verdict",
    "scope_statement",
    "validate",
]

MEAN_TOLERANCE = 1e-9
"""How far a reported mean may be from the observations', relative where it is above 1."""

NOT_RECORDED = "Decision evidence was not recorded."
NOT_RETAINED = "Observation file name/hash is not retained for this run."


def validate(
    spec: object,
    report: object,
    *,
    evaluation: object,
    files: Mapping[str, bytes] | None = None,
    roles: Mapping[str, str] | None = None,
    reported_verdict: object = None,
) -> DecisionResult:
    """Judge a reported decision by the spec's frozen rule. Nothing in it can raise.

    Args:
        spec: the spec as given, a triage document, or a parsed `Spec`.
        report: the reported ``decision``: observations, or the name and hash of their file.
        evaluation: the reported ``evaluation``: evaluators with their items, and score means.
        files: retained evidence files by name.
        roles: role (treatment, baseline) to arm, as an execution file says.
        reported_verdict: what the agent claims; kept where it is definitive and not borne out.
    """
    document = spec_mapping(spec)
    applicability = check_applicability(document, "decision_rule").to_record()
    judge = _Judge(document, as_mapping(evaluation), files or {}, roles or {})
    try:
        result = judge.answer(report, applicability)
    except NotRetainedError as error:
        result = DecisionResult("unverified", (_not_read(error),))
    except InputError as error:
        result = DecisionResult("uncertain", (_sentence(error),), rule=judge.rule_fields())
    kept = None
    if reported_verdict in ("supported", "refuted") and result.status != reported_verdict:
        kept = str(reported_verdict)
    if result.status == "not_applicable":
        kept = None
    return replace(result, applicability=applicability, reported_verdict=kept)


class _Judge:
    """A spec, an evaluation and the retained files, asked about one reported decision."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        evaluation: Mapping[str, Any],
        files: Mapping[str, bytes],
        roles: Mapping[str, str],
    ) -> None:
        self.spec = spec
        self.evaluation = evaluation
        self.files = files
        self.roles = roles

    def answer(self, report: object, applicability: Mapping[str, Any]) -> DecisionResult:
        if report is None and applicability["status"] == "not_applicable":
            reasons = tuple(applicability["reasons"])
            return DecisionResult("not_applicable", reasons, outcome_reason=None)
        if report is None:
            return DecisionResult("uncertain", (NOT_RECORDED,), rule=self.rule_fields())
        rule = self._rule()
        if not isinstance(report, Mapping):
            raise InputError("decision", report, "an object")
        self._check_form(report)
        self._check_selection(report)
        observations = Observations.from_rows(self._rows(report))
        self._check_confirmation(report, observations)
        roles, notes = self._map_roles(rule, observations)
        items = {
            criterion.metric: self._items(criterion, roles, observations)
            for criterion in rule.criteria
        }
        result = decide(rule, observations, roles=roles, items=items)
        self._check_means(rule, observations, roles)
        return replace(result, rule=self.rule_fields(), notes=notes)

    def rule_fields(self) -> dict[str, Any]:
        """The rule's fields that the contract repeats, as the spec gives them."""
        block = as_mapping(self.spec.get("decision_rule"))
        return {
            "unit": jsonable(block.get("unit")),
            "n_seeds": len(as_list(block.get("seeds"))),
            "alpha": jsonable(block.get("alpha")),
            "method": jsonable(block.get("method")),
        }

    def _rule(self) -> DecisionRule:
        block = self.spec.get("decision_rule")
        if not isinstance(block, Mapping):
            raise InputError("spec.decision_rule", block, "the rule that decides")
        rule = build(DecisionRule, block, where="spec.decision_rule")
        if rule.unit not in (None, ITEM_UNIT, SEED_UNIT):
            raise InputError("spec.decision_rule.unit", rule.unit, f"{ITEM_UNIT} or {SEED_UNIT}")
        return rule

    def _check_form(self, report: Mapping[str, Any]) -> None:
        version = report.get("version")
        if isinstance(version, bool) or version != 1:
            raise InputError("decision.version", version, "1")
        given = [
            key for key in ("observations", "observations_file") if report.get(key) is not None
        ]
        if len(given) != 1:
            expected = "exactly one of observations and observations_file"
            raise InputError("decision", " and ".join(given) or "neither", expected)

    def _rows(self, report: Mapping[str, Any]) -> list[Any]:
        if report.get("observations_file") is not None:
            return read_file(report["observations_file"], self.files)
        rows = report["observations"]
        if not isinstance(rows, list | tuple):
            raise InputError("decision.observations", rows, "a list of rows")
        if len(rows) > MAX_ROWS:
            raise NotRetainedError("observations", len(rows), f"at most {MAX_ROWS} rows")
        return list(rows)

    def _check_selection(self, report: Mapping[str, Any]) -> None:
        features = as_mapping(self.spec.get("experiment_features"))
        selection = report.get("selection")
        if features.get("adaptive_selection") is not True and selection is None:
            return
        if not isinstance(selection, Mapping):
            raise InputError("decision.selection", selection, "an object (selection was adaptive)")
        frozen = selection.get("frozen_before_confirmation")
        if frozen is not True:
            raise InputError("decision.selection.frozen_before_confirmation", frozen, "true")
        rule_block = as_mapping(self.spec.get("decision_rule"))
        places = (selection, report, as_mapping(rule_block.get("selection")), rule_block)
        if "weight_edit" in [place.get("kind") for place in places]:
            _check_budgets(selection.get("budgets", report.get("budgets")))

    def _check_confirmation(self, report: Mapping[str, Any], observations: Observations) -> None:
        listed = as_mapping(report.get("selection")).get("confirmation_items")
        if listed is None:
            return
        allowed = {item for item in as_list(listed) if isinstance(item, str)}
        for row, item in enumerate(observations.item_ids):
            if item not in allowed:
                expected = "a confirmation item (selection was adaptive)"
                raise InputError(f"observations[{row}].item_id", item, expected)

    def _map_roles(
        self, rule: DecisionRule, observations: Observations
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        observed = set(observations.arms)
        names = list(dict.fromkeys(name for c in rule.criteria for name in c.weights))
        mapped = {
            name: self.roles[name]
            for name in names
            if isinstance(self.roles.get(name), str)
            and (self.roles[name] in observed or name not in observed)
        }
        open_names = [name for name in names if name not in mapped and name not in observed]
        arms = [as_mapping(arm) for arm in as_list(self.spec.get("arms"))]
        if any(arm.get("role") is not None for arm in arms):
            stated = _stated_roles(arms)
            return {**mapped, **{name: stated[name] for name in open_names if name in stated}}, ()
        planned = [arm["name"] for arm in arms if is_text(arm.get("name"))]
        if set(open_names) != {"treatment", "baseline"} or len(planned) != 2:
            return mapped, ()
        mapped.update(baseline=planned[0], treatment=planned[1])
        note = (
            "The record does not say which arm has which role. By the order of the spec's arms, "
            f"baseline is {show(planned[0])} and treatment is {show(planned[1])}."
        )
        return mapped, (note,)

    def _items(
        self, criterion: Criterion, roles: Mapping[str, str], observations: Observations
    ) -> list[str]:
        """Return the frozen items of the one evaluator that scored a criterion's observations."""
        used = _evaluators(criterion, roles, observations)
        if len(used) != 1:
            found = f"{len(used)} evaluators"
            raise InputError(place_of(criterion), found, "observations of exactly one evaluator")
        name = used[0]
        provenance = as_mapping(self.evaluation.get("evaluators")).get(name)
        if not isinstance(provenance, Mapping):
            expected = "an evaluator whose provenance is reported"
            raise InputError(f"{place_of(criterion)}.evaluator_id", name, expected)
        if evaluator_id(provenance) != name:
            expected = "the hash of the evaluator's provenance"
            raise InputError(f"{place_of(criterion)}.evaluator_id", name, expected)
        return _item_list(as_mapping(provenance.get("items")))

    def _check_means(
        self, rule: DecisionRule, observations: Observations, roles: Mapping[str, str]
    ) -> None:
        """Refuse score means that the observations do not reproduce."""
        scores = [as_mapping(score) for score in as_list(self.evaluation.get("scores"))]
        for criterion in rule.criteria:
            used = _evaluators(criterion, roles, observations)[0]
            for arm in arms_of(criterion, roles):
                for seeds, mean in _means(rule, criterion, arm, observations):
                    _check_score(scores, criterion, arm, used, seeds, mean, rule)


def _stated_roles(arms: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return role to arm where every arm of the spec states a role, and only those of one arm."""
    pairs = [(arm.get("role"), arm.get("name")) for arm in arms]
    if not all(is_text(role) and is_text(name) for role, name in pairs):
        return {}
    roles = [role for role, _ in pairs]
    return {str(role): str(name) for role, name in pairs if roles.count(role) == 1}


def _check_budgets(budgets: object) -> None:
    """Refuse a weight edit whose selected and random-control arms have no stated budget each."""
    entries = as_mapping(budgets)
    if len(entries) < 2:
        expected = "values_touched and proposals of the selected and the random-control arm"
        raise InputError("decision.selection.budgets", budgets, expected)
    for arm, entry in entries.items():
        for key in ("values_touched", "proposals"):
            value = as_mapping(entry).get(key)
            if not is_count(value):
                place = f"decision.selection.budgets.{show(arm)}.{key}"
                raise InputError(place, value, "a whole number")


def _item_list(items: Mapping[str, Any]) -> list[str]:
    ids = items.get("ids")
    if not isinstance(ids, list | tuple) or not ids:
        expected = "a list of the frozen items (a manifest alone is not resolved)"
        raise InputError("evaluator items.ids", ids, expected)
    for index, item in enumerate(ids):
        if not is_text(item):
            raise InputError(f"evaluator items.ids[{index}]", item, "text that names an item")
    if len(set(ids)) != len(ids):
        raise InputError("evaluator items.ids", len(ids), "each item once")
    return list(ids)


def _evaluators(
    criterion: Criterion, roles: Mapping[str, str], observations: Observations
) -> list[str]:
    used = rows_of(criterion, arms_of(criterion, roles), observations)
    return list(dict.fromkeys(observations.evaluator_ids[i] for i in used.tolist()))


def _means(
    rule: DecisionRule, criterion: Criterion, arm: str, observations: Observations
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield the mean of an arm at each scheduled seed."""
    rows = rows_of(criterion, [arm], observations)
    seeds = positions_in(observations.seeds, rule.seeds)[rows]
    for position, seed in enumerate(rule.seeds):
        yield (seed,), float(observations.values[rows[seeds == position]].mean())


def _check_score(
    scores: Sequence[Mapping[str, Any]],
    criterion: Criterion,
    arm: str,
    evaluator: str,
    seeds: tuple[int, ...],
    mean: float,
    rule: DecisionRule,
) -> None:
    place = (
        f"evaluation.scores of arm {show(arm)}, metric {show(criterion.metric)}, seed {seeds[0]}"
    )
    found = [
        score.get("value")
        for score in scores
        if score.get("arm") == arm
        and score.get("metric") == criterion.metric
        and score.get("evaluator_id") == evaluator
        and (
            _is_seed(score.get("seed"), seeds[0]) or (len(rule.seeds) == 1 and "seed" not in score)
        )
    ]
    if not found:
        raise InputError(place, None, "the unrounded mean of the observations")
    for value in found:
        if not is_number(value) or abs(value - mean) > MEAN_TOLERANCE * max(1.0, abs(mean)):
            raise InputError(place, value, f"{mean!r}, the unrounded mean of the observations")


def _is_seed(value: object, seed: int) -> bool:
    return not isinstance(value, bool) and value == seed


def _sentence(error: InputError) -> str:
    return f"{error}."


def _not_read(error: NotRetainedError) -> str:
    """Return the contract's sentence for a file that is not there, our own for the rest."""
    if error.expected == "a retained file":
        return NOT_RETAINED
    return f"Observations were not read: {error}."


@dataclass(frozen=True, slots=True)
class FinalVerdict:
    """The verdict on the spec's hypothesis, and the computed one beside it.

    Attributes:
        verdict: ``supported``, ``refuted`` or ``inconclusive``; never more than was computed.
        outcome_reason: the contract's reason that goes with it.
        computed: what the rule gave, before anything was withheld.
        withheld: why the verdict is not the computed one; empty where it is.
        changed_experiment_verdict: the computed verdict, where it is one about the experiment that
            was run in place of the spec's.
    """

    verdict: str
    outcome_reason: str
    computed: str
    withheld: tuple[str, ...] = ()
    changed_experiment_verdict: str | None = None

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return {
            "verdict": self.verdict,
            "outcome_reason": self.outcome_reason,
            "computed": self.computed,
            "withheld": list(self.withheld),
            "changed_experiment_verdict": self.changed_experiment_verdict,
        }


def final_verdict(
    decision: DecisionResult,
    *,
    gates: Mapping[str, str],
    original_hypothesis_tested: bool = True,
    tested_instead: str | None = None,
    deviations: Sequence[Mapping[str, Any]] = (),
    every_arm_completed: bool = True,
) -> FinalVerdict:
    """Say what a run may claim: the computed verdict, less what its gates withhold.

    A gate that was accepted as unverified at launch still withholds; so does a changed hypothesis.

    Args:
        decision: what the rule gave.
        gates: name to status of every gate of the run.
        original_hypothesis_tested: False where the run tests another claim than the spec's.
        tested_instead: that claim, in words.
        deviations: the recorded deviations.
        every_arm_completed: whether every arm was trained and evaluated as planned.
    """
    computed = decision.status if decision.status in DEFINITIVE else "inconclusive"
    if not every_arm_completed:
        missing = ("Not every arm was completed.",)
        return FinalVerdict("inconclusive", "incomplete_execution", computed, missing)
    output = {
        "status": "succeeded",
        "verdict": computed,
        "original_hypothesis_tested": original_hypothesis_tested,
        "tested_instead": tested_instead,
        "deviations": list(deviations),
    }
    judged = verdict.judge(output, gates=gates)
    reason = decision.outcome_reason or "insufficient_evidence"
    if judged.verdict != computed:
        reason = "insufficient_evidence"
    return FinalVerdict(
        verdict=judged.verdict,
        outcome_reason=reason,
        computed=computed,
        withheld=judged.reasons if computed in DEFINITIVE else (),
        changed_experiment_verdict=judged.changed_experiment_verdict,
    )
