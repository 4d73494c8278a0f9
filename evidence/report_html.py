"""The report as one HTML page that loads nothing: style and pictures are part of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evidence.charts import interval_svg, line_svg, marker
from evidence.report_data import Chart, ReportData
from evidence.report_style import document
from evidence.report_text import duration, finite, html_text, number, size
from evidence.values import as_list, as_mapping
from evidence.verify import NEVER_CHECKED

_STATUS_MARKS = {
    "passed": "✓",
    "supported": "✓",
    "failed": "✕",
    "refuted": "✕",
    "not_applicable": "–",
}
_MAX_CHECKS = 40
_MAX_POINTS = 400


def html_page(data: ReportData) -> str:
    """Return the whole page."""
    sections = [
        _verdict(data),
        _question(data),
        _decision(data),
        _scores(data),
        _episodes(data),
        _gates(data),
        _curves(data),
        _deviations(data),
        _execution(data),
        _sources(data),
    ]
    return document(
        title=f"{html_text(data.title)}: {html_text(data.verdict)}",
        body="\n".join(section for section in sections if section),
    )


def _section(title: str, body: str, *, lead: str = "") -> str:
    anchor = "".join(c if c.isalnum() else "-" for c in title.lower())
    intro = f'<p class="lead">{lead}</p>' if lead else ""
    return (
        f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{html_text(title)}</h2>'
        f"{intro}{body}</section>"
    )


def _badge(status: str) -> str:
    mark = _STATUS_MARKS.get(status, "?")
    kind = {"supported": "passed", "refuted": "failed"}.get(status, status)
    words = status.replace("_", " ")
    return (
        f'<span class="badge {html_text(kind)}"><span aria-hidden="true">{mark}</span> '
        f"{html_text(words)}</span>"
    )


def _table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are HTML already, the first of each row names the row."""
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    head = "".join(f'<th scope="col">{html_text(name)}</th>' for name in heads)
    return (
        f'<div class="wide"><table><caption>{html_text(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _verdict(data: ReportData) -> str:
    facts = {
        "Run": data.run_id,
        "Model": data.spec.get("base_model", "not stated"),
        "Arms": ", ".join(name for name in data.per_arm if name != "base") or "none finished",
        "Held-out items": number(_items(data)),
        "Wall time": duration(data.seconds),
    }
    listed = "".join(
        f"<div><dt>{html_text(name)}</dt><dd>{html_text(value)}</dd></div>"
        for name, value in facts.items()
    )
    return (
        f'<header class="verdict {html_text(data.verdict)}">'
        f'<p class="eyebrow">Pre-registered comparison</p><h1>{html_text(data.title)}</h1>'
        f'<p class="answer">{_badge(data.verdict)} <strong>{html_text(data.headline)}</strong> '
        f"{html_text(data.reason)}</p>"
        f"<p>{html_text(data.result.get('summary', ''))}</p>"
        f"{_withheld(data)}<dl>{listed}</dl></header>"
    )


def _withheld(data: ReportData) -> str:
    computed, reasons, changed = data.withheld
    notes = ""
    if reasons:
        items = "".join(f"<li>{html_text(reason)}</li>" for reason in reasons)
        notes += (
            f"<p>The frozen rule alone gives {_badge(computed)}, but the verdict is withheld:</p>"
            f"<ul>{items}</ul>"
        )
    if changed is not None:
        instead = data.result.get("tested_instead") or "the changed experiment"
        notes += (
            f"<p>For what was run instead (<q>{html_text(instead)}</q>) the rule gives "
            f"{_badge(changed)}.</p>"
        )
    return f'<div class="note">{notes}</div>' if notes else ""


def _items(data: ReportData) -> Any:
    return data.criteria[0].get("n_items") if data.criteria else None


def _question(data: ReportData) -> str:
    pairs = {
        "Hypothesis": data.spec.get("hypothesis"),
        "Success criterion": data.spec.get("success_criterion"),
    }
    body = "".join(
        f"<dt>{name}</dt><dd>{html_text(text)}</dd>" for name, text in pairs.items() if text
    )
    lead = "Fixed before anything was trained; the spec's digest is below."
    return _section("The question", f'<dl class="prose">{body}</dl>', lead=lead) if body else ""


def _decision(data: ReportData) -> str:
    lead = (
        "The bar is the interval around the measured difference, wide enough to hold for every "
        "criterion at once. It settles a criterion only if all of it lies on one side of the "
        "margin."
    )
    blocks = [_criterion(data, criterion) for criterion in data.criteria]
    blocks += [f'<p class="issue">{html_text(issue)}</p>' for issue in data.issues]
    if not blocks:
        blocks = ["<p>No decision was computed: the run ended before the arms were compared.</p>"]
    return _section("The interval against the margin", "".join(blocks) + _others(data), lead=lead)


def _criterion(data: ReportData, criterion: Mapping[str, Any]) -> str:
    values = {name: finite(criterion.get(name)) for name in ("effect", "lower", "upper", "margin")}
    known = {name: value for name, value in values.items() if value is not None}
    words = data.effect_words(criterion)
    name = str(criterion.get("id"))
    picture = ""
    if len(known) == len(values):
        picture = f'<figure class="picture">{interval_svg(name, words=words, **known)}</figure>'
    return (
        f"<h3>{html_text(name)}: {html_text(criterion.get('metric'))} "
        f"{_badge(str(criterion.get('status')))}</h3>"
        f"<p>{html_text(words)} is <strong>{number(criterion.get('effect'), signed=True)}</strong>, "
        f"interval {number(criterion.get('lower'), signed=True)} to "
        f"{number(criterion.get('upper'), signed=True)}, "
        f"on {number(criterion.get('n_items'))} items.</p>{picture}"
        f"<p><strong>What would change it.</strong> "
        f"{html_text(data.what_would_change(criterion))}</p>"
    )


def _others(data: ReportData) -> str:
    if not data.descriptive:
        return ""
    rows = [
        (
            html_text(str(row.get("method")).replace("_", " ")),
            html_text(row.get("criterion")),
            number(row.get("lower"), signed=True) if row.get("lower") is not None else "",
            number(row.get("upper"), signed=True) if row.get("upper") is not None else "",
            number(row.get("p_value")) if row.get("p_value") is not None else "",
            html_text(row.get("note", "")),
        )
        for row in data.descriptive
    ]
    scope = f"<p>{html_text(data.decision.get('scope') or '')}</p>"
    heads = ("Method", "Criterion", "Lower", "Upper", "p", "Note")
    table = _table("Other intervals and tests, described only; they decide nothing", heads, rows)
    return f"{scope}<details><summary>Other ways to look at it</summary>{table}</details>"


def _scores(data: ReportData) -> str:
    names = list(dict.fromkeys(metric for found in data.per_arm.values() for metric in found))
    if not names:
        return ""
    rows = [
        (
            html_text(name.replace("_", " ")),
            *(number(found[name]) if name in found else "" for found in data.per_arm.values()),
        )
        for name in names
    ]
    heads = [f"{arm}{_role(data, arm)}" for arm in data.per_arm]
    table = _table("Posted numbers by arm", ("Number", *heads), rows)
    return _section("Scores", table, lead="The base model is the model before any training.")


def _episodes(data: ReportData) -> str:
    tables = "".join(
        _table(
            f"{table.title}. {table.reading}",
            ("What", *table.heads),
            [tuple(html_text(cell) for cell in row) for row in table.rows],
        )
        for table in data.episodes
    )
    link = ""
    if data.transcripts:
        link = (
            f'<p><a href="{html_text(data.transcripts)}">Transcripts of chosen episodes</a>, turn '
            "by turn, with every token coloured by its advantage.</p>"
        )
    return _section("Episodes", tables + link) if tables or link else ""


def _role(data: ReportData, arm: str) -> str:
    role = next((role for role, name in data.roles.items() if name == arm), None)
    return f" ({role})" if role else ""


def _gates(data: ReportData) -> str:
    lead = (
        "Gates stand between the spec and the verdict. One that fails stops the run; one whose "
        "evidence is missing is unverified and withholds the verdict."
    )
    rows = [
        (
            html_text(name.replace("_", " ")),
            _badge(str(gate.get("status"))),
            "<br>".join(html_text(reason) for reason in as_list(gate.get("reasons"))),
            _checks(gate),
        )
        for name, gate in data.gates.items()
    ]
    if not rows:
        return _section("Gates", "<p>No gate has answered yet.</p>", lead=lead)
    return _section(
        "Gates", _table("Gates", ("Gate", "Status", "Reasons", "Checks"), rows), lead=lead
    )


def _checks(gate: Mapping[str, Any]) -> str:
    checks = [as_mapping(check) for check in as_list(gate.get("checks"))]
    if not checks:
        return ""
    items = "".join(
        f"<li>{html_text(_check_name(check))}: {html_text(check.get('status'))}"
        f"{_measured(check)}</li>"
        for check in checks[:_MAX_CHECKS]
    )
    more = len(checks) - _MAX_CHECKS
    items += f"<li>and {more} more, in the gate's record</li>" if more > 0 else ""
    return f"<details><summary>{_counted(len(checks), 'check')}</summary><ul>{items}</ul></details>"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _check_name(check: Mapping[str, Any]) -> str:
    path = check.get("path")
    return f"{path} / {check.get('check')}" if path else str(check.get("check"))


def _measured(check: Mapping[str, Any]) -> str:
    measured, tolerance = check.get("measured"), check.get("tolerance")
    text = ""
    if isinstance(measured, int | float | str):
        text += f", measured {html_text(number(measured))}"
    if isinstance(tolerance, int | float | str):
        text += f", bound {html_text(number(tolerance))}"
    return f'<span class="muted">{text}</span>' if text else ""


def _curves(data: ReportData) -> str:
    if not data.charts:
        return ""
    body = "".join(_figure(chart, index) for index, chart in enumerate(data.charts))
    lead = "Each arm has its own colour and marker. Gaps are values that are no finite number."
    return _section("Training", f'<div class="charts">{body}</div>', lead=lead)


def _figure(chart: Chart, index: int) -> str:
    legend = "".join(
        f"<span>{marker(i)} {html_text(series.name)}</span>"
        for i, series in enumerate(chart.series)
    )
    notes = "".join(f"<li>{html_text(note)}</li>" for note in chart.notes[:10])
    rows = [
        (html_text(series.name), number(x), number(y) if y is not None else "no finite value")
        for series in chart.series
        for x, y in series.points[:_MAX_POINTS]
    ]
    return (
        f"<figure><h3>{html_text(chart.title)}</h3>"
        f'<p class="legend">{legend}</p>{line_svg(chart, index=index)}'
        f"<figcaption>{html_text(chart.reading)} From {html_text(chart.source)}.</figcaption>"
        + (f'<ul class="note">{notes}</ul>' if notes else "")
        + "<details><summary>Numbers</summary>"
        + _table(chart.title, ("Arm", chart.x, chart.y), rows)
        + "</details></figure>"
    )


def _deviations(data: ReportData) -> str:
    if not data.deviations:
        return _section("Deviations", "<p>None: the spec was executed as written.</p>")
    rows = [
        tuple(
            html_text(entry.get(name, "")) for name in ("field", "original", "effective", "reason")
        )
        for entry in data.deviations
    ]
    heads = ("What", "In the spec", "Executed", "Why")
    lead = "Recorded before the training that they concern."
    return _section("Deviations", _table("Deviations from the spec", heads, rows), lead=lead)


def _execution(data: ReportData) -> str:
    feasibility = as_mapping(data.gates.get("feasibility", {}).get("validation"))
    observed = as_mapping(data.result.get("observed_usage"))
    pairs = {
        "Projected wall time": duration(finite(feasibility.get("wall_seconds"))),
        "Observed wall time": duration(finite(observed.get("wall_seconds")) or data.seconds),
        "Projected GPU-hours": number(feasibility.get("gpu_hours")),
        "Observed GPU-hours": number(observed.get("gpu_hours")),
        "Attempts": number(data.attempts),
        "Restores from a checkpoint": number(data.restores),
    }
    rows = [(html_text(name), html_text(value)) for name, value in pairs.items()]
    table = _table("Time and interruptions", ("What", "Value"), rows)
    return _section("How the run went", table)


def _sources(data: ReportData) -> str:
    rows = [
        (
            html_text(entry.get("name")),
            html_text(str(entry.get("kind")).replace("_", " ")),
            number(entry["rows"]) if "rows" in entry else "",
            html_text(size(int(entry.get("size", 0)))),
            f"<code>{html_text(entry.get('sha256'))}</code>",
        )
        for entry in data.sources
    ]
    table = _table("Files of the bundle", ("File", "Kind", "Rows", "Size", "SHA-256"), rows)
    omitted = "".join(
        f"<li>{html_text(entry.get('name'))}: {html_text(entry.get('reason'))}</li>"
        for entry in data.omitted
    )
    unchecked = "".join(f"<li>{html_text(text)}</li>" for text in NEVER_CHECKED)
    body = (
        "<p>Decision: <code>scored-observations.jsonl</code>, recomputed in "
        "<code>decision.json</code>. Scores: <code>result.json</code>, from the predictions. Gates: "
        "the <code>gate-*.json</code> files. Curves: <code>metrics-steps.jsonl</code> and "
        "<code>metrics-updates.jsonl</code>.</p>"
        f"<p>Check all of it offline: <code>gated-rl verify {html_text(data.folder)}</code></p>"
        f"<details><summary>{len(rows)} files with their hashes</summary>{table}</details>"
        + (f"<p>Left out of the bundle:</p><ul>{omitted}</ul>" if omitted else "")
        + f"<p>What no file can show:</p><ul>{unchecked}</ul>"
    )
    lead = f"Every number on this page comes from the bundle of run {html_text(data.run_id)}."
    return _section("Where the numbers come from", body, lead=lead)
