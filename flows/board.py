"""What a run shows while it works, as pages of Markdown made from the run directory alone."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from evidence.charts import line_svg
from evidence.report_data import GATE_ORDER, Chart, Series
from evidence.report_style import STYLE
from evidence.report_text import duration, finite, markdown_text, number
from evidence.run import Run
from evidence.step_metrics import metrics_of_step
from evidence.values import as_list, as_mapping

FILES_VARIABLE = "GATED_RL_FILES"
"""Environment variable with the address of the file server over the folder of runs."""
_CURVES = (
    ("reward_mean", "Mean reward", "reward"),
    ("correct_fraction", "Correct in training", "fraction"),
)


@dataclass(frozen=True, slots=True)
class Page:
    """One page.

    Attributes:
        kind: what it shows; letters and dashes.
        title: its heading.
        markdown: its text.
    """

    kind: str
    title: str
    markdown: str


class Links:
    """Links into a run directory: addresses of the file server, or paths where there is none."""

    def __init__(self, run: Run, address: str | None) -> None:
        self._run, self._address = run, address

    @classmethod
    def of(cls, run: Run) -> Links:
        """Links for the file server that the environment names."""
        return cls(run, os.environ.get(FILES_VARIABLE))

    def view(self, path: str, words: str | None = None) -> str:
        """A link to a page that shows a file."""
        return self._link("view", path, words or path)

    def raw(self, path: str, words: str) -> str:
        """A link to the bytes of a file."""
        return self._link("raw", path, words)

    def _link(self, how: str, path: str, words: str) -> str:
        if self._address is None:
            return f"`{path}`" if how == "view" else ""
        target = quote(f"{self._run.run_id}/{path}")
        shown = markdown_text(words).replace("\\_", "_")  # inside a link the page shows the escape
        return f"[{shown}]({self._address}/{how}/{target})"


class Board:
    """The pages of one run. It remembers the numbers of steps that cannot change any more."""

    def __init__(self, run: Run, links: Links) -> None:
        self._run, self._links = run, links
        self._steps: dict[tuple[Any, ...], Mapping[str, Any]] = {}

    def pages(self) -> list[Page]:
        """The pages that there is something to say on."""
        result = self._run.result() or {}
        found = [
            self._gates(),
            self._feasibility(),
            self._rewards(),
            self._tables(),
            self._verdict(result),
        ]
        return [page for page in found if page is not None]

    def _gates(self) -> Page | None:
        gates = self._run.gates()
        if not gates:
            return None
        paths = sorted(self._run.files("gates"), key=len)
        known = [name for name in GATE_ORDER if name in gates]
        rows = []
        for name in dict.fromkeys([*known, *gates]):
            gate = gates[name]
            newest = [path for path in paths if path.startswith(f"gates/{name}.")]
            shown = self._links.view(newest[-1], name) if newest else markdown_text(name)
            rows.append((shown, f"**{gate.status}**", "; ".join(map(markdown_text, gate.reasons))))
        return Page("gates", "Gates", _table(("gate", "status", "reasons"), rows))

    def _feasibility(self) -> Page | None:
        gate = self._run.gates().get("feasibility")
        if gate is None:
            return None
        found = as_mapping(gate.validation)
        minutes = finite(as_mapping(self._run.spec.get("budget")).get("max_wall_minutes"))
        budget = "no limit" if minutes is None else duration(60.0 * minutes)
        lines = [
            f"The planned run is **{markdown_text(found.get('status', gate.status))}**: projected "
            f"{duration(finite(found.get('wall_seconds')))}, budget {budget}.",
            *(f"* {markdown_text(reason)}" for reason in gate.reasons),
        ]
        rows = [
            (
                markdown_text(name),
                duration(finite(phase.get("wall_seconds"))),
                number(phase.get("planned_units")),
                number(phase.get("gpu_hours")),
            )
            for name, phase in as_mapping(found.get("phases")).items()
        ]
        if rows:
            lines += ["", _table(("phase", "wall time", "units", "GPU hours"), rows)]
        return Page("feasibility", "Feasibility", "\n".join(lines))

    def _rewards(self) -> Page | None:
        rows = self._step_rows()
        parts = []
        for index, (column, title, unit) in enumerate(_CURVES):
            chart = _chart(rows, column, title, unit)
            if chart is not None:
                parts.append(f"### {title}\n\n![{title}]({_picture(line_svg(chart, index=index))})")
                parts.append(_legend(chart))
        if not parts:
            return None
        return Page("rewards", "Reward curves", "\n\n".join(parts))

    def _step_rows(self) -> list[Mapping[str, Any]]:
        for key in self._run.keys("rollouts"):
            if key not in self._steps:  # a table is written once
                self._steps[key] = metrics_of_step(self._run, key)
        return [row for row in self._steps.values() if row["phase"] == "train"]

    def _tables(self) -> Page | None:
        by_table: dict[str, list[str]] = {}
        for path in self._run.files("tables"):
            by_table.setdefault(path.split("/")[1], []).append(path)
        if not by_table:
            return None
        parts = []
        for table, paths in sorted(by_table.items()):
            names = (
                path.removeprefix(f"tables/{table}/").removesuffix(".parquet") for path in paths
            )
            rows = [
                (self._links.view(path, name), self._links.raw(path, "Parquet"))
                for name, path in zip(names, paths, strict=True)
            ]
            parts.append(f"### {markdown_text(table)}\n\n{_table(('rows of', 'file'), rows)}")
        return Page("tables", "Tables", "\n\n".join(parts))

    def _verdict(self, result: Mapping[str, Any]) -> Page | None:
        if result.get("status") not in ("succeeded", "failed"):
            if self._run.attempt == 1:
                return None
            words = f"None yet: attempt {self._run.attempt} is going on."
            return Page("verdict", "Verdict", words)
        verdict = markdown_text(result.get("verdict"))
        reason = str(result.get("outcome_reason", "")).replace("_", " ")
        lines = [f"**{verdict}** ({markdown_text(reason)})", "", markdown_text(result["summary"])]
        block = as_mapping(result.get("capacity_block"))
        if block:
            lines += ["", f"Refused by the service: {markdown_text(block.get('error'))}"]
        withheld = as_list(as_mapping(result.get("verdict_detail")).get("withheld"))
        lines += [f"* {markdown_text(words)}" for words in withheld]
        reports = [name for name in ("report.html", "report.md") if self._run.store.exists(name)]
        if reports:
            lines += ["", f"Report: {', '.join(self._links.raw(n, n) or n for n in reports)}"]
        return Page("verdict", "Verdict", "\n".join(lines))


def percent_done(run: Run) -> float:
    """How much of a run is done, 0 to 100: gates, rollout steps and final evaluations count one each."""
    result = run.result() or {}
    if result.get("status") == "succeeded":
        return 100.0
    execution = as_mapping(run.execution)
    arms = [
        name
        for name, arm in as_mapping(execution.get("arms")).items()
        if as_mapping(arm).get("trained", True)
    ]
    planned, limit = finite(execution.get("rollout_steps")), finite(run.identity.get("limit"))
    steps = min(value for value in (planned or 0.0, limit) if value is not None)
    rolled = {(key[0], key[2]) for key in run.keys("rollouts") if key[1] == "train"}
    completed = [arm for arm in as_list(result.get("completed_arms")) if arm in arms]
    total = len(GATE_ORDER) + len(arms) * (steps + 1)
    done = min(len(run.gates()), len(GATE_ORDER)) + len(rolled) + len(completed)
    return round(100.0 * min(done / total, 1.0), 1)


def _chart(rows: Iterable[Mapping[str, Any]], column: str, title: str, unit: str) -> Chart | None:
    by_arm: dict[str, list[tuple[float, float | None]]] = {}
    for row in rows:
        if row[column] is not None:
            by_arm.setdefault(row["arm"], []).append((float(row["step"]), finite(row[column])))
    if not any(y is not None for points in by_arm.values() for _, y in points):
        return None
    series = tuple(Series(arm, tuple(sorted(points))) for arm, points in sorted(by_arm.items()))
    return Chart(title, "rollout step", unit, series, source="rollouts", notes=(), reading="")


def _legend(chart: Chart) -> str:
    rows = []
    for series, line in zip(chart.series, _line_words(), strict=False):
        x, y = series.points[-1]
        rows.append((markdown_text(series.name), line, f"{x:.0f}", number(y)))
    return _table(("arm", "line", "last step", chart.y), rows)


def _line_words() -> tuple[str, ...]:
    return ("blue, solid", "orange, dashed", "green, dotted", "violet, mixed") * 8


def _picture(svg: str) -> str:
    """A picture that carries its style along: a page of Prefect's brings none of ours."""
    light = STYLE.partition("@media(prefers-color-scheme:dark)")[0]
    rest = STYLE[STYLE.index("svg text{") :].partition("@media print")[0]
    style = f"<style>{light}{rest}svg text{{font-family:sans-serif}}</style>"
    head, _, body = svg.partition(">")
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    whole = f'{head} xmlns="http://www.w3.org/2000/svg" width="660" height="360">{style}{background}{body}'
    return f"data:image/svg+xml;base64,{base64.b64encode(whole.encode()).decode()}"


def _value(value: Any) -> str:
    return markdown_text(number(value) if isinstance(value, int | float) else value)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(lines)
