"""What a report says, read from the files of a sealed bundle and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from evidence.canonical import loads_strict
from evidence.episode_metrics import FAILED
from evidence.ledger import LEDGER
from evidence.manifest import MANIFEST, read_manifest, whole_file
from evidence.report_changes import change_words
from evidence.report_episodes import EpisodeTable, episode_tables
from evidence.report_text import finite, number
from evidence.values import as_list, as_mapping, spec_mapping
from evidence.verdict_inputs import final_verdict, judge_decision, newest_gates, roles_of

GATE_ORDER = (
    *("spec_preflight", "service_probe", "conformance", "generation_audit", "correctness"),
    *("restoration", "forced_checks"),
    *("evaluator", "activation", "feasibility"),
)
"""The order in which gates are asked; others follow by name."""

RESTORES = "restores.jsonl"
NOT_IN_BUNDLE = "not in the bundle"
"""Said of a number whose file was left out."""
VERDICT_WORDS = {
    "supported": "The hypothesis is supported.",
    "refuted": "The hypothesis is refuted.",
    "inconclusive": "The comparison is inconclusive.",
}
REASON_WORDS = {
    "supported": "Every criterion's interval lies entirely above its margin.",
    "refuted": "Every criterion's interval lies entirely below its margin.",
    "tie": "The difference lies in the tie band that the spec names.",
    "mixed_criteria": "Some criteria pass and others fail.",
    "insufficient_evidence": "The evidence cannot settle the hypothesis.",
    "incomplete_execution": "Something that the comparison needs was not carried out.",
}


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: an arm's values over steps; None where there is no finite value."""

    name: str
    points: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """Several series of one quantity.

    Attributes:
        title: what is shown.
        x: name of the horizontal axis.
        y: name of the vertical axis, with its unit.
        series: one per arm.
        source: the file the numbers come from.
        notes: values that cannot be drawn, in words.
        reading: one sentence on how to read it.
    """

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    source: str
    notes: tuple[str, ...]
    reading: str


