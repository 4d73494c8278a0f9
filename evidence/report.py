"""The report of a run, for people: `report.md` and one self-contained `report.html`.

Both are rendered from the sealed bundle's files alone, so that they cannot say anything that the
evidence does not. Where episodes were sampled, `transcripts.html` beside them shows a few, read
from the run's tables, whose digests the bundle holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evidence.bundle import read_bundle
from evidence.report_data import ReportData
from evidence.report_html import html_page
from evidence.report_text import duration, finite, markdown_text, number, size
from evidence.run import Run
from evidence.transcripts import read_transcripts
from evidence.transcripts_html import transcripts_page
from evidence.values import as_list, as_mapping
from evidence.verify import NEVER_CHECKED

MARKDOWN = "report.md"
HTML = "report.html"
TRANSCRIPTS = "transcripts.html"


@dataclass(frozen=True, slots=True)
class Report:
    """Where a report lies in the run directory; `transcripts` is None where there are none."""

    markdown: str
    html: str
    transcripts: str | None = None


def write_reports(run: Run) -> Report:
    """Render the report of a run's newest bundle and write both forms, and the transcripts.

    Raises:
        InputError: if the run has no sealed bundle.
    """
    bundle = read_bundle(run)
    shown = write_transcripts(run)
    texts = {
        MARKDOWN: render_markdown(bundle.data, folder=bundle.where, transcripts=shown),
        HTML: render_html(bundle.data, folder=bundle.where, transcripts=shown),
    }
    for name, text in texts.items():
        run.store.replace(name, text.encode("utf-8"))
    return Report(MARKDOWN, HTML, shown)


def write_transcripts(run: Run) -> str | None:
    """Write the page of chosen episodes; returns its name, or None if none was sampled."""
    transcripts = read_transcripts(run)
    if not transcripts:
        return None
    title = str(run.spec.get("title", "Untitled comparison"))
    page = transcripts_page(transcripts, title=title, run_id=run.run_id)
    run.store.replace(TRANSCRIPTS, page.encode("utf-8"))
    return TRANSCRIPTS


def render_html(files: Mapping[str, bytes], *, folder: str, transcripts: str | None = None) -> str:
    """Return the page for a bundle's files.

    Args:
        files: bytes by name.
        folder: where the bundle lies, as the reader would name it.
        transcripts: name of the page of transcripts beside it, if there is one.
    """
    return html_page(ReportData(files, folder=folder, transcripts=transcripts))


def render_markdown(
    files: Mapping[str, bytes], *, folder: str, transcripts: str | None = None
) -> str:
    """Return the report as Markdown; arguments as for `render_html`."""
    data = ReportData(files, folder=folder, transcripts=transcripts)
    parts = (_head, _decision, _scores, _episodes, _gates, _curves, _deviations, _execution)
    return "\n".join(line for part in (*parts, _sources) for line in part(data)) + "\n"


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(markdown_text(cell) for cell in row)} |"
    yield ""


def _head(data: ReportData) -> Iterator[str]:
    yield f"# {markdown_text(data.title)}"
    yield ""
    yield f"**{markdown_text(data.verdict)}.** {data.headline} {data.reason}"
    yield ""
    yield markdown_text(data.result.get("summary", ""))
    yield ""
    computed, reasons, changed = data.withheld
    if reasons:
        yield f"The frozen rule alone gives *{computed}*, but the verdict is withheld:"
        yield ""
        yield from (f"* {markdown_text(reason)}" for reason in reasons)
        yield ""
    if changed is not None:
        instead = markdown_text(data.result.get("tested_instead") or "the changed experiment")
        yield f"For what was run instead ({instead}) the rule gives *{changed}*."
        yield ""
    for name, key in (("Hypothesis", "hypothesis"), ("Success criterion", "success_criterion")):
        if data.spec.get(key):
            yield f"{name}: {markdown_text(data.spec[key])}"
            yield ""


def _decision(data: ReportData) -> Iterator[str]:
    yield "## The interval against the margin"
    yield ""
    yield from (f"* {markdown_text(issue)}" for issue in data.issues)
    if data.criteria:
        names = ("effect", "lower", "upper", "margin")
        rows = [
            (
                one.get("id"),
                one.get("metric"),
                data.effect_words(one),
                *(number(one.get(name), signed=name != "margin") for name in names),
                number(one.get("n_items")),
                one.get("status"),
            )
            for one in data.criteria
        ]
        heads = ("Criterion", "Metric", "Difference", "Effect", "Lower", "Upper", "Margin")
        yield from _table((*heads, "Items", "Status"), rows)
        for one in data.criteria:
            yield f"What would change {markdown_text(one.get('id'))}: {data.what_would_change(one)}"
            yield ""
    else:
        yield "No decision was computed."
        yield ""
    if data.descriptive:
        yield markdown_text(data.decision.get("scope") or "")
        yield ""
        yield "Other intervals and tests, described only; they decide nothing:"
        yield ""
        rows = [
            tuple(
                "" if row.get(name) is None else number(row.get(name))
                for name in ("method", "criterion", "lower", "upper", "p_value", "note")
            )
            for row in data.descriptive
        ]
        yield from _table(("Method", "Criterion", "Lower", "Upper", "p", "Note"), rows)


def _scores(data: ReportData) -> Iterator[str]:
    names = list(dict.fromkeys(metric for found in data.per_arm.values() for metric in found))
    if names:
        yield "## Scores"
        yield ""
        arms = data.per_arm
        rows = [
            (name, *(number(found[name]) if name in found else "" for found in arms.values()))
            for name in names
        ]
        yield from _table(("Number", *map(markdown_text, arms)), rows)


def _episodes(data: ReportData) -> Iterator[str]:
    for index, table in enumerate(data.episodes):
        if index == 0:
            yield "## Episodes"
            yield ""
        yield f"{table.title}. {table.reading}"
        yield ""
        yield from _table(("What", *table.heads), table.rows)
    if data.transcripts:
        yield f"[Transcripts of chosen episodes]({data.transcripts}), turn by turn."
        yield ""


def _gates(data: ReportData) -> Iterator[str]:
    yield "## Gates"
    yield ""
    rows = [
        (name, gate.get("status"), "; ".join(map(str, as_list(gate.get("reasons")))))
        for name, gate in data.gates.items()
    ]
    yield from _table(("Gate", "Status", "Reasons"), rows)


def _curves(data: ReportData) -> Iterator[str]:
    if data.charts:
        yield "## Training"
        yield ""
    for chart in data.charts:
        yield f"{chart.title} ({chart.y}), first and last {chart.x}, from {chart.source}:"
        yield ""
        rows = []
        for series in chart.series:
            values = [y for _, y in series.points if y is not None]
            ends = (values[0], values[-1]) if values else (None, None)
            rows.append((series.name, *(number(value) for value in ends)))
        yield from _table(("Arm", "First", "Last"), rows)
        yield from (f"* {markdown_text(note)}" for note in chart.notes[:10])
        yield ""


def _deviations(data: ReportData) -> Iterator[str]:
    yield "## Deviations"
    yield ""
    if not data.deviations:
        yield "None: the spec was executed as written."
        yield ""
        return
    names = ("field", "original", "effective", "reason")
    rows = [tuple(entry.get(name, "") for name in names) for entry in data.deviations]
    yield from _table(("What", "In the spec", "Executed", "Why"), rows)


def _execution(data: ReportData) -> Iterator[str]:
    projected = as_mapping(data.gates.get("feasibility", {}).get("validation"))
    observed = as_mapping(data.result.get("observed_usage"))
    yield "## How the run went"
    yield ""
    rows = [
        ("Projected wall time", duration(finite(projected.get("wall_seconds")))),
        ("Observed wall time", duration(finite(observed.get("wall_seconds")) or data.seconds)),
        ("Projected GPU-hours", number(projected.get("gpu_hours"))),
        ("Observed GPU-hours", number(observed.get("gpu_hours"))),
        ("Attempts", number(data.attempts)),
        ("Restores from a checkpoint", number(data.restores)),
    ]
    yield from _table(("What", "Value"), rows)


def _sources(data: ReportData) -> Iterator[str]:
    yield "## Where the numbers come from"
    yield ""
    yield f"Check all of it offline: `gated-rl verify {data.folder}`"
    yield ""
    rows = [
        (
            entry.get("name"),
            entry.get("kind"),
            number(entry["rows"]) if "rows" in entry else "",
            size(int(entry.get("size", 0))),
            entry.get("sha256"),
        )
        for entry in data.sources
    ]
    yield from _table(("File", "Kind", "Rows", "Size", "SHA-256"), rows)
    for entry in data.omitted:
        yield f"* left out: {markdown_text(entry.get('name'))} ({markdown_text(entry.get('reason'))})"
    yield "What no file can show:"
    yield ""
    yield from (f"* {text}" for text in NEVER_CHECKED)