class ReportData:
    """A bundle's files, as a report needs them.

    Args:
        files: bytes by name.
        folder: where they lie, for the reader.
        transcripts: name of the page of transcripts beside the report, if there is one.
    """

    def __init__(
        self, files: Mapping[str, bytes], *, folder: str, transcripts: str | None = None
    ) -> None:
        self.files = files
        self.folder = folder
        self.transcripts = transcripts
        read = read_manifest(files[MANIFEST], where=MANIFEST)
        self.manifest = read.record
        self._entries = read.entries
        self.spec = spec_mapping(self._json("spec.json"))
        self.execution = self._json("execution.json")
        self.identity = as_mapping(self._json("identity.json"))
        self.result = as_mapping(self._json("result.json"))
        self.decision = as_mapping(self._json("decision.json"))
        self.roles = roles_of(self.execution)

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return str(self.manifest.get("run_id"))

    @property
    def title(self) -> str:
        """The spec's title."""
        return str(self.spec.get("title", "Untitled comparison"))

    @property
    def verdict(self) -> str:
        """The posted verdict, or ``running``."""
        return str(self.result.get("verdict") or self.result.get("status"))

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        return VERDICT_WORDS.get(self.verdict, "The run has not ended.")

    @property
    def reason(self) -> str:
        """The contract's reason in one sentence."""
        return REASON_WORDS.get(str(self.result.get("outcome_reason")), "")

    @cached_property
    def criteria(self) -> list[Mapping[str, Any]]:
        """The recomputed criteria."""
        validation = as_mapping(self.decision.get("decision_validation"))
        return [as_mapping(one) for one in as_list(validation.get("criteria"))]

    @property
    def issues(self) -> list[str]:
        """Why the decision is not settled or could not be computed."""
        validation = as_mapping(self.decision.get("decision_validation"))
        return [str(issue) for issue in as_list(validation.get("issues"))]

    @cached_property
    def withheld(self) -> tuple[str, list[str], str | None]:
        """The computed verdict, why it is not the posted one, and the changed experiment's."""
        judged, _ = judge_decision(self.spec, self.result, self.execution, self.files)
        statuses = {name: str(gate.get("status")) for name, gate in self.gates.items()}
        final = final_verdict(
            judged,
            spec=self.spec,
            result=self.result,
            gates=statuses,
            files=self.files,
            identity=self.identity,
        )
        return final.computed, list(final.withheld), final.changed_experiment_verdict

    @cached_property
    def gates(self) -> dict[str, Mapping[str, Any]]:
        """The newest record of each gate, in the order in which they are asked."""
        found = newest_gates(self.files)
        known = [name for name in GATE_ORDER if name in found]
        return {name: found[name] for name in dict.fromkeys([*known, *found])}

    @property
    def deviations(self) -> list[Mapping[str, Any]]:
        """The recorded deviations."""
        return [as_mapping(entry) for entry in as_list(self.result.get("deviations"))]

    @property
    def per_arm(self) -> dict[str, Mapping[str, Any]]:
        """Posted metrics by arm, the base model first."""
        arms = as_mapping(as_mapping(self.result.get("metrics")).get("arms"))
        return {str(name): as_mapping(found) for name, found in arms.items()}

    @cached_property
    def episodes(self) -> list[EpisodeTable]:
        """Scores, endings and unusable input of every evaluation and phase."""
        return episode_tables(self._rows("metrics-episodes.jsonl"), self._failed_partners())

    def _failed_partners(self) -> dict[str, int]:
        """How often a simulator or judge gave no usable answer at all."""
        events = [event for event in self._rows(LEDGER) if event.get("event") == FAILED]
        return dict(Counter(str(event.get("partner")) for event in events))

    @property
    def descriptive(self) -> list[Mapping[str, Any]]:
        """Other intervals and tests beside the frozen rule."""
        return [as_mapping(row) for row in as_list(self.decision.get("descriptive"))]

    def effect_words(self, criterion: Mapping[str, Any]) -> str:
        """Say which arms a criterion compares, e.g. ``dppo minus grpo``."""
        rule = as_mapping(self.spec.get("decision_rule"))
        planned = next(
            (
                as_mapping(one)
                for one in as_list(rule.get("criteria"))
                if as_mapping(one).get("id") == criterion.get("id")
            ),
            {},
        )
        words = ""
        weights = as_mapping(planned.get("weights"))
        for role, weight in sorted(weights.items(), key=lambda item: -(finite(item[1]) or 0.0)):
            value = finite(weight) or 0.0
            factor = "" if abs(value) == 1.0 else f"{number(abs(value))} x "
            sign = " minus " if value < 0 and words else "minus " if value < 0 else " plus "
            words += f"{sign if words or value < 0 else ''}{factor}{self.roles.get(role, role)}"
        return words or "effect"

    def what_would_change(self, criterion: Mapping[str, Any]) -> str:
        """Say what would settle a criterion, or by how much it is settled."""
        return change_words(criterion, rule=self.spec.get("decision_rule"))

    @cached_property
    def charts(self) -> list[Chart]:
        """Reward, accuracy, masking and drift curves per arm."""
        steps, updates = self._rows("metrics-steps.jsonl"), self._rows("metrics-updates.jsonl")
        wanted = (
            ("reward_mean", "Mean reward", "reward", steps, "Higher is better; same data order."),
            ("correct_fraction", "Correct in training", "fraction", steps, "Share graded correct."),
            (
                "masked_fraction",
                "Gradient removed by the loss",
                "fraction of loss tokens",
                updates,
                "Tokens with an advantage whose gradient the clip or mask took away.",
            ),
            (
                "drift_abs_q90",
                "Policy drift",
                "90th percentile of |p - q|",
                updates,
                "How far the policy being trained is from the one that sampled, before each step.",
            ),
        )
        charts = []
        for column, title, unit, rows, reading in wanted:
            is_step = rows is steps
            chart = _chart(rows, column, title, unit, is_step=is_step, reading=reading)
            if chart is not None:
                charts.append(chart)
        return charts

    @cached_property
    def seconds(self) -> float | None:
        """Wall time from the first event to the last posted result."""
        events = self._rows(LEDGER)
        posted = [event for event in events if event.get("event") == "result"]
        if not events or not posted:
            return None
        first, last = _moment(events[0].get("at")), _moment(posted[-1].get("at"))
        return (last - first).total_seconds() if first and last else None

    @cached_property
    def attempts(self) -> int | str:
        """How many attempts were closed; words where the bundle does not tell."""
        if not self._has(LEDGER):
            return NOT_IN_BUNDLE
        return len([one for one in self._rows(LEDGER) if one.get("event") == "attempt_closed"])

    @cached_property
    def restores(self) -> int | str:
        """How often a checkpoint was loaded after creation; words where the bundle does not tell."""
        if not self._has(RESTORES):
            return NOT_IN_BUNDLE
        return len([row for row in self._rows(RESTORES) if row.get("restore", 0) > 0])

    @property
    def sources(self) -> list[Mapping[str, Any]]:
        """The manifest's entries."""
        return [as_mapping(entry) for entry in as_list(self.manifest.get("files"))]

    @property
    def omitted(self) -> list[Mapping[str, Any]]:
        """Files that did not fit into the bundle."""
        return [as_mapping(entry) for entry in as_list(self.manifest.get("omitted"))]

    def _json(self, name: str) -> Any:
        data = self.files.get(name)
        return None if data is None else loads_strict(data, where=name)

    def _has(self, name: str) -> bool:
        return whole_file(name, self.files, self._entries) is not None

    def _rows(self, name: str) -> list[Mapping[str, Any]]:
        """Return the rows of a JSON Lines file, whole or in parts; none where it is not there."""
        data = whole_file(name, self.files, self._entries) or b""
        return [as_mapping(loads_strict(line, where=name)) for line in data.splitlines() if line]


def _chart(
    rows: Sequence[Mapping[str, Any]],
    column: str,
    title: str,
    unit: str,
    *,
    is_step: bool,
    reading: str,
) -> Chart | None:
    x = "step" if is_step else "update"
    by_arm: dict[str, list[tuple[float, Any]]] = {}
    for row in rows:
        if row.get("phase") == "train" and row.get(column) is not None:
            by_arm.setdefault(str(row.get("arm")), []).append((float(row[x]), row[column]))
    if not by_arm:
        return None
    series = tuple(
        Series(arm, tuple((at, finite(value)) for at, value in sorted(points, key=lambda p: p[0])))
        for arm, points in sorted(by_arm.items())
    )
    return Chart(
        title=title,
        x="rollout step" if is_step else "optimizer step",
        y=unit,
        series=series,
        source="metrics-steps.jsonl" if is_step else "metrics-updates.jsonl",
        notes=tuple(_notes(by_arm, x)),
        reading=reading,
    )


def _notes(by_arm: Mapping[str, Sequence[tuple[float, Any]]], x: str) -> Iterator[str]:
    for arm, points in sorted(by_arm.items()):
        for at, value in points:
            if finite(value) is None:
                yield f"{arm} at {x} {at:.0f}: {number(value)}"


def _moment(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None
